"""Start one of our processes on a host: a shell there reads from its stdin what to run.

So nothing of a job appears in a command line, and any login shell will do.
"""

from __future__ import annotations

import os
import shlex
from typing import IO, Final

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
