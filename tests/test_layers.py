"""The rooms of the house, read from the table in docs/architecture.md, and what each may do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "clusterrun"
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
PURE_ROWS = range(4)
API_ROW = 8

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
    "exists",
    "getsize",
    "isdir",
    "isfile",
    "islink",
    "lexists",
    "realpath",
    "relpath",
}


def _table(document: str) -> dict[str, int]:
    """Read `| row | modules | … |` into {module: row}; `planning/` stands for all within."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", document, re.MULTILINE)
    return {
        name.rstrip("/"): int(row) for row, cell in rows for name in re.findall(r"`(\w+/?)`", cell)
    }


def _apart(document: str) -> frozenset[str]:
    """Read which modules run inside the user's process."""
    sentence = re.search(r"((?:[^.`]|`[^`]*`)*) runs? inside the user's process", document)
    assert sentence, "docs/architecture.md must say what runs inside the user's process"
    return frozenset(re.findall(r"`(\w+)\.py`", sentence[1]))


def _readers(document: str) -> frozenset[str]:
    """Read which pure modules, or functions of them, may read files."""
    sentence = re.search(r"\(([^()]*) read files\)", document)
    assert sentence, "docs/architecture.md must say which pure modules read files"
    return frozenset(re.findall(r"`([\w.]+)`", sentence[1]))


# What the user's process imports too, so that it stays light.
SHARED = frozenset({"control", "checkpoints", "files", "given"})

ROW = _table(DOCUMENT)
APART = _apart(DOCUMENT)
READERS = _readers(DOCUMENT)


def _module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {_module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
INNER = {name for name in SOURCES if name not in ("", "__main__")}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


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
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "clusterrun":
            yield f"clusterrun.{node.attr}"


def _imported_rooms(name: str, tree: ast.AST, *, package: bool = False) -> set[str]:
    """Name the rooms of ours that a module imports; a verb of `import clusterrun` is the api's."""
    rooms = set()
    for full in _imports(name, tree, package=package):
        head, _, rest = full.partition(".")
        if head != "clusterrun" or not rest or rest == "__version__":
            continue
        room = rest.split(".")[0]
        rooms.add(room if room in ROW or room in APART else "api")
    return rooms


def _layer_faults(name: str, tree: ast.AST, *, package: bool = False) -> list[str]:
    room = name.split(".")[0]
    imported = _imported_rooms(name, tree, package=package) - {room}
    if room in APART or room in SHARED:
        return sorted(other for other in imported if other not in APART | SHARED | {"errors"})
    return sorted(o for o in imported if o not in ROW or ROW[o] > ROW[room])


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
    owner = ast.unparse(node.value)
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
    assert ROW["cli"] > ROW["api"] > ROW["logs"] > ROW["record"] > ROW["node"] > ROW["shell"]
    assert ROW["shell"] > ROW["rendering"] > ROW["planning"] > ROW["loading"] > ROW["errors"]
    assert {"worker", "runtime"} <= APART
    assert READERS


def test_every_module_has_a_place_in_the_document() -> None:
    rooms = {name.split(".")[0] for name in INNER}
    assert sorted(rooms - set(ROW) - APART) == []


def test_every_place_in_the_document_has_a_module() -> None:
    rooms = {name.split(".")[0] for name in INNER}
    assert sorted((set(ROW) | APART) - rooms) == []


@pytest.mark.parametrize("name", sorted(INNER))
def test_module_imports_its_own_row_and_those_below(name: str) -> None:
    package = SOURCES[name].name == "__init__.py"
    if name.split(".")[0] not in set(ROW) | APART:
        pytest.fail(f"clusterrun.{name} has no row in docs/architecture.md")
    assert _layer_faults(name, TREES[name], package=package) == []


@pytest.mark.parametrize("name", sorted(n for n in INNER if ROW.get(n.split(".")[0]) in PURE_ROWS))
def test_module_of_a_pure_row_asks_nothing_of_the_world(name: str) -> None:
    assert _impurities(name, TREES[name]) == []


def test_only_shell_starts_scheduler_commands() -> None:
    """The node's processes are ranks and launchers: `node`; the controller's are `backends`."""
    starters = {
        name
        for name in INNER
        if {"subprocess", "pty"}
        & {i.split(".")[0] for i in _imports(name, TREES[name], package=False)}
    }
    rooms = {name.split(".")[0] for name in starters}
    assert rooms <= {"shell", "node", "backends"}


def test_only_the_command_line_knows_click() -> None:
    users = {
        name.split(".")[0]
        for name in INNER
        if "click" in {i.split(".")[0] for i in _imports(name, TREES[name], package=False)}
    }
    assert users == {"cli"}


# The checks themselves: each fault is found.


@pytest.mark.parametrize(
    ("name", "source", "faults"),
    [
        ("planning.x", "from clusterrun.spec import JobSpec", []),
        ("planning.x", "from clusterrun import spec, errors", []),
        ("planning.x", "from clusterrun.rendering.bundle import Bundle", ["rendering"]),
        ("planning.x", "from clusterrun import shell", ["shell"]),
        ("planning.x", "def f():\n    import clusterrun.record", ["record"]),
        ("planning.x", "if TYPE_CHECKING:\n    from clusterrun.api import submit", ["api"]),
        ("planning.x", "from clusterrun import submit", ["api"]),
        ("planning.x", "import clusterrun\nclusterrun.submit()", ["api"]),
        ("planning.x", "import clusterrun\nclusterrun.__version__", []),
        ("planning.x", "from . import plan", []),
        ("planning.x", "from .. import shell", ["shell"]),
        ("planning.x", "from ..shell import run", ["shell"]),
        ("planning.x", "from clusterrun import nonsense", ["api"]),
        ("worker", "from clusterrun.errors import NodeExit\nfrom clusterrun import runtime", []),
        ("worker", "from clusterrun.paths import RunPaths", ["paths"]),
        ("cli.x", "from clusterrun.api import submit\nfrom clusterrun.logs import files", []),
        ("logs.x", "from clusterrun.cli import output", ["cli"]),
    ],
)
def test_an_import_of_a_higher_row_is_found(name: str, source: str, faults: list[str]) -> None:
    assert _layer_faults(name, ast.parse(source)) == faults


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess",
        "from time import monotonic",
        "import urllib.request",
        "def f():\n    import random",
        "import os\nos.environ['A']",
        "import os\nos.getcwd()",
        "from os import environ",
        "import os\nos.path.expanduser('~')",
        "import os\nos.path.exists('a')",
        "print('a')",
        "open('a')",
        "Path('a').read_text()",
        "Path('a').exists()",
        "Path('a').write_text('b')",
        "Path.cwd()",
        "datetime.now()",
        "class A:\n    def f(self):\n        return self.path.is_file()",
    ],
)
def test_an_impurity_is_found(source: str) -> None:
    assert len(_impurities("planning.x", ast.parse(source))) >= 1


def test_pure_code_is_left_in_peace() -> None:
    source = (
        "import os.path, json, re\nos.path.join('a', os.fspath(b))\nPath('a') / 'b'\nx.get('a')"
    )
    assert _impurities("planning.x", ast.parse(source)) == []


def test_reading_is_allowed_where_the_document_says_so_and_writing_never() -> None:
    reading = "def newest_attempt():\n    a.iterdir()\ndef other():\n    a.iterdir()"
    assert _impurities("paths", ast.parse(reading)) == ["line 4: .iterdir()"]
    assert _impurities("loading.files", ast.parse("p.read_text()")) == []
    assert _impurities("loading.files", ast.parse("p.write_text('')")) == ["line 1: .write_text()"]
