"""Read the directives of a batch script as sbatch does: in Python, and by the sbatch installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.patience import finished

_CONF = """\
ClusterName=nowhere
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=1
AuthType=auth/none
GresTypes=gpu
NodeName=n1 CPUs=1
PartitionName=p Nodes=n1 Default=YES
MessageTimeout=1
"""
_FOUND = re.compile(r'sbatch: debug2: Found in script, argument "(.*)"\Z')


def directives_of(script: str) -> list[str]:
    """Read as sbatch 22.05 does: quotes of both kinds, a backslash escapes everywhere,
    an unquoted # ends the line, the first line that is no comment ends the directives."""
    found: list[str] = []
    for line in script.split("\n"):
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            found += _arguments(line.removeprefix("#SBATCH"))
    return found


def _arguments(line: str) -> list[str]:
    arguments: list[str] = []
    current: str | None = None
    quote = ""
    chars = iter(line)
    for char in chars:
        if char == "\\":
            current = (current or "") + next(chars, "")
        elif quote:
            quote, current = ("", current) if char == quote else (quote, (current or "") + char)
        elif char in "'\"":
            quote, current = char, current or ""
        elif char == "#":
            break
        elif char.isspace():
            arguments += [] if current is None else [current]
            current = None
        else:
            current = (current or "") + char
    assert not quote, f"sbatch refuses an open quote: {line}"
    return arguments + ([] if current is None else [current])


def sbatch() -> str | None:
    """Find the sbatch of this machine; no cluster need be up to make it read a script."""
    return shutil.which("sbatch")


def read_by_sbatch(script: str, directory: Path) -> list[str]:
    """Let the real sbatch read a script; it prints what it found before it looks for a cluster."""
    (directory / "slurm.conf").write_text(_CONF)
    (directory / "script").write_bytes(script.encode(errors="surrogateescape"))
    done = finished(
        [sbatch() or "sbatch", "-vvvvv", str(directory / "script")],
        env={"SLURM_CONF": str(directory / "slurm.conf"), "PATH": "/usr/bin:/bin"},
    )
    assert "Unable to contact slurm controller" in done.stderr, done.stderr
    return [match[1] for line in done.stderr.split("\n") if (match := _FOUND.match(line))]
