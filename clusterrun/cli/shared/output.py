"""What a command prints: its answer on stdout, the rest on stderr, colours on terminals only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, Final, TextIO

import click

from clusterrun.errors import ClusterrunError, Exit
from clusterrun.logs.text import strip_controls

# A job on more nodes is submitted, and ended, only after a yes.
CONFIRM_ABOVE_NODES: Final = 64
ERROR_SCHEMA: Final = "clusterrun.error/1"

_STATE_COLOURS: Final = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "COMPLETING": "cyan",
    "PENDING": "yellow",
    "TIMEOUT": "yellow",
    "PREEMPTED": "yellow",
    "FAILED": "red",
    "OUT_OF_MEMORY": "red",
    "NODE_FAIL": "red",
    "BOOT_FAIL": "red",
}


@dataclass(kw_only=True)
class Session:
    """The output options of this invocation; set while they are parsed."""

    color: str = "auto"
    debug: bool = False
    json: bool = False
    quiet: bool = False
    verbose: bool = False


def current_session() -> Session:
    """Return the session of the running command, or a plain one."""
    context = click.get_current_context(silent=True)
    found = context.find_root().obj if context else None
    return found if isinstance(found, Session) else Session()


def keep_bytes() -> None:
    """Print a path or an argument that is not UTF-8 as the bytes that it came as."""
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def wants_colour(stream: TextIO | None, choice: str, environ: Mapping[str, str]) -> bool:
    """Decide for one stream: the flag, then NO_COLOR, then FORCE_COLOR, then the terminal."""
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    forced = [environ.get(name, "") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")]
    if any(value not in ("", "0") for value in forced):
        return True
    return stream is not None and stream.isatty() and environ.get("TERM") != "dumb"


def expect_json(asked: bool) -> None:
    """Reserve stdout for JSON: errors are printed there as an object."""
    current_session().json = asked


def is_interactive() -> bool:
    """Whether a person can be asked: stdin and stderr are terminals."""
    return all(s is not None and s.isatty() for s in (sys.stdin, sys.stderr))


def confirm(question: str, *, otherwise: str) -> None:
    """Ask a person, on stderr; after a no print `otherwise` and exit with status 1."""
    if not click.confirm(question, err=True):
        say(otherwise)
        click.get_current_context().exit(Exit.FAILED)


def answer(text: str) -> None:
    """Print the result of the command on stdout."""
    _write(_safe(text) + "\n", err=False, session=current_session())


def answer_exactly(text: str) -> None:
    """Print a file that the user may save or pipe on, byte for byte."""
    _write(text, err=False, session=current_session())


def say(text: str) -> None:
    """Print a line on stderr."""
    _write(_safe(text) + "\n", err=True, session=current_session())


def note(text: str) -> None:
    """Print a fact that the user may want to know, on stderr; not with --quiet."""
    if current_session().quiet:
        return
    say(f"{click.style('note:', fg='cyan')} {text}")


def warn(text: str, *, notes: Iterable[str] = ()) -> None:
    """Print a warning on stderr, with what is done about it."""
    say(f"{click.style('warning:', fg='yellow', bold=True)} {text}")
    for line in notes:
        say(f"  note: {line}")


def detail(label: str, text: str) -> None:
    """Print one indented line of a summary on stderr; not with --quiet."""
    if current_session().quiet:
        return
    say(f"  {label:<10} {text}")


def answer_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    answer(json.dumps(data, indent=2))


def answer_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print padded columns at their full width; cells are never cut."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [_painted(cell, width) for cell, width in zip(row, widths, strict=True)]
        answer("  ".join(cells).rstrip())


def painted_state(state: str) -> str:
    """Colour a state word; the word alone carries the meaning."""
    if state == "CANCELLED":
        return click.style(state, dim=True)
    colour = _STATE_COLOURS.get(state)
    return click.style(state, fg=colour) if colour else state


def print_error(error: ClusterrunError, session: Session) -> None:
    """Print an error for people on stderr, and as an object on stdout if JSON was asked for."""
    _write(_safe(_error_text(error)) + "\n", err=True, session=session)
    if session.json:
        _write(json.dumps(_error_object(error), indent=2) + "\n", err=False, session=session)


def print_error_text(error: ClusterrunError) -> None:
    """Print an error on stderr, if stdout already holds the answer."""
    print_error(error, Session(color=current_session().color))


def _error_text(error: ClusterrunError) -> str:
    lines = [f"{click.style('error:', fg='red', bold=True)} {error.message}"]
    if error.where:
        lines.append(f"  --> {error.where}")
    if error.cause:
        lines += [f"  cause: {line}" for line in error.cause.strip().splitlines()]
    lines += [f"  hint: {hint}" for hint in error.hints]
    return "\n".join(lines)


def _error_object(error: ClusterrunError) -> dict[str, Any]:
    return {
        "schema": ERROR_SCHEMA,
        "code": error.code,
        "message": error.message,
        "where": error.where,
        "cause": error.cause,
        "hint": "; ".join(error.hints) or None,
        "exit_code": int(error.exit_code),
    }


def _painted(cell: str, width: int) -> str:
    return painted_state(cell) + " " * (width - len(cell))


def _safe(text: str) -> str:
    """Remove what a job's text could do to a terminal; keep our own colours."""
    if "\x1b" not in text and text.replace("\n", "").isprintable():
        return text
    return "\n".join(strip_controls(line, keep_colours=True) for line in text.split("\n"))


def _write(text: str, *, err: bool, session: Session) -> None:
    stream = sys.stderr if err else sys.stdout
    colour = wants_colour(stream, session.color, os.environ)
    try:
        click.echo(text, nl=False, err=err, color=colour)
    except BrokenPipeError:
        raise
    except OSError as error:
        if not err:  # a closed stderr must not undo what a command does
            raise ClusterrunError("cannot write to stdout", cause=str(error)) from error
