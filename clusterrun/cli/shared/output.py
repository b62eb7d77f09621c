"""Print: the answer on stdout, the rest on stderr, colours on terminals only.

Lines and tables fit the width of a terminal; elsewhere they are printed as they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, repeat
from typing import Any, Final, TextIO, TypeAlias

import click

from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.logs.text import strip_controls
from clusterrun.shared.finding import Finding, Severity

# Submitting or cancelling a job on more nodes needs confirmation.
CONFIRM_ABOVE_NODES: Final = 64
ERROR_SCHEMA: Final = "clusterrun.error/1"
Row: TypeAlias = tuple[str, str]  # a label and a text

_CLEAR: Final = "\r\x1b[K"  # this row of the terminal
_STATE_COLOURS: Final = {
    "COMPLETED": "green",
    **dict.fromkeys(("RUNNING", "COMPLETING"), "cyan"),
    **dict.fromkeys(("PENDING", "TIMEOUT", "PREEMPTED"), "yellow"),
    **dict.fromkeys(("FAILED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL"), "red"),
}
_SEVERITIES: Final = {
    Severity.OK: ("ok", "green"),
    Severity.NOTE: ("note", "cyan"),
    Severity.FAIL: ("FAIL", "red"),
    Severity.SKIP: ("skip", "bright_black"),
}


class Command(str):
    """A command to copy whole: it never wraps."""


@dataclass(kw_only=True)
class Session:
    """The output options of an invocation; set while they are parsed."""

    color: str = "auto"
    json: bool = False
    shows_progress: bool = False  # the last row of stderr is replaced by the next output
    quiet: bool = False
    verbose: bool = False


session = Session()
"""The session of this invocation: `main` begins each with a new one."""


def keep_bytes() -> None:
    """Print a path or an argument that is not UTF-8 as its own bytes."""
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def wants_colour(stream: TextIO | None) -> bool:
    """Decide for one stream: the flag, then NO_COLOR, then FORCE_COLOR, then the terminal."""
    if session.color != "auto":
        return session.color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    forced = [os.environ.get(name, "") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")]
    if any(value not in ("", "0") for value in forced):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _expect_json(_: click.Context, __: click.Parameter, asked: bool) -> bool:
    """Reserve stdout for JSON: errors are printed there as an object."""
    session.json = asked
    return asked


json_option: Final = click.option(
    *("--json", "as_json"), is_flag=True, is_eager=True, callback=_expect_json, help="print JSON"
)


def is_interactive() -> bool:
    """Return whether a person can answer: stdin and stderr are terminals."""
    return all(s is not None and s.isatty() for s in (sys.stdin, sys.stderr))


def is_on_terminal() -> bool:
    """Return whether a terminal of a known width shows the answer."""
    return width_of(sys.stdout) is not None


def confirm(question: str, deed: str, *, yes: str, otherwise: str) -> None:
    """Ask a person, on stderr; if the answer is no, print `otherwise` and exit with status 1.

    Off a terminal, raises UsageError with the hint `yes`.
    """
    if not is_interactive():
        raise UsageError(f"{deed} needs confirmation, but this is not a terminal", hint=yes)
    if not click.confirm(_safe(question), err=True):
        say(otherwise)
        click.get_current_context().exit(Exit.FAILED)


def answer(text: str, *, indent: int | None = None, wraps: bool = True) -> None:
    """Print the result of the command on stdout; a terminal gets lines of its width.

    Further lines of a text begin after `indent` spaces. A command must not wrap: people copy it.
    """
    _print(text, err=False, indent=indent, wraps=wraps)


def labelled(label: str, texts: Iterable[str]) -> Iterator[Row]:
    """Yield texts, the first with the label."""
    return zip(chain((label,), repeat("")), texts, strict=False)


def answer_rows(rows: Iterable[Row]) -> None:
    """Print texts with their labels on stdout; commands do not wrap."""
    for label, text in rows:
        wraps = not isinstance(text, Command)
        answer(f"{label:<11}{text}".rstrip(), indent=11, wraps=wraps)


def answer_finding(found: Finding, where: str = "") -> None:
    """Print a finding and what to do; `where` it is in a script."""
    word, colour = _SEVERITIES[found.severity]
    text = " ".join(f"{where}: {found.summary}".removeprefix(": ").split())
    answer(f"{click.style(f'{word:<4}', fg=colour)}  {found.id:<18}  {text}", indent=6)
    if found.fix:
        answer(f"      hint: {found.fix}", indent=12)


def answer_exactly(text: str) -> None:
    """Print a file byte for byte on stdout."""
    _write(text, err=False)


def say(text: str, *, indent: int | None = None, wraps: bool = True) -> None:
    """Print a line on stderr."""
    _print(text, err=True, indent=indent, wraps=wraps)


def can_show_progress() -> bool:
    """Return whether a line on stderr may change: on a terminal, without --quiet."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb" and not session.quiet


