"""Start scheduler commands; no other module starts one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterrun.errors import SchedulerUnreachableError

TIMEOUT_S = 30.0  # Slurm's own clients give up after about 10 s without slurmctld
PAUSES_S = (0.5, 2.0)  # between the three tries
PATIENCE_S = 20.0  # no new try begins after this
TIMED_OUT = "the command was still running and was killed"

# What Slurm's clients say when the fault may pass, and when it will not.
PASSING = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Zero Bytes were transmitted or received",
    "Slurm backup controller in standby mode",
)
LASTING = (
    "Could not establish a configuration source",
    "Unable to process configuration file",
    "Protocol authentication error",
    "Munge encode failed",
)


@dataclass(frozen=True, kw_only=True)
class Completed:
    """How a command ended and what it wrote."""

    rc: int
    stdout: str
    stderr: str


def find(program: str) -> str | None:
    """Find a program on PATH."""
    return shutil.which(program)


def run(
    argv: Sequence[str],
    *,
    timeout_s: float = TIMEOUT_S,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    cwd: Path | None = None,
    tries: int = 1 + len(PAUSES_S),
) -> Completed:
    """Run a command to its end, again where the scheduler did not answer; never through a shell.

    A status other than 0 is returned, not raised. Raises SchedulerUnreachableError when the
    program is not there, takes longer than `timeout_s`, or says that the scheduler does not answer.
    """
    begin = time.monotonic()
    for number in range(1, tries + 1):
        done = _run_once(argv, timeout_s, env, input, cwd)
        cause = TIMED_OUT if done is None else _unreachable(done)
        if done is not None and not cause:
            return done
        late = time.monotonic() - begin > PATIENCE_S
        if number == tries or late or not _may_pass(cause):
            break
        time.sleep(PAUSES_S[min(number, len(PAUSES_S)) - 1])
    raise _error(argv[0], cause, time.monotonic() - begin, number)


def _run_once(
    argv: Sequence[str],
    timeout_s: float,
    env: Mapping[str, str] | None,
    input: str | None,
    cwd: Path | None,
) -> Completed | None:
    try:
        process = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SchedulerUnreachableError(
            f"cannot start {argv[0]}",
            cause=str(error),
            hint="is this a login node of the cluster? '--cluster local' needs no scheduler",
        ) from error
    data = None if input is None else input.encode("utf-8", "surrogateescape")
    with process:
        try:
            stdout, stderr = process.communicate(data, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            return None
        except BaseException:
            _kill(process)
            raise
    return Completed(rc=process.returncode, stdout=_text(stdout), stderr=_text(stderr))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and its children; one that kept our pipes would keep us waiting."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _unreachable(done: Completed) -> str:
    """Return the line of the answer that says that the scheduler gave none; empty if it did."""
    if done.rc == 0:
        return ""
    for line in done.stderr.splitlines():
        if any(words in line for words in PASSING + LASTING):
            return line.strip()
    return ""


def _may_pass(cause: str) -> bool:
    return not any(words in cause for words in LASTING)


def _error(program: str, cause: str, elapsed_s: float, tries: int) -> SchedulerUnreachableError:
    count = "1 try" if tries == 1 else f"{tries} tries"
    return SchedulerUnreachableError(
        f"{program} got no answer within {elapsed_s:.0f} s ({count})",
        cause=cause,
        hint=(
            "jobs that are already in the queue are not affected"
            if _may_pass(cause)
            else "Slurm's configuration or munge does not work here; is SLURM_CONF right?"
        ),
    )
