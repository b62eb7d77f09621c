"""The script of a training and the project's modules that it imports, and the variables that they
change: read, not run. An import before the fork misses what they set before their first import.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import resolve_name
from itertools import accumulate, takewhile

_MOST_FILES = 50  # of a project, that are read
_RELEVANT = re.compile(rb"environ|dotenv|putenv|unsetenv|read_env|\.path(?:\.insert|\[| *=)")
_VARIABLE = re.compile("[A-Z][A-Z0-9_]*[A-Z0-9]")
# Of python-dotenv, environs, django-environ, dynaconf and envparse: they set what a file names.
_LOADERS = ("load_dotenv", "read_env", "read_envfile", "set_as_environment_variables")
Nodes = tuple[ast.AST, ...]


class ProjectFiles:
    """What the files of a project say; those that can't be parsed say nothing."""

    def __init__(self, entry: Sequence[str]) -> None:
        # By path, the script first: all nodes of the files that may change variables or sys.path.
        self.files: dict[str, Nodes] = {}
        # The roots of other modules that every rank imports: outside functions and blocks.
        self.imported: set[str] = set()
        self.directories = first_on_path(entry)
        path, package = _script(entry)
        if path:
            self._read(path, package)

    def _read(self, path: str, package: str) -> None:
        """Read a file of `package`, and the project's files that it imports."""
        if path in self.files or len(self.files) >= _MOST_FILES:
            return
        body, is_relevant = _parsed(path)
        all_nodes = (node for statement in body for node in ast.walk(statement))
        self.files[path] = tuple(all_nodes) if is_relevant else ()
        for node in _statements(body):
            is_top_level = node in body
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(alias.name, (), is_top_level=is_top_level)
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
                self._import(_absolute(node, package), names, is_top_level=is_top_level)

    def _import(self, module: str, names: Sequence[str], *, is_top_level: bool) -> None:
        """Read the files of a module, or note one that the project does not have."""
        parents = accumulate(module.split("."), lambda above, name: f"{above}.{name}")  # a, a.b, …
        modules = [*parents, *(f"{module}.{name}" for name in names)]  # a name may be a module
        files = [_file(module, self.directories) for module in modules]
        for path, package in files:
            if path:
                self._read(path, package)
        if is_top_level and not any(path for path, _ in files):
            self.imported.add(module.partition(".")[0])


def first_on_path(entry: Sequence[str]) -> list[str]:
    """Return the directory in which Python looks first for what a script imports, if any."""
    if getattr(sys.flags, "safe_path", False):  # python -P
        return []
    if entry[0] == "-m":
        return [os.getcwd()]
    script = os.path.realpath(entry[0])
    return [script if os.path.isdir(script) else os.path.dirname(script)]


def _script(entry: Sequence[str]) -> tuple[str, str]:
    """Return the file that the ranks run, and its package; empty if it is not found."""
    if entry[0] != "-m":
        path = os.path.realpath(entry[0])
        return (os.path.join(path, "__main__.py") if os.path.isdir(path) else path), ""
    directories = [os.getcwd(), *(path for path in sys.path if isinstance(path, str))]
    main = _file(f"{entry[1]}.__main__", directories)
    return main if main[0] else _file(entry[1], directories)


def _file(module: str, directories: Iterable[str]) -> tuple[str, str]:
    """Return a module's file and package in the first directory that has it; empty if none has."""
    for directory in directories:
        base = os.path.join(directory, *module.split("."))
        if os.path.isfile(path := os.path.join(base, "__init__.py")):
            return path, module
        if os.path.isfile(path := f"{base}.py"):
            return path, module.rpartition(".")[0]
    return "", ""


