"""Read a line of a log: which process printed it, when, and what remains without that."""

from __future__ import annotations

import functools
import re
from datetime import datetime, timezone
from typing import Final, NamedTuple

MOST_LETTERS: Final = 4096  # of a line that are read
_MOST_PREFIX: Final = 256  # of what tells processes apart

_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_OURS: Final = re.compile(r"(?P<us>\d{16}) (?P<rank>\d{1,7}|-) (?P<stream>\w+) ")
_RANK: Final = re.compile(
    r"\[(?:rank|Rank )(?P<rank>\d{1,7})\]:? ?"  # torch
    r"|\[(?:default|node|trainer|worker|)(?P<local>\d{1,5})\](?:<std(?:err|out)>)?:? ?"  # torchrun
    r"|\[\d+,(?P<mpi>\d{1,7})\](?:<std(?:err|out)>)?:? ?"  # mpirun --tag-output
    r"|(?P<srun>\d{1,7}): (?!\d+ )"  # srun --label
    r"|\[std(?:err|out)\]:? ?|(?:\S{1,40} \| )?std(?:err|out) \| ?"  # services merge both streams
    r"|\(\w[^()=]{0,99} pid=(?P<pid>\d{1,9})[^()]{0,99}\) ?|PID (?P<pid2>\d{1,9}): ?"  # Ray
    # pdsh, deepspeed; docker compose
    r"|(?P<host>[\w.-]{1,255})(?:: | {1,20}\| )(?=\[rank|Traceback| {2}File|\w+Error: )"
)
_TIME: Final = re.compile(
    r"\[?(?P<time>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)"
    r"(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]? ?[:|-]* ?"
)
_NCCL: Final = re.compile(r"(?P<host>[A-Za-z][\w.-]{0,254}):\d{1,9}:\d{1,9} \[\d{1,4}\] ")
_IN_TEXT: Final = (
    re.compile(r"\[[Rr]ank ?(?P<rank>\d{1,7})\]"),
    re.compile(r"\b[Gg]lobal rank:? ?(?P<rank>\d{1,7})\b"),
    re.compile(r"\brank *: (?P<rank>\d{1,7}) \(local_rank"),
)
_NODE: Final = (
    re.compile(r"(?:srun: error|slurmstepd: error): (?P<node>[a-zA-Z][\w.-]{0,254}): task"),
    # Built for several slurmds on a host. The end of a job is reported by its first node.
    re.compile(r"^slurmstepd-(?P<node>[a-zA-Z][\w.-]{0,254}): error: (?!\*\*\* |Exceeded job)"),
    re.compile(r"\b[Nn]ode failure on (?P<node>[\w.-]{1,255})"),
    re.compile(r"(?:failed|hung|failure) on node (?P<node>[A-Za-z][\w.-]{0,254})"),
    re.compile(r"^ *host *: (?P<node>[\w.-]{1,255})"),
    re.compile(r"^\w{3} [ \d]\d \d\d:\d\d:\d\d (?P<node>[\w.-]{1,255}) kernel:"),
)
_NODE_WORDS: Final = ("srun: ", "slurmstepd", "ode failure on", "host ", " kernel:")


class PrintedLine(NamedTuple):
    """A line of a log."""

    number: int  # its place in the file
    text: str
    source: str = ""  # tells processes apart, as far as the log does
    file: str = ""
    rank: int | None = None
    node: str = ""
    at: float | None = None  # epoch seconds


def read_line(
    raw: str, *, number: int, file: str, rank: int | None = None, node: str = ""
) -> PrintedLine:
    """Take the prefixes off a line; `rank` and `node` are those of its file, if it has them.

    A prefix overrides the file. The text tells rank and node only if neither file nor prefix does.
    """
    text = raw.rstrip("\r\n").rpartition("\r")[2][:MOST_LETTERS]  # "\r" overwrites what is shown
    text = text if text.isprintable() else _CONTROL.sub("", text)
    at, source = None, ""
    if text[:1].isdigit() and (found := _OURS.match(text)):  # a line of our own logs
        at = int(found["us"]) / 1e6
        rank = int(found["rank"]) if found["rank"] != "-" else rank
        text = text[found.end() :]
    while found := _RANK.match(text) or _TIME.match(text):
        groups = found.groupdict()
        if groups.get("time"):
            at = at or _epoch(groups["time"])
        else:
            own_rank = groups["rank"] or groups["mpi"] or groups["srun"]
            rank = int(own_rank) if own_rank else rank
            source += found[0].rstrip(": ")  # also a local rank or a PID
            node = groups["host"] or node
        text = text[found.end() :]
    if "[" in text and (found := _NCCL.match(text)):
        node = found["host"]
    if rank is None and "ank" in text:
        rank = next((int(hit["rank"]) for each in _IN_TEXT if (hit := each.search(text))), None)
    if not node and any(map(text.__contains__, _NODE_WORDS)):
        node = next((hit["node"] or "" for each in _NODE if (hit := each.search(text))), "")
    return PrintedLine(number, text, f"{file}\0{source[:_MOST_PREFIX]}", file, rank, node, at)


@functools.lru_cache(maxsize=1024)
def _epoch(text: str) -> float | None:
    """Return a time as if it were UTC: only differences count. None for no valid date."""
    try:
        found = datetime.strptime(text.replace("T", " "), "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    return found.replace(tzinfo=timezone.utc).timestamp()
