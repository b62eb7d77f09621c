"""What a script sets before its first import: an import before the fork misses it."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile

from clusterrun.node.forge.project import ProjectFiles

# Read when a rank trains, not when a library is imported: an import before the fork is the same.
READ_LATE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_"),
    *("CLUSTERRUN_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "SLURM_"),
    *("PET_", "TORCHELASTIC_", "NCCL_", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_", "TORCH_FR_"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
)
_READ_EARLY = (
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "DS_", "CUDA_HOME", "TQDM_"),
)
_HUB = ("HF_", "HUGGINGFACE_", "XDG_CACHE_HOME")
_READ_BY = {"huggingface_hub": _HUB, "transformers": (*_HUB, "TRANSFORMERS_")}
_VARIABLE = re.compile("[A-Z][A-Z0-9_]*[A-Z0-9]")
_HARMLESS = ("TORCH_HOME", "TORCH_CPP_LOG_LEVEL", "PYTORCH_ENABLE_MPS_", "PYTORCH_NVML_")
_LATE = (*READ_LATE, *_HARMLESS)


def read_early(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the variables that torch, its companions or these modules read at their import."""
    roots = {module.partition(".")[0] for module in modules}
    early = (*_READ_EARLY, *(prefix for root in roots for prefix in _READ_BY.get(root, ())))
    return [name for name in not_late(names) if name.startswith(early)]


def not_late(names: Iterable[str]) -> list[str]:
    """Return the variables of which it is not known that they are read when a rank trains."""
    return sorted({name for name in names if not name.startswith(_LATE)})


def variables(project: ProjectFiles) -> set[str]:
    """Return the variables that a file of a project may set: if it sets any, its texts.

    Those that it only reads are left out.
    """
    found: set[str] = set()
    for nodes in project.files.values():
        named = {alias for node in nodes for alias in _aliases(node)}
        if any(_changes_environ(node, {"environ", *named}) for node in nodes):
            read = {id(each) for node in nodes if _reads(node) for each in ast.walk(node)}
            texts = (text for node in nodes if id(node) not in read for text in _own_texts(node))
            found.update(filter(_VARIABLE.fullmatch, texts))
    return found


def directories(project: ProjectFiles) -> list[str]:
    """Return the directories that a project may put on `sys.path`, as far as its words tell."""
    found: set[str] = set()
    for file, nodes in project.files.items():
        place = os.path.dirname(file)
        above = os.path.dirname(place)
        bases = {place, above, os.path.dirname(above), os.getcwd()}
        for words in (_texts(node) for node in nodes if _changes_path(node)):
            for base in bases:
                found |= {base, os.path.join(base, *words), *(f"{base}/{word}" for word in words)}
    return sorted(map(os.path.normpath, found))


def shadowing(places: Iterable[str], imported: Collection[str]) -> list[str]:
    """Return the modules of these directories that would be imported instead of preloaded ones."""
    roots = {name.partition(".")[0] for name in imported}
    found: set[str] = set()
    for place in places:
        with contextlib.suppress(OSError):
            found |= roots & {_module(entry) for entry in os.scandir(place)}
    return sorted(found)


def _module(entry: os.DirEntry[str]) -> str:
    """Return the name of the module or package that an entry of a directory may be."""
    name, _, rest = entry.name.partition(".")
    if not rest:  # without this file, Python prefers a module of a later directory
        return name if os.path.exists(os.path.join(entry.path, "__init__.py")) else ""
    return name if rest == "py" or rest.endswith("so") else ""


def _own_texts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.keyword):
        return [node.arg or ""]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def _texts(node: ast.AST) -> list[str]:
    return [text for each in ast.walk(node) for text in _own_texts(each)]


def _name(node: ast.AST) -> str:
    """Return the last part of a name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _aliases(node: ast.AST) -> list[str]:
    """Return the names that a statement gives to `os.environ`."""
    match node:
        case ast.alias(name="environ", asname=str() as name):
            return [name]
        case ast.Assign(targets=targets, value=value) if _name(value) == "environ":
            return [_name(target) for target in targets]
    return []


def _changes_environ(node: ast.AST, named: Collection[str]) -> bool:
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=owner) | ast.AugAssign(target=owner):
            return _name(owner) in named
        case ast.Call(func=ast.Attribute(attr="update" | "setdefault" | "pop", value=owner)):
            return _name(owner) in named
        case ast.Call(func=function):
            return _name(function) in ("putenv", "unsetenv")
    return False


def _reads(node: ast.AST) -> bool:
    """Return whether an expression only reads a variable, or keeps what the job has set."""
    match node:
        case ast.Subscript(ctx=ast.Load(), value=owner):
            return _name(owner) == "environ"
        case ast.Call(func=function, args=[ast.Constant(value=first), *_]):
            is_kept = _name(function) == "setdefault" and first in os.environ
            return is_kept or _name(function) in ("get", "getenv")
    return False


def _changes_path(node: ast.AST) -> bool:
    """Return whether a statement puts something first on `sys.path`, or may."""
    match node:
        case ast.Call(func=ast.Attribute(attr="insert", value=ast.Attribute(attr="path"))):
            return True
        case ast.Assign(targets=[ast.Attribute(attr="path")]):
            return True
        case ast.Assign(targets=[ast.Subscript(value=ast.Attribute(attr="path"))]):
            return True
    return False


class RankStart:
    """The variables and the path of a forked rank, before its script runs."""

    def __init__(self, imported: Collection[str]) -> None:
        self._imported = imported
        self._env: Mapping[str, str] = dict(os.environ)
        self._path = frozenset(sys.path)

    def missed(self) -> str:
        """Return what the script has changed since, but too late; "" if nothing."""
        changed = dict(self._env.items() ^ os.environ.items())
        if names := read_early(changed, self._imported):
            text = ", ".join(names)
            return f"the script changes {text} too late: the forge has imported what reads it"
        if names := shadowing(self._new_directories(), self._imported):
            return f"the script has its own {', '.join(names)}, but the forge has imported another"
        return ""

    def _new_directories(self) -> Iterator[str]:
        """Yield those in which Python looks before it looks for installed packages."""
        texts = (path for path in sys.path if isinstance(path, str))  # Python ignores others
        first = takewhile(lambda path: not path.endswith("-packages"), texts)
        return (path for path in first if path not in self._path)