def show_progress(text: str, spent_s: float) -> None:
    """On a terminal, show a line that the next call or other output replaces: `text … 7 s`."""
    if not can_show_progress():
        return
    end = f" … {int(spent_s)} s"
    room = (width_of(sys.stderr) or 80) - 1 - len(end)
    shown = strip_controls(" ".join(text.split()), keep_colours=False)[:room]
    click.echo(f"{_CLEAR}{shown}{end}", nl=False, err=True, color=True)
    session.shows_progress = True


def clear_progress() -> None:
    """Remove the line that changes, if there is one."""
    if session.shows_progress:
        session.shows_progress = False
        click.echo(_CLEAR, nl=False, err=True, color=True)


def say_interrupted(text: str) -> None:
    """Print a line on stderr after Ctrl-C; not behind the ^C that the terminal wrote."""
    newline = "" if session.shows_progress else "\n"  # a progress row is replaced, with its ^C
    _write(f"{newline}{_safe(text)}\n", err=True)


def note(text: str) -> None:
    """Print a note on stderr; not with --quiet."""
    if not session.quiet:
        say(f"{click.style('note:', fg='cyan')} {text}")


def warn(text: str, *, notes: Iterable[str] = ()) -> None:
    """Print a warning on stderr, with notes on what to do."""
    say(f"{click.style('warning:', fg='yellow', bold=True)} {text}")
    for line in notes:
        say(f"  note: {line}")


def detail(label: str, *texts: str) -> None:
    """Print texts of a summary on stderr, each on a line below the first; not with --quiet."""
    if not session.quiet:
        for name, text in labelled(label, texts):
            say(f"  {name:<10} {text}", indent=13)