def _parsed(path: str) -> tuple[list[ast.stmt], bool]:
    """Return the statements of a file, and whether any may change variables or sys.path."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        with open(path, "rb") as file:
            text = file.read()
        return ast.parse(text).body, _RELEVANT.search(text) is not None
    return [], False


def _statements(body: Sequence[ast.stmt]) -> list[ast.AST]:
    """Return the statements of a file, then those in its functions and blocks."""
    found: list[ast.AST] = list(body)
    for node in found:  # the list grows in the loop
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(node, part, ())
    return found


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the module of a `from … import` in a file of `package`; "" if it has too many dots."""
    with contextlib.suppress(ImportError):  # more dots than `package` has parts
        return resolve_name("." * node.level + (node.module or ""), package)
    return ""


class Changes:
    """The variables that a project may set (`names`)."""

    def __init__(self, project: ProjectFiles) -> None:
        self.place = ""  # the first line that may set variables whose names it does not show
        names: set[str] = set()
        for file, nodes in project.files.items():
            meanings = _Meanings(nodes)
            for node in nodes:
                found = meanings.changed(node)
                if found is None and not self.place:
                    self.place = f"{os.path.relpath(file)}:{getattr(node, 'lineno', 0)}"
                names.update(found or ())
        self.names = set(filter(_VARIABLE.fullmatch, names))


class _Meanings:
    """Which names in a file stand for os.environ, and which for a loader of variables."""

    def __init__(self, nodes: Nodes) -> None:
        self._environ, self._loaders = {"environ", "environb"}, {*_LOADERS}
        # An alias or an assignment, such as `env = os.environ`, gives a meaning to one more name.
        pairs: list[tuple[str | None, ast.AST | None]] = [
            *((n.asname, n) for n in nodes if isinstance(n, ast.alias)),
            *((_name(n.targets[0]), n.value) for n in nodes if isinstance(n, ast.Assign)),
            *((_name(n.target), n.value) for n in nodes if isinstance(n, ast.AnnAssign)),
        ]
        for name, value in pairs:
            for meaning in (self._environ, self._loaders):
                if name and _name(value) in meaning:
                    meaning.add(name)

    def changed(self, node: ast.AST) -> list[str] | None:
        """Return the variables that an expression changes; None if it may change any."""
        match node:
            case (
                ast.Subscript(ctx=ast.Store() | ast.Del(), value=owner, slice=value)  # env[…] = …
                | ast.AugAssign(target=owner, value=value)  # env |= {…}
            ):
                return _keys([value]) if _name(owner) in self._environ else []
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._changed_by_call(function, args, keywords)
        return []

    def _changed_by_call(
        self, function: ast.AST, args: Sequence[ast.AST], keywords: Sequence[ast.keyword]
    ) -> list[str] | None:
        """Return the variables that a call changes; None if it may change any."""
        name, owner = _name(function), _name(getattr(function, "value", None))
        is_of_environ = owner in self._environ
        if name in self._loaders or any(keyword.arg in _LOADERS for keyword in keywords):
            return None  # only a file that is loaded shows their names
        if is_of_environ and name == "update":
            return _keys([*args, *keywords])
        if name in ("putenv", "unsetenv") or (is_of_environ and name in ("pop", "__setitem__")):
            return _keys(args[:1])
        if is_of_environ and name == "setdefault":
            keys = _keys(args[:1])
            return None if keys is None else [key for key in keys if key not in os.environ]
        return []


def _keys(nodes: Iterable[ast.AST | None]) -> list[str] | None:
    """Return constants, and the keys of mappings; None if one of them is computed."""
    found: list[str] = []
    queue = list(nodes)
    for node in queue:  # the list grows in the loop
        match node:
            case ast.Constant(value=value) | ast.keyword(arg=str() as value):
                found.append(value.decode() if isinstance(value, bytes) else str(value))
            case ast.Dict(keys=keys, values=values):  # for `**value`, the key is None
                queue.extend(key or value for key, value in zip(keys, values, strict=True))
            case _:
                return None
    return found


