"""The rooms of the house, read from the table in docs/architecture.md, and what each may do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "clusterrun"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
PURE_ROWS = range(4)

# Modules that ask the outside world, or write to it.
IMPURE_MODULES = {
    *("asyncio", "concurrent", "ctypes", "curses", "fcntl", "getpass", "grp", "http", "locale"),
    *("logging", "mmap", "multiprocessing", "platform", "pty", "pwd", "random", "resource"),
    *("secrets", "select", "selectors", "shutil", "signal", "smtplib", "socket", "socketserver"),
    *("ssl", "subprocess", "sys", "syslog", "tempfile", "termios", "threading", "time", "urllib"),
    *("accelerate", "click", "deepspeed", "psutil", "rich", "submitit", "torch", "transformers"),
}
IMPURE_CALLS = {"print", "input", "breakpoint", "exec", "eval", "__import__"}
IMPURE_METHODS = {"now", "today", "utcnow", "cwd", "home", "expanduser", "getLogger"}
WRITING_METHODS = {"write_text", "write_bytes", "mkdir", "rmdir", "unlink", "rename", "chmod"}
OS_ALLOWED = {"path", "fspath", "PathLike", "sep"}
OS_PATH_IMPURE = {"abspath", "expanduser", "expandvars"}
# Allowed only where the document says that files are read.
READING_CALLS = {"open"}
READING_METHODS = {
    *("exists", "glob", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "open"),
    *("read_bytes", "read_text", "readlink", "resolve", "rglob", "samefile", "stat"),
}
OS_READING = {"fstat", "getuid", "listdir", "lstat", "scandir", "stat"}
OS_PATH_READING = {
    *("exists", "getsize", "isdir", "isfile", "islink", "lexists", "realpath", "relpath"),
}


def _sentence(pattern: str) -> str:
    """Return what the document says at a place that it must have."""
    found = re.search(pattern, DOCUMENT)
    assert found, pattern
    return found[1]


# What the user's process imports too, so that it stays light.
SHARED = frozenset(
    {"shared.control_page", "shared.checkpoint_files", "shared.files", "shared.given"}
)

# `| row | modules | … |` as {module: row}; `launch/` stands for all within.
ROW = {
    name.rstrip("/"): int(row)
    for row, cell in re.findall(r"^\| (\d+) \| ([^|]+) \|", DOCUMENT, re.MULTILINE)
    for name in re.findall(r"`([\w.]+/?)`", cell)
}
# What runs inside the user's process; which pure modules, or functions of them, may read files;
# and the rooms of `node/`, the lowest first.
_INSIDE = _sentence(r"((?:[^.`]|`[^`]*`)*) runs? inside the user's process")
APART = {name.rstrip("/") for name in re.findall(r"`(\w+/?)`", _INSIDE)}
READERS = set(re.findall(r"`([\w.]+)`", _sentence(r"\(([^()]*) read files\)")))
_ROOMS = _sentence(r"`node/` has eight packages; each imports only those before it: ([^.]*)\.")
NODE_ROOMS = [f"node.{room}" for room in re.findall(r"`(\w+)/` \(", _ROOMS)]


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
INNER = {name for name in SOURCES if name not in ("", "__main__")}


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


def _imports(name: str, tree: ast.AST, *, package: bool) -> Iterator[str]:
    """Yield each imported module with its full name, wherever in the file it is imported."""
    home = ["clusterrun", *name.split(".")] if name else ["clusterrun"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - node.level + package] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and _dotted(node.value) == "clusterrun":
            yield f"clusterrun.{node.attr}"


def _dotted(node: ast.expr) -> str:
    """Write a name as `a.b.c`, and nothing else."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _row(name: str) -> int | None:
    """Return the row of a module: that of the longest name in the table that holds it."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((ROW[prefix] for prefix in prefixes if prefix in ROW), None)


def _imported(name: str, tree: ast.AST, *, package: bool = False) -> set[str]:
    """Name the modules of ours that a module imports; a verb of `import clusterrun` is a verb's."""
    modules = set()
    for full in _imports(name, tree, package=package):
        head, _, rest = full.partition(".")
        if head != "clusterrun" or not rest or rest == "__version__":
            continue
        while rest and rest not in SOURCES:
            rest = rest.rpartition(".")[0]
        if not rest:
            modules.add("verbs")
        elif SOURCES[rest].name != "__init__.py" or _tree(rest).body[1:]:  # no empty package
            modules.add(rest)
    return modules


