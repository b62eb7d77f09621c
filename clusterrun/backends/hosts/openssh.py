"""Commands on the hosts over ssh: no prompt, no new host key, the user's settings.

`run` runs one there as if it ran here: with its input, output, exit status and Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from clusterrun.backends.hosts.refusals import SSH_FAILED
from clusterrun.errors import ClusterrunError, Exit, SchedulerUnreachableError
from clusterrun.shared.host_specs import parse_host

CONNECT_S = 10
LINK_S = 100  # a connection that is silent for longer is lost; the agents' link gives up first
_PINGS = 5
LAST_WORDS_S: Final = 5.0  # after Ctrl-C
_NONE: Final[Mapping[str, str]] = MappingProxyType({})

OPTIONS = (
    *("-oBatchMode=yes", "-oStrictHostKeyChecking=yes", f"-oConnectTimeout={CONNECT_S}"),
    *(f"-oServerAliveInterval={LINK_S // _PINGS}", f"-oServerAliveCountMax={_PINGS}"),
    *("-oForwardX11=no", "-oForwardAgent=no", "-oClearAllForwardings=yes"),
)


def ssh(host: str, argv: Sequence[str], *, terminal: bool = False) -> list[str]:
    """Return the command that runs `argv` on a host; each word arrives as it is.

    An own `bash -c` makes this independent of the login shell there.
    """
    line = " ".join(map(shlex.quote, argv))
    return [
        "ssh",
        "-t" if terminal else "-T",
        *OPTIONS,
        *parse_host(host).options,
        "--",
        f"exec bash -c {shlex.quote(line)}",
    ]


def module(python: str, name: str, *args: str, env: Mapping[str, str] = _NONE) -> list[str]:
    """Return the command for a module there; `python -m` looks for modules in its directory."""
    settings = [f"{key}={value}" for key, value in env.items()]
    return ["sh", "-c", 'cd / && exec env "$@"', "sh", *settings, python, "-m", name, *args]


def silent(host: str, said: str) -> SchedulerUnreachableError:
    """Return the error for a host that ssh did not reach; `said` is what ssh printed."""
    lines = [line.strip().removeprefix("ssh: ") for line in said.splitlines() if line.strip()]
    return SchedulerUnreachableError(
        f"{host} does not answer",
        cause=lines[-1] if lines else None,
        hint=f"its jobs are not affected; check it with: ssh {host} true",
    )


def run(host: str, words: Sequence[str], *, is_terminal: bool) -> int:
    """Run a command there with this process's output, and return its exit status.

    Without a terminal, the end of its input is Ctrl-C: sshd would only close its pipes.
    Raises SchedulerUnreachableError, KeyboardInterrupt.
    """
    sys.stdout.flush()
    with open(os.memfd_create("log"), "r+b", buffering=0) as log:  # a killed process leaves no file
        argv = ssh(host, words, terminal=is_terminal)
        place = f"/proc/{os.getpid()}/fd/{log.fileno()}"
        argv[1:1] = ["-E", place, "-oLogLevel=ERROR"]  # its own messages, not the command's
        given = None if is_terminal else subprocess.PIPE
        try:
            process = subprocess.Popen(argv, stdin=given, start_new_session=not is_terminal)
        except OSError as error:
            raise ClusterrunError("ssh cannot be started", cause=str(error)) from error
        status = _status(process, is_terminal)
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip()
    if status == SSH_FAILED and said:
        raise silent(host, said)
    return status if status >= 0 else 128 - status


def _status(process: subprocess.Popen[bytes], is_terminal: bool) -> int:
    try:
        return process.wait()
    except KeyboardInterrupt:
        if process.stdin:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
        if is_terminal:  # it had not connected yet: afterwards the terminal is raw
            raise
        return Exit.INTERRUPTED
    finally:
        process.kill()