def _name(node: ast.AST | None) -> str:
    """Return the name, or the last part of a dotted one, that a node stands for; else ""."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
            return name
    return ""


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
_OF_DATASETS = (
    *("HF_DATASETS_", "DATASETS_", "ARROW_", "JE_ARROW_", "FSSPEC_", "PANDAS_", "NUMEXPR_"),
    *("USE_T", "USE_JAX"),
)
_READ_BY = {
    **{"huggingface_hub": _HUB, "transformers": (*_HUB, "TRANSFORMERS_")},
    "datasets": (*_HUB, *_OF_DATASETS),
}
_HARMLESS = (
    *("TORCH_HOME", "TORCH_CPP_LOG_LEVEL", "PYTORCH_ENABLE_MPS_", "PYTORCH_NVML_", "HF_TOKEN"),
)
# What reads these may be imported by the script alone.
_READERS = {
    "CUDA_HOME": "torch.utils.cpp_extension",
    "DS_": "deepspeed",
    "TORCHDYNAMO_": "torch._dynamo",
    "TORCHINDUCTOR_": "torch._inductor",
    "TQDM_": "tqdm",
    **dict.fromkeys(_OF_DATASETS, "datasets"),
}
_LATE = (*READ_LATE, *_HARMLESS)


def read_early(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return the variables that torch, its companions or these modules read at their import."""
    roots = {module.partition(".")[0] for module in modules}
    early = (*_READ_EARLY, *(prefix for root in roots for prefix in _READ_BY.get(root, ())))
    # A variable of datasets may begin as those of the hub do: HF_DATASETS_ and HF_.
    late = _LATE if "datasets" in roots else (*_LATE, *_OF_DATASETS)
    return sorted(name for name in {*names} if name.startswith(early) and not name.startswith(late))


def directories(project: ProjectFiles) -> list[str]:
    """Return a project's own directories, and those that its constants may put on sys.path."""
    found = set(project.directories)
    for file, nodes in project.files.items():
        own = os.path.dirname(file)
        above = os.path.dirname(own)
        bases = {own, above, os.path.dirname(above), os.getcwd()}
        for parts in _path_texts(nodes):
            for base in bases:
                found |= {base, os.path.join(base, *parts), *(f"{base}/{part}" for part in parts)}
    return sorted(map(os.path.normpath, found))


def shadowing(directories: Iterable[str], imported: Collection[str]) -> list[str]:
    """Return the modules of these directories that would be imported instead of `imported` ones."""
    roots = {name.partition(".")[0] for name in imported}
    found: set[str] = set()
    for directory in directories:
        with contextlib.suppress(OSError):
            found |= roots & {_module(entry) for entry in os.scandir(directory)}
    return sorted(found)


def _module(entry: os.DirEntry[str]) -> str:
    """Return the name of the module or package that an entry of a directory may be; else ""."""
    name, _, suffix = entry.name.partition(".")
    if not suffix:  # without __init__.py, Python prefers a module of a later directory
        return name if os.path.exists(os.path.join(entry.path, "__init__.py")) else ""
    return name if suffix == "py" or suffix.endswith("so") else ""


def _path_texts(nodes: Iterable[ast.AST]) -> Iterator[list[str]]:
    """Yield the text constants of each statement that may put something first on `sys.path`."""
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
        names = {n for n in {*self._env, *os.environ} if self._env.get(n) != os.environ.get(n)}
        return read_early(names, (*self._imported, "datasets"))

    def has_own(self, names: Collection[str]) -> list[str]:
        """Return which of these modules are in what the script has put first on sys.path."""
        texts = (path for path in sys.path if isinstance(path, str))  # Python ignores others
        before_installed = takewhile(lambda path: not path.endswith("-packages"), texts)
        return shadowing((path for path in before_installed if path not in self._path), names)

    def missed(self) -> str:
        """Return what the script has changed after the forge has imported what reads it, or ""."""
        unread = tuple(start for start, module in _READERS.items() if module not in self._imported)
        if variables := [name for name in self.changed() if not name.startswith(unread)]:
            text = ", ".join(variables)
            return f"the script changes {text} too late: the forge has imported what reads it"
        if modules := self.has_own(self._imported):
            text = f"the script has its own {', '.join(modules)}"
            return f"{text}, but the forge has imported installed modules of the same name"
        return ""
