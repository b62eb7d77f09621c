"""What a script imports from installed packages: for `--preload auto`, read from its source.

Only statements outside functions and other blocks count, which every rank executes. Modules of the
project are followed and never named: an edit of them must take effect.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence

from clusterrun.node.forge.preload import first_on_path

AUTO = "auto"
_FILES = 200


def installed_imports(entry: Sequence[str]) -> list[str]:
    """Return the installed modules that a script imports, and what it takes from them, in order.

    `from a import B` is `a.B`: packages load much only when they are asked for a name. Empty if the
    entry is a module (-m).
    """
    if entry[0] == "-m":
        return []
    reader = _Reader(first_on_path(entry))
    return list(dict.fromkeys(reader.read(os.path.realpath(entry[0]), "")))


class _Reader:
    """Reads each file of the project once."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = directories
        self._seen: set[str] = set()

    def read(self, path: str, package: str) -> Iterator[str]:
        """Yield what a file imports, and what the project's modules import that it imports."""
        if path in self._seen or len(self._seen) >= _FILES:
            return
        self._seen.add(path)
        for node in _statements(path):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._of(alias.name, ())
            elif isinstance(node, ast.ImportFrom):
                module = _absolute(node, package)
                yield from self._of(module, [alias.name for alias in node.names])

    def _of(self, module: str, names: Sequence[str]) -> Iterator[str]:
        """Yield a module and what is taken from it, or what the project's module imports."""
        root = module.partition(".")[0]
        if self._file(root):
            for each in (*_with_parents(module), *(f"{module}.{name}" for name in names)):
                if path := self._file(each):
                    is_package = os.path.basename(path) == "__init__.py"
                    yield from self.read(path, each if is_package else each.rpartition(".")[0])
        elif _is_installed(root):
            yield module
            yield from (f"{module}.{name}" for name in names if name != "*")

    def _file(self, module: str) -> str:
        """Return the file of the project's module; empty if it has none of this name."""
        for directory in self._directories:
            base = os.path.join(directory, *module.split("."))
            for path in (os.path.join(base, "__init__.py"), f"{base}.py"):
                if os.path.isfile(path):
                    return path
        return ""


def _statements(path: str) -> list[ast.stmt]:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the module of `from … import`; `package` is where a relative one begins."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _is_installed(root: str) -> bool:
    """Return whether a package lies among the installed ones: an editable one does not."""
    if root in sys.stdlib_module_names:
        return False
    try:
        spec = importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return False
    directories = (spec.origin or "").split(os.sep) if spec is not None else []
    return any(name.endswith("-packages") for name in directories)
