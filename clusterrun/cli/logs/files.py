"""List the log files, print their directory, and save lines."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from clusterrun.cli.logs.printer import LogPrinter
from clusterrun.cli.logs.reading import all_lines, find_files, print_lines
from clusterrun.cli.logs.request import Request
from clusterrun.cli.shared import output
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logs.files import FileKind, file_size
from clusterrun.shared import files
from clusterrun.shared.hostlist import fold_ranks
from clusterrun.shared.wording import count

_HELD_BYTES = 32 * 1024 * 1024  # in memory, over all files
_ENDINGS = {Stream.OUT: "out", Stream.ERR: "err"}


def print_path(request: Request) -> None:
    """Print the directory of the newest attempt's logs; for a job of another tool, each file."""
    record, attempt = request.job.record, max(request.attempts, default=0)
    if record is None:
        paths = [str(file.path) for file in find_files(request)]
    elif attempt:
        paths = [str(record.paths.log(attempt, "any").parent)]
    else:
        paths = [str(record.paths.logs_dir)]
    if request.form == "json":
        output.answer_json({"schema": "clusterrun.logs/1", "paths": paths})
        return
    for path in paths:
        output.answer(path, wraps=False)


def list_files(request: Request) -> None:
    """Print a table of the log files, of all attempts unless one was named."""
    catalogue = request.catalogue
    attempts = request.attempts if request.is_chosen else catalogue.attempts()
    rows = [
        {
            "attempt": attempt,
            "node": file.node,
            "ranks": fold_ranks(file.ranks) if file.ranks else None,
            "size_bytes": file_size(file.path),
            "path": str(file.path),
        }
        for attempt in attempts
        for file in catalogue.files(attempt)
        if file.kind is not FileKind.ERRORS
    ]
    if request.form == "json":
        output.answer_json({"schema": "clusterrun.logs/1", "files": rows})
        return
    cells = [["-" if value is None else str(value) for value in row.values()] for row in rows]
    output.answer_table(["ATTEMPT", "NODE", "RANKS", "BYTES", "PATH"], cells)


def save(request: Request, target: str) -> None:
    """Write the lines to a file in the requested form; to a directory rank by rank."""
    if target == "-":
        raise UsageError(
            "--save writes to a file or a directory, not to stdout",
            hint="to print all lines, pass --tail all; to save to a file of that name, pass ./-",
        )
    if not find_files(request):
        raise ClusterrunError(
            f"{request.job.title} has no logs to save", hint="list them with --list"
        )
    path = Path(target)
    try:
        if target.endswith(os.sep) or path.is_dir():
            _save_by_rank(request, path)
        else:
            write = _write_through if _is_special(path) else _write_whole
            written = write(request, path)
            output.say(f"saved {count(f'{written:,}', 'line')} in {path}")
    except OSError as error:
        raise ClusterrunError(
            f"cannot save to {target}", cause=error.strerror, hint="choose another path"
        ) from error


def _is_special(path: Path) -> bool:
    """Return whether a path is something that a file must not replace: a device, a FIFO."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return False


def _write_through(request: Request, path: Path) -> int:
    with open(os.open(path, os.O_WRONLY | os.O_NOCTTY), "wb") as file:
        return _write(request, file)


def _write_whole(request: Request, path: Path) -> int:
    """Write a file, or the target of a link, atomically."""
    target = Path(os.path.realpath(path))
    with files.replacing(target) as temporary, files.open_new(temporary) as file:
        return _write(request, file)


def _write(request: Request, file: BinaryIO) -> int:
    nodes = [log.node for log in find_files(request)]
    printer = LogPrinter(request=request, nodes=nodes, target=file)
    print_lines(request, printer)
    return printer.count


def _save_by_rank(request: Request, directory: Path) -> None:
    """Write the bytes of each rank and stream, and of each node's launcher and agent."""
    if request.form != "text" or request.context:
        raise UsageError("--save DIR/ takes neither --output nor --context", hint="drop them")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise UsageError(f"{directory} is not empty", hint="choose a new directory")
    held: dict[str, list[bytes]] = {}
    names: set[str] = set()
    size = gaps = 0
    for line in all_lines(request):
        if line.stream is Stream.GAP:
            gaps += 1
            continue
        name = _name(line)
        names.add(name)
        held.setdefault(name, []).append(line.text if line.partial else line.text + b"\n")
        size += len(line.text)
        if size > _HELD_BYTES:
            _append(directory, held)
            size = 0
    _append(directory, held)
    output.say(f"saved {count(len(names), 'file')} in {directory}")
    if gaps:
        output.note(f"output was lost in {count(gaps, 'place')}; the logs show where and how much")


def _name(line: LogLine) -> str:
    if line.rank is None:
        return f"{line.node.replace(os.sep, '-')}.{line.stream.label}"
    return f"rank_{line.rank:05}.{_ENDINGS.get(line.stream, line.stream.label)}"


def _append(directory: Path, held: dict[str, list[bytes]]) -> None:
    for name, pieces in held.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "wb") as file:
            file.write(b"".join(pieces))
    held.clear()
