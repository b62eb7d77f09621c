"""Start one of our processes on a host: a shell there reads from its stdin what to run.

So nothing of a job appears in a command line, and any login shell will do. Then both ends send
messages over its pipes: a line of JSON, then `size` bytes of data if it has any. Data ends with a
line end of its own, so a starter that passes on whole lines holds nothing back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import threading
from dataclasses import dataclass
from typing import IO, Any, Final

from clusterrun.shared import files
from clusterrun.shared.own_modules import RUN_MODULE

READ = ("bash", "-s")  # plain words: what starts it may join and split them
_FIRST = """exec bash -c 'IFS= read -r -d "" script && eval "$script"'\n"""

# Setup lines get no input and print to stderr. The process starts with the shell's own streams;
# on ENVIRON it finds the environment from before the setup lines.
_SCRIPT = """\
echo {mark}
exec 3<&0 4>&1 5< <(exec env -0) 0</dev/null 1>&2
clusterrun_setup() {{ eval "$1"; }}
clusterrun_setup {setup} || exit {setup_failed}
clusterrun_python={python}
[[ $clusterrun_python != '~/'* ]] || clusterrun_python=$HOME/${{clusterrun_python:2}}
exec "$clusterrun_python" -c {run} {words} 0<&3 1>&4 3<&- 4>&-
"""
ENVIRON = 5
SETUP_FAILED: Final = 122
MARK: Final = "clusterrun-output"
_LINE_BYTES: Final = 1 << 16
HEADER_BYTES = 16 << 20  # a header may name many files
DATA_BYTES = 1 << 20  # of one part of a file


def script(module: str, *words: str, python: str, env_sh: str = "") -> bytes:
    """Return what the shell reads to run a module of ours after the setup lines in `env_sh`."""
    text = _SCRIPT.format(
        mark=MARK,
        setup_failed=SETUP_FAILED,
        setup=shlex.quote(env_sh),
        python=shlex.quote(python),
        run=shlex.quote(RUN_MODULE),
        words=" ".join(map(shlex.quote, (module, *words))),
    )
    return f"{_FIRST}{text}\0".encode()


def skip_greeting(stream: IO[bytes]) -> None:
    """Read up to the output of the module: a login script may print lines of its own."""
    end = f"{MARK}\n".encode()
    while (line := stream.readline(_LINE_BYTES)) and not line.endswith(end):
        continue


def take_streams() -> tuple[int, int]:
    """Return copies of stdin and stdout for messages, which nothing that runs here can disturb.

    From now on, stdin is empty and stdout goes where stderr goes.
    """
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return reader, writer


# Messages


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message: its kind, its fields, and raw bytes."""

    kind: str
    fields: dict[str, Any]
    data: bytes = b""


class Pipe:
    """One end of a connection; several threads may send, one receives."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._lock = threading.Lock()

    def send(self, kind: str, /, data: bytes = b"", **fields: Any) -> None:
        """Send a message. Raises OSError and ValueError if the other end is gone."""
        header = {**fields, "kind": kind, "size": len(data)}
        with self._lock:
            self._writer.write(json.dumps(header).encode() + b"\n" + data + b"\n" * bool(data))
            self._writer.flush()

    def receive(self) -> Frame | None:
        """Return the next message; None at the end, and for anything but a whole message."""
        try:
            fields = json.loads(self._reader.readline(HEADER_BYTES))
            kind, size = fields.pop("kind"), fields.pop("size")
            data = self._reader.read(size + 1)[:-1] if 0 < size <= files.MOST_BYTES else b""
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return Frame(kind=kind, fields=fields, data=data) if len(data) == size else None

    def close(self) -> None:
        """Close both directions."""
        for stream in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                stream.close()
