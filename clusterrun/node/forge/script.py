"""What a script sets before its first import: an import before the fork misses it."""

from __future__ import annotations

import ast
import contextlib
import os
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
_HARMLESS = (
    *("TORCH_HOME", "TORCH_CPP_LOG_LEVEL", "PYTORCH_ENABLE_MPS_", "PYTORCH_NVML_"),
    *("HF_TOKEN", "HF_DATASETS_"),
)
# What reads these may be imported by the script alone.
_READERS = {
    "CUDA_HOME": "torch.utils.cpp_extension",
    "DS_": "deepspeed",
    "TORCHDYNAMO_": "torch._dynamo",
    "TORCHINDUCTOR_": "torch._inductor",
    "TQDM_": "tqdm",
}
_LATE = (*READ_LATE, *_HARMLESS)


def read_early(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the variables that torch, its companions or these modules read at their import."""
    roots = {module.partition(".")[0] for module in modules}
    early = (*_READ_EARLY, *(prefix for root in roots for prefix in _READ_BY.get(root, ())))
    return [name for name in not_late(names) if name.startswith(early)]


def not_late(names: Iterable[str]) -> list[str]:
    """Return the variables of which it is not known that they are read when a rank trains."""
    return sorted({name for name in names if not name.startswith(_LATE)})


def directories(project: ProjectFiles) -> list[str]:
    """Return the directories that a project may put on `sys.path`, as far as its words tell."""
    found: set[str] = set()
    for file, nodes in project.files.items():
        place = os.path.dirname(file)
        above = os.path.dirname(place)
        bases = {place, above, os.path.dirname(above), os.getcwd()}
        for words in _path_texts(nodes):
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


def _path_texts(nodes: Iterable[ast.AST]) -> Iterator[list[str]]:
    """Yield the texts in each statement that puts something first on `sys.path`, or may."""
    for node in nodes:
        match node:
            case (
                ast.Call(func=ast.Attribute(attr="insert", value=ast.Attribute(attr="path")))
                | ast.Assign(targets=[ast.Attribute(attr="path")])
                | ast.Assign(targets=[ast.Subscript(value=ast.Attribute(attr="path"))])
            ):
                constants = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
                yield [each.value for each in constants if isinstance(each.value, str)]


class RankStart:
    """The variables and the path of a forked rank, before its script runs."""

    def __init__(self, imported: Collection[str]) -> None:
        self._imported = imported
        self._env: Mapping[str, str] = dict(os.environ)
        self._path = frozenset(sys.path)

    def changed(self) -> list[str]:
        """Return the variables that the script has changed and a library reads at its import."""
        return read_early(dict(self._env.items() ^ os.environ.items()), self._imported)

    def missed(self) -> str:
        """Return what the script has changed since, but too late; "" if nothing."""
        late = tuple(name for name, module in _READERS.items() if module not in self._imported)
        if names := [name for name in self.changed() if not name.startswith(late)]:
            text = ", ".join(names)
            return f"the script changes {text} too late: the forge has imported what reads it"
        texts = (path for path in sys.path if isinstance(path, str))  # Python ignores others
        first = takewhile(lambda path: not path.endswith("-packages"), texts)
        if names := shadowing((path for path in first if path not in self._path), self._imported):
            return f"the script has its own {', '.join(names)}, but the forge has imported another"
        return ""
