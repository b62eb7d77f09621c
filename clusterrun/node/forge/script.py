"""What a script sets before its first import: an import before the fork misses it."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from clusterrun.node.forge.preload import shadowing

# Read when a rank trains, not when a library is imported: an import before the fork is the same.
READ_LATE = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_"),
    *("CLUSTERRUN_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "SLURM_"),
    *("PET_", "TORCHELASTIC_", "NCCL_", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_", "TORCH_FR_"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_"),
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
)
_READ_EARLY = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "DS_", "CUDA_HOME")
_BY_PRELOADED = (
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "DATASETS_", "TOKENIZERS_", "WANDB_"),
    *("TRITON_", "XFORMERS_", "FLASH_ATTENTION_", "NVTE_", "BNB_", "BITSANDBYTES_", "MPL"),
)
_VARIABLE = re.compile("[A-Z][A-Z0-9_]*[A-Z0-9]")
_HARMLESS = ("TORCH_HOME", "TORCH_CPP_LOG_LEVEL", "PYTORCH_ENABLE_MPS_", "PYTORCH_NVML_")


def read_early(names: Iterable[str], preloaded: Collection[str]) -> list[str]:
    """Return the variables that libraries read when they are imported.

    `preloaded` are the modules of `launch.preload`.
    """
    early = (*_READ_EARLY, *(_BY_PRELOADED if preloaded else ()))
    late = (*READ_LATE, *_HARMLESS)
    return sorted({name for name in names if name.startswith(early) and not name.startswith(late)})


class ScriptSource:
    """The source that the ranks run; it is empty if it is a module or can't be parsed."""

    def __init__(self, entry: Sequence[str]) -> None:
        self._directory = os.path.dirname(os.path.realpath(entry[0]))
        try:
            with open(entry[0], "rb") as file:
                self._nodes = tuple(ast.walk(ast.parse(file.read())))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            self._nodes = ()

    def variables(self) -> set[str]:
        """Return the variables that it may set: if it sets any, its texts but those it reads."""
        named = {alias for node in self._nodes for alias in _aliases(node)}
        if not any(_changes_environ(node, {"environ", *named}) for node in self._nodes):
            return set()
        read = {id(each) for node in self._nodes if _reads(node) for each in ast.walk(node)}
        texts = {text for node in self._nodes if id(node) not in read for text in _own_texts(node)}
        return set(filter(_VARIABLE.fullmatch, texts))

    def directories(self) -> list[str]:
        """Return the directories that it may put on `sys.path`, as far as its words tell."""
        above = os.path.dirname(self._directory)
        bases = {self._directory, above, os.path.dirname(above), os.getcwd()}
        found: set[str] = set()
        for words in (_texts(node) for node in self._nodes if _changes_path(node)):
            for base in bases:
                found |= {base, os.path.join(base, *words), *(f"{base}/{word}" for word in words)}
        return sorted(map(os.path.normpath, found))


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

    def __init__(self, preloaded: Collection[str], imported: Collection[str]) -> None:
        self._preloaded, self._imported = preloaded, imported
        self._env: Mapping[str, str] = dict(os.environ)
        self._path = frozenset(sys.path)

    def missed(self) -> str:
        """Return what the script has changed since, but too late; "" if nothing."""
        changed = dict(self._env.items() ^ os.environ.items())
        if names := read_early(changed, self._preloaded):
            text = ", ".join(names)
            return f"the script changes {text} too late: the forge has imported what reads it"
        if names := shadowing(self._new_directories(), self._imported):
            return f"the script has its own {', '.join(names)}, but the forge has imported another"
        return ""

    def _new_directories(self) -> Iterator[str]:
        """Yield those in which Python looks before it looks for installed packages."""
        first = takewhile(lambda path: not path.endswith("-packages"), sys.path)
        return (path for path in first if path not in self._path)
