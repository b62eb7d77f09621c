"""The script of a training and the project's modules that it imports: read, not run.

Of installed packages, only imports outside functions and blocks count, which every rank executes.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

_FILES = 50
_RELEVANT = re.compile(rb"environ|dotenv|putenv|unsetenv|read_env|\.path(?:\.insert|\[| *=)")
Nodes = tuple[ast.AST, ...]


class ProjectFiles:
    """What the files of a project say; those that can't be parsed say nothing."""

    def __init__(self, entry: Sequence[str]) -> None:
        # By path, the script first: all syntax of those that may change variables or sys.path.
        self.files: dict[str, Nodes] = {}
        self.bodies: dict[str, list[ast.stmt]] = {}
        self.imports: dict[ast.AST, list[tuple[str, list[str]]]] = {}  # modules, and their files
        self.installed: list[str] = []  # what they import from installed packages, in order
        self.directories = first_on_path(entry)
        path, package = _script(entry)
        if path:
            self._read(path, package)
        self.installed = list(dict.fromkeys(self.installed))

    def _read(self, path: str, package: str) -> None:
        if path in self.files or len(self.files) >= _FILES:
            return
        body, is_relevant = _parsed(path)
        self.files[path] = tuple(each for node in body * is_relevant for each in ast.walk(node))
        self.bodies[path] = body
        for node in _statements(body):
            is_first = node in body
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(node, alias.name, (), is_first=is_first)
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
                self._import(node, _absolute(node, package), names, is_first=is_first)

    def _import(self, node: ast.AST, module: str, names: Sequence[str], *, is_first: bool) -> None:
        """Read the files of a module, or note an installed one and what is taken from it.

        `from a import B` is `a.B`: packages load much only when they are asked for a name.
        """
        modules = (*_with_parents(module), *(f"{module}.{name}" for name in names))
        found = [each for each in (_file(each, self.directories) for each in modules) if each[0]]
        self.imports.setdefault(node, []).append((module, [path for path, _ in found]))
        for path, package in found:
            self._read(path, package)
        if is_first and not found and is_installed(module.partition(".")[0]):
            self.installed += [module, *(f"{module}.{name}" for name in names if name != "*")]


def first_on_path(entry: Sequence[str]) -> list[str]:
    """Return the directory in which Python looks first for what a script imports."""
    if getattr(sys.flags, "safe_path", False):
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
    places = [os.getcwd(), *(each for each in sys.path if isinstance(each, str))]
    main = _file(f"{entry[1]}.__main__", places)
    return main if main[0] else _file(entry[1], places)


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
    try:
        with open(path, "rb") as file:
            text = file.read()
        return ast.parse(text).body, _RELEVANT.search(text) is not None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return [], False


def _statements(body: Sequence[ast.stmt]) -> list[ast.AST]:
    """Return the statements of a file, then those in its functions and blocks."""
    found: list[ast.AST] = list(body)
    for node in found:
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(node, part, ())
    return found


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the module of `from … import`; `package` is where a relative one begins."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _with_parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def is_installed(root: str) -> bool:
    """Return whether a package lies among the installed ones: an editable one does not."""
    if root in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return False
    directories = (spec.origin or "").split(os.sep) if spec is not None else []
    return any(name.endswith("-packages") for name in directories)