def _layer_faults(name: str, tree: ast.AST, *, package: bool = False) -> list[str]:
    imported = _imported(name, tree, package=package)
    if name.split(".")[0] in APART or name in SHARED:
        return sorted(i for i in imported - SHARED - {"errors"} if i.split(".")[0] not in APART)
    row = _row(name)
    assert row is not None
    return sorted(
        i
        for i in imported
        if i.split(".")[0] in APART or (_row(i) or 0) > row or _is_above(i, name)
    )


def _is_above(other: str, name: str) -> bool:
    """Whether both are in rooms of `node/`, and the other's stands higher."""
    floors = [".".join(module.split(".")[:2]) for module in (name, other)]
    if not set(floors) <= set(NODE_ROOMS):
        return False
    return NODE_ROOMS.index(floors[1]) > NODE_ROOMS.index(floors[0])


def _impurities(name: str, tree: ast.AST) -> list[str]:
    """List what a pure module must not do, but for the functions that may read files."""
    found: list[str] = []
    for scope, node in _with_scope(tree, name):
        may_read = any(scope == r or scope.startswith(f"{r}.") for r in READERS)
        found += [f"line {node.lineno}: {what}" for what in _deeds(node, may_read=may_read)]
    return found


def _with_scope(tree: ast.AST, scope: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        inner = f"{scope}.{node.name}" if named else scope
        if isinstance(node, ast.expr | ast.stmt):
            yield inner, node
        yield from _with_scope(node, inner)


def _deeds(node: ast.AST, *, may_read: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if a.name.split(".")[0] in IMPURE_MODULES)
    elif isinstance(node, ast.ImportFrom) and node.module:
        if node.module.split(".")[0] in IMPURE_MODULES:
            yield node.module
        if node.module in ("os", "os.path"):
            yield from (f"from os import {a.name}" for a in node.names if a.name not in OS_ALLOWED)
    elif isinstance(node, ast.Attribute):
        yield from _os_deeds(node, may_read=may_read)
    elif isinstance(node, ast.Call):
        yield from _calls(node, may_read=may_read)


def _os_deeds(node: ast.Attribute, *, may_read: bool) -> Iterator[str]:
    owner = _dotted(node.value)
    allowed = OS_ALLOWED | (OS_READING if may_read else set())
    banned = OS_PATH_IMPURE | (set() if may_read else OS_PATH_READING)
    if owner == "os" and node.attr not in allowed:
        yield f"os.{node.attr}"
    if owner == "os.path" and node.attr in banned:
        yield f"os.path.{node.attr}"


def _calls(node: ast.Call, *, may_read: bool) -> Iterator[str]:
    function = node.func
    calls = IMPURE_CALLS | (set() if may_read else READING_CALLS)
    methods = IMPURE_METHODS | WRITING_METHODS | (set() if may_read else READING_METHODS)
    if isinstance(function, ast.Name) and function.id in calls:
        yield f"{function.id}()"
    if isinstance(function, ast.Attribute) and function.attr in methods:
        yield f".{function.attr}()"


def test_the_document_has_the_whole_table() -> None:
    assert set(ROW.values()) == set(range(10))
    assert ROW["cli"] > ROW["verbs"] > ROW["logs"] > ROW["backends"] > ROW["node"] > ROW["rundir"]
    assert ROW["rundir"] > ROW["rendering"] > ROW["launch"] > ROW["config"] > ROW["errors"]
    assert {"rank", "runtime"} <= APART
    assert READERS
    rooms = {name for name in INNER if re.fullmatch(r"node\.\w+", name)} - {"node.__main__"}
    assert set(NODE_ROOMS) == rooms


def test_the_document_and_the_package_have_the_same_modules() -> None:
    assert [name for name in INNER if _row(name) is None and name.split(".")[0] not in APART] == []
    assert sorted((set(ROW) | APART) - INNER) == []
    modules = {name for name in INNER if "." not in name and SOURCES[name].name != "__init__.py"}
    assert modules == {"errors", "hf", "runtime"}  # what users import


def test_every_module_imports_its_own_row_and_those_below() -> None:
    packages = {name for name in INNER if SOURCES[name].name == "__init__.py"}
    found = {n: _layer_faults(n, _tree(n), package=n in packages) for n in sorted(INNER)}
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_no_module_of_a_pure_row_asks_anything_of_the_world() -> None:
    pure = sorted(name for name in INNER if _row(name) in PURE_ROWS)
    assert len(pure) > 50
    found = {name: _impurities(name, _tree(name)) for name in pure}
    assert {name: deeds for name, deeds in found.items() if deeds} == {}


def test_few_rooms_start_processes() -> None:
    """srun and simulated nodes are started in `backends`, launchers in `node`."""
    starters = {
        name
        for name in INNER
        if {"subprocess", "pty"}
        & {i.split(".")[0] for i in _imports(name, _tree(name), package=False)}
    }
    rooms = {name.split(".")[0] for name in starters}
    assert rooms <= {"shared", "node", "backends"}
    assert {name for name in starters if name.startswith("shared.")} == {"shared.shell"}


def test_no_verb_of_the_command_line_imports_another() -> None:
    followed = ("cli.shared.closing", "logs")  # --follow is `logs -f`
    others = {
        (name, _verb(imported))
        for name in INNER
        if name.startswith("cli.")
        for imported in _imported(name, _tree(name))
        if imported.startswith("cli.") and _verb(imported) not in (_verb(name), "shared")
    }
    assert others == {followed}


def _verb(name: str) -> str:
    return name.split(".")[1].split("_")[0]


def test_only_the_command_line_knows_click() -> None:
    users = {
        name.split(".")[0]
        for name in INNER
        if "click" in {i.split(".")[0] for i in _imports(name, _tree(name), package=False)}
    }
    assert users == {"cli"}


# The checks themselves: each fault is found.

IMPORTS = [
    ("launch.x", "from clusterrun.config import spec\nfrom clusterrun import errors", []),
    ("launch.x", "from clusterrun.rendering.bundle import B", ["rendering.bundle"]),
    ("launch.x", "def f():\n    import clusterrun.rundir.record", ["rundir.record"]),
    ("launch.x", "if TYPE_CHECKING:\n    from clusterrun.cli import logs", ["cli", "cli.logs"]),
    ("launch.x", "from clusterrun import submit", ["verbs"]),
    ("launch.x", "import clusterrun\nclusterrun.submit()", ["verbs"]),
    ("launch.x", "import clusterrun\nclusterrun.__version__", []),
    ("launch.x", "from clusterrun.rank import worker", ["rank.worker"]),
    ("launch.x", "from ..shared import shell", ["shared.shell"]),
    ("rank.x", "from clusterrun.errors import NodeExit\nfrom clusterrun import runtime", []),
    ("rank.x", "from clusterrun.rundir.paths import RunPaths", ["rundir.paths"]),
    ("node.base.x", "from clusterrun.node.agent import agent", ["node.agent.agent"]),
    ("node.agent.x", "from clusterrun.node.base import facts", []),
]
IMPURE = [
    *("import subprocess", "from time import monotonic", "def f():\n    import random"),
    *("import os\nos.environ['A']", "from os import environ", "import os\nos.path.exists('a')"),
    *("print('a')", "Path('a').read_text()", "Path('a').write_text('b')", "datetime.now()"),
    "class A:\n    def f(self):\n        return self.path.is_file()",
]


def test_an_import_of_a_higher_row_and_an_impurity_are_found() -> None:
    for name, source, faults in IMPORTS:
        assert _layer_faults(name, ast.parse(source)) == faults
    for source in IMPURE:
        assert len(_impurities("launch.x", ast.parse(source))) >= 1
    pure = "import os.path, re\nos.path.join('a', os.fspath(b))\nPath('a') / 'b'\nx.get('a')"
    assert _impurities("launch.x", ast.parse(pure)) == []


def test_reading_is_allowed_where_the_document_says_so_and_writing_never() -> None:
    reading = "def attempts():\n    a.iterdir()\ndef other():\n    a.iterdir()"
    assert _impurities("rundir.paths", ast.parse(reading)) == ["line 4: .iterdir()"]
    assert _impurities("config.files", ast.parse("p.read_text()")) == []
    assert _impurities("config.files", ast.parse("p.write_text('')")) == ["line 1: .write_text()"]
