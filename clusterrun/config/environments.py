"""Setup lines that name an environment, such as `conda: llm`, instead of bash."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from clusterrun.errors import UsageError

_NAMED: Final = r"(conda|venv|uv|modules): *(.*)\Z"
CONTROL: Final = r"[\x00-\x1f\x7f]"
_HINT: Final = "write conda: NAME, venv: DIR, uv: DIR, modules: [NAME, ...], or a line of bash"


class Tool(str, Enum):
    """The tool that activates an environment."""

    CONDA = "conda"
    VENV = "venv"
    MODULES = "modules"


class SetupStep(NamedTuple):
    """A line of bash (`tool` None), or an environment: a directory, a name, names of modules."""

    text: str
    tool: Tool | None = None
    names: tuple[str, ...] = ()


def read_step(text: str) -> SetupStep:
    """Read a setup line; `uv: DIR` means the `.venv` in DIR.

    Raises UsageError for an invalid name.

    >>> read_step("uv: /home/ada/llm").names
    ('/home/ada/llm/.venv',)
    """
    found = re.match(_NAMED, text)
    if found is None:
        return SetupStep(text=text)
    kind, value = found[1], found[2].strip()
    names = tuple(value.split()) if kind == "modules" else (value,)
    if not value or any(name.startswith("-") for name in names):
        raise UsageError(f"setup: '{text}' names no environment or module", hint=_HINT)
    if kind == "uv":
        return SetupStep(text=text, tool=Tool.VENV, names=(posixpath.join(value, ".venv"),))
    return SetupStep(text=text, tool=Tool(kind), names=names)


def setup_line(kind: str, names: Sequence[str]) -> str:
    """Return the line for `setup: {kind: names}`. Raises UsageError for another kind or no name."""
    text = f"{kind}: {' '.join(names)}"
    if not re.match(_NAMED, text) or any(re.search(CONTROL, name) for name in names):
        raise UsageError(f"setup: '{kind}' is unknown, or its value is invalid", hint=_HINT)
    if kind != "modules" and len(names) != 1:
        raise UsageError(f"setup: {kind} takes one value", hint=_HINT)
    return read_step(text).text  # raises UsageError for an invalid name


def with_absolute_path(text: str, absolute: Callable[[str], str]) -> str:
    """Return a setup line with its directory made absolute, if it names one."""
    found = re.match(_NAMED, text)
    if found is None:
        return text
    kind, name = found[1], found[2].strip()
    is_directory = kind in ("venv", "uv") or (kind == "conda" and "/" in name)
    return f"{kind}: {absolute(name)}" if is_directory else text


def python_of(setup: Sequence[str]) -> str:
    """Return the interpreter that the setup lines bring, "" if they name no environment of Python.

    >>> python_of(["modules: cuda/12.4", "venv: /venv"]), python_of(["conda: llm"])
    ('/venv/bin/python', 'python')
    """
    for step in map(read_step, reversed(setup)):  # the one activated last wins
        if step.tool is Tool.VENV:
            return posixpath.join(step.names[0], "bin/python")
        if step.tool is Tool.CONDA:
            return "python"
    return ""