def answer_json(data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; null for NaN and infinity, which JSON does not have."""
    finite = json.loads(json.dumps(data, default=dict), parse_constant=lambda _: None)
    answer(json.dumps(finite, indent=2), wraps=False)


def answer_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, spare: Sequence[str] = ()
) -> None:
    """Print padded columns. On a terminal, rows wrap, or fit if `spare` columns may be left out."""
    table, width = [head, *rows], width_of(sys.stdout)
    if spare and width is not None:
        safe = [[strip_controls(" ".join(x.split()), keep_colours=False) for x in r] for r in table]
        table = [*fitted(safe, width, spare)]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    for row in table:
        pairs = zip(row, widths, strict=True)
        painted = (painted_state(cell) + " " * (room - cells(cell)) for cell, room in pairs)
        answer("  ".join(painted).rstrip())


def painted_state(state: str) -> str:
    """Colour a state word; its meaning does not depend on the colour."""
    if state == "CANCELLED":
        return click.style(state, dim=True)
    colour = _STATE_COLOURS.get(state)
    return click.style(state, fg=colour) if colour else state


def print_error(error: ClusterrunError, *, is_answer: bool = True) -> None:
    """Print an error on stderr; for --json also as an object on stdout, if it is the answer."""
    say(_error_text(error))
    if session.json and is_answer:
        names = ("code", "message", "where", "cause")
        data = {"schema": ERROR_SCHEMA, **{name: getattr(error, name) for name in names}}
        data |= {"hint": "; ".join(error.hints) or None, "exit_code": int(error.exit_code)}
        _write(json.dumps(data, indent=2) + "\n", err=False)


def _error_text(error: ClusterrunError) -> str:
    """Write the failure with its place and a short cause; below it a long cause, and the hints."""
    causes, where = (error.cause or "").strip().splitlines(), error.where or ""
    if where.removeprefix("env ") in error.message:  # as of "env CLUSTERRUN_NODES"
        where = ""  # the message names it
    short = causes if len(causes) == 1 else []
    lines = [": ".join(filter(None, (where, error.message, *short)))]
    lines += [f"  cause: {line}" for line in causes if not short]
    lines += [f"  hint: {'; '.join(error.hints)}"] if error.hints else []
    return f"{click.style('error:', fg='red', bold=True)} " + "\n".join(lines)


def _safe(text: str) -> str:
    """Remove control sequences from a job's text; keep our own colours."""
    if "\x1b" not in text and text.replace("\n", "").isprintable():
        return text
    return "\n".join(strip_controls(line, keep_colours=True) for line in text.split("\n"))


def _print(text: str, *, err: bool, indent: int | None, wraps: bool) -> None:
    text, width = _safe(text), width_of(sys.stderr if err else sys.stdout)
    if wraps and width is not None:
        lines = (wrapped(line, width, indent) for line in text.split("\n"))
        text = "\n".join(chain.from_iterable(lines))
    _write(text + "\n", err=err)


def _write(text: str, *, err: bool) -> None:
    clear_progress()
    colour = wants_colour(sys.stderr if err else sys.stdout)
    try:
        click.echo(text, nl=False, err=err, color=colour)
    except BrokenPipeError:
        raise
    except OSError as error:
        if not err:  # a closed stderr must not fail a command
            raise ClusterrunError("cannot write to stdout", cause=str(error)) from error


LEAST: Final = 8  # a narrower terminal shows nothing useful
_SHORTEST: Final = 4  # columns to which a cell may be cut
_LONGEST: Final = 24  # columns to which cells are cut before a spare column is left out
_SGR: Final = r"\x1b\[[0-9;:]*m"  # compiled at its first use
_PIECE: Final = rf"{_SGR}|(?s:.)"
_WORD: Final = r" *[^ ]+"
_LABEL: Final = r" *\S+(?: \S+)*  +|  +"


def width_of(stream: TextIO | None) -> int | None:
    """Return the width of a terminal; None for any other stream, or if the width is unknown."""
    if stream is None or not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    try:
        width = int(given) if given.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return max(width, LEAST) if width else None


def cells(text: str) -> int:
    """Return the columns that a text takes; an overestimate if it has combining marks."""
    text = re.sub(_SGR, "", text)
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def wrapped(line: str, width: int, indent: int | None = None) -> Iterator[str]:
    """Yield a line wrapped to a width; the rest begins at `indent` (None: below a label's text)."""
    line = line.expandtabs()
    if cells(line) <= width:
        yield line
        return
    if indent is None:
        label = re.match(_LABEL, line)  # text before two spaces
        indent = label.end() if label else 2
    margin = " " * min(indent, width // 3)
    current = ""
    for word in re.findall(_WORD, line):
        if current.strip() and cells(current + word) > width:
            yield current
            current, word = margin, word.lstrip(" ")
        while cells(current + word) > width:  # a word that fills more than a line
            head, word = _split(word, width - cells(current))
            yield current + head
            current = margin
        current += word
    yield current


def shortened(text: str, width: int) -> str:
    """Return a text, cut to a width with an ellipsis."""
    return text if cells(text) <= width else _split(text, width - 1)[0].rstrip() + "…"


def _split(text: str, width: int) -> tuple[str, str]:
    """Split a text after `width` columns; colour codes take no column and stay whole."""
    used = 0
    for piece in re.finditer(_PIECE, text):
        used += cells(piece[0])
        if used > width:
            return text[: piece.start()], text[piece.start() :]
    return text, ""


def fitted(
    table: Sequence[Sequence[str]], width: int, spare: Collection[str]
) -> list[tuple[str, ...]]:
    """Return a table whose rows have at most a width; the first row is the head.

    Columns named in `spare` are left out one by one, in that order; then the widest cells are cut.
    """
    columns = [list(column) for column in zip(*table, strict=True)]
    for name in spare:  # long cells are cut before a column is left out
        if _line_width([min(max(map(cells, column)), _LONGEST) for column in columns]) > width:
            columns = [column for column in columns if column[0] != name]
    widths = [max(map(cells, column)) for column in columns]
    while _line_width(widths) > width and max(widths) > _SHORTEST:
        widths[widths.index(max(widths))] -= 1
    return [tuple(map(shortened, row, widths)) for row in zip(*columns, strict=True)]


def _line_width(widths: Sequence[int]) -> int:
    """Return the width of a row: its cells, and two spaces between them."""
    return sum(widths) + 2 * (len(widths) - 1)
