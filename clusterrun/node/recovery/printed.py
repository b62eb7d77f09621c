"""Find why an attempt failed before an agent could report it, from what its nodes printed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from clusterrun.logformat.symptoms import TRACEBACK, Classifier
from clusterrun.node.base.stderr import PREFIX
from clusterrun.shared.files import end_of

LAST_BYTES = 64 * 1024
SLURM = ("srun: ", "slurmstepd", "slurmd")  # how its own lines begin; a host may follow
# Slurm's line about a task that has ended, which gives no reason.
ECHO = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: Exited with exit code ")


def last_reason(output: Path, since_byte: int, nodes: Iterable[str]) -> str:
    """Return clusterrun's last line on a node, the last error, or Slurm's first; "" for none."""
    lines = _lines(output, since_byte)
    own = _own(lines, tuple(f"{PREFIX}{node}: " for node in nodes))
    classify = Classifier().classify  # gets a line's source, here always "", and the line
    others = (line for line in lines if not line.startswith((PREFIX, *SLURM)))
    # "" is no error; of a traceback, only the last line counts, which names the exception.
    errors = [line for line in others if classify("", line.encode()) not in ("", TRACEBACK)]
    found = own or errors or _of_slurm(lines)[:1]
    return found[-1] if found else ""


def reason_of(output: Path, node: str) -> str:
    """Return clusterrun's last line for a node, without its name; "" if there is none."""
    found = _own(_lines(output, 0), (f"{PREFIX}{node}: ",))
    return found[-1].removeprefix(f"{node}: ") if found else ""


def last_word(output: Path, *, or_any: bool) -> str:
    """Return clusterrun's last line, Slurm's first error, or else any last line; "" for none."""
    lines = [line for line in _lines(output, 0) if line.strip()]
    found = _own(lines, (PREFIX,)) or _of_slurm(lines)[:1] or (lines if or_any else [])
    return found[-1] if found else ""


def _of_slurm(lines: Iterable[str]) -> list[str]:
    errors = (line for line in lines if line.startswith(SLURM) and ": error: " in line)
    return [line for line in errors if not (ECHO.search(line) or ": *** " in line)]


def _own(lines: Iterable[str], marks: tuple[str, ...]) -> list[str]:
    return [line.removeprefix(PREFIX) for line in lines if line.startswith(marks)]


def _lines(path: Path, since: int) -> list[str]:
    return end_of(path, LAST_BYTES, since=since).decode("utf-8", "replace").splitlines()
