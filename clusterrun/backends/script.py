"""Check the script before its job is queued: it exists, can be read and is valid Python.

The script is never executed.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from clusterrun.backends.machine_facts import nearest_file
from clusterrun.config.settings import Resolved
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Interpreter

_ARCHIVE = b"PK\x03\x04"  # Python runs a zip archive with a __main__.py


def read_script(resolved: Resolved) -> bytes | None:
    """Return the script's source; None for a zip archive, a module elsewhere, or no script.

    Raises UsageError for a file that is missing, can't be read, or is not Python.
    """
    spec = resolved.spec
    if spec.script is None:
        return _module(resolved.cwd, spec.module) if spec.module else None
    path = resolved.cwd / spec.script
    where = resolved.origins["script"].where
    try:
        source = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(
            f"the script '{spec.script}' does not exist", hint=nearest_file(path), where=where
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot read the script '{spec.script}'",
            cause=error.strerror,
            hint="name a Python file that you can read",
            where=where,
        ) from error
    if source.startswith(_ARCHIVE):
        return None
    if problem := _other_kind(source):
        raise UsageError(
            f"'{spec.script}' is not a Python script: {problem}",
            hint="name the Python file that trains",
            where=where,
        )
    return source


def syntax_problem(
    resolved: Resolved, source: bytes, interpreter: Interpreter
) -> UsageError | None:
    """Return the script's syntax error; None if the job's Python is of another version."""
    name = resolved.spec.script or resolved.spec.module or ""
    if interpreter.version not in (None, sys.version_info[:2]):
        return None
    found = _mistake(source, name)
    if found is None:
        return None
    line, message = found
    lines = source.decode(errors="replace").splitlines()
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return UsageError(
        f"{name}:{line}: {message} (SyntaxError)",
        hint=f"correct this line: {text[:80]}" if text else "correct the script",
    )


def _mistake(source: bytes, name: str) -> tuple[int, str] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        return error.lineno or 0, error.msg
    except (ValueError, RecursionError, MemoryError):  # too deep here, perhaps not in the rank
        pass
    return None


def _other_kind(source: bytes) -> str:
    """Return why a file is not Python source; "" if it may be."""
    if b"\0" in source[:1024]:
        return "it is a binary file"
    first = source.split(b"\n", 1)[0]
    if first.startswith(b"#!") and b"python" not in first and b"uv" not in first:
        return f"it begins with {first.decode(errors='replace').strip()}"
    return ""


def _module(cwd: Path, module: str) -> bytes | None:
    """Return the source of a module of the working directory; None if it is elsewhere."""
    path = cwd.joinpath(*module.split("."))
    for file in (path.with_name(f"{path.name}.py"), path / "__main__.py"):
        try:
            return file.read_bytes()
        except (OSError, ValueError):
            continue
    return None
