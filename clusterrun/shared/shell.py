"""Run a command and collect its output: Slurm's (except srun), git, bash, Python."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from clusterrun.errors import SchedulerUnreachableError
from clusterrun.shared import files

TIMEOUT_S = 30.0  # Slurm's clients give up after about 10 s without slurmctld
PAUSES_S = (0.5, 2.0)  # between tries
TRIES = 1 + len(PAUSES_S)
PATIENCE_S = 5.0  # no new try after this: each takes 9 s if slurmctld is down
TIMED_OUT = -1000  # not a possible exit status
REST_S = 1.0  # for the output of a command that was killed

# Messages of Slurm's clients for temporary faults, and for permanent ones.
TEMPORARY_FAULTS = (
    *("Unable to contact slurm controller", "Socket timed out"),
    *("Zero Bytes were transmitted or received", "Slurm backup controller in standby mode"),
)
PERMANENT_FAULTS = (
    "cannot stat file",  # slurm.conf; Slurm would look for it for a minute
    *("Could not establish a configuration source", "Unable to process configuration file"),
    *("Protocol authentication error", "Munge encode failed"),
)


class Completed(NamedTuple):
    """The exit status and output of a command; `pid` is that of one that was killed."""

    rc: int
    stdout: str
    stderr: str
    pid: int = 0


def find(program: str) -> str | None:
    """Find a program on PATH."""
    return shutil.which(program)


def run(
    argv: Sequence[str],
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    cwd: Path | None = None,
    tries: int = TRIES,
) -> Completed:
    """Run a command, never through a shell; try again if the scheduler did not answer.

    A status other than 0 is not an error. Raises SchedulerUnreachableError if the program is not
    found, takes longer than `timeout_s` (default: TIMEOUT_S), or reports that the scheduler does
    not answer.
    """
    begin = time.monotonic()
    for number in range(1, tries + 1):
        done = run_once(argv, TIMEOUT_S if timeout_s is None else timeout_s, env, input, cwd)
        cause = why_no_answer(done)
        if not cause:
            return done
        is_late = time.monotonic() - begin > PATIENCE_S
        if number == tries or is_late or not is_temporary(cause):
            break
        time.sleep(PAUSES_S[min(number, len(PAUSES_S)) - 1])  # the last pause is repeated
    raise unreachable_error(argv[0], done, time.monotonic() - begin, number)


def run_once(
    argv: Sequence[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    input: str | None = None,
    cwd: Path | None = None,
    rest_s: float = REST_S,
    most: int = files.MOST_BYTES,
) -> Completed:
    """Run a command once; its status is TIMED_OUT if it was killed after `timeout_s`.

    Keep the first `most` bytes of each stream. After a kill, wait at most `rest_s` for the end: a
    command that the kernel blocks stays. Raises SchedulerUnreachableError if it cannot be started.
    """
    with open(files.unnamed_file(), "w+b", buffering=0) as stdin:  # unlike a pipe, needs no writer
        stdin.write((input or "").encode("utf-8", "surrogateescape"))
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                list(argv),
                env=None if env is None else dict(env),
                cwd=cwd,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            text = f"cannot start {argv[0]}"
            hint = "use a login node of the cluster, or run here with --cluster local"
            raise SchedulerUnreachableError(text, cause=str(error), hint=hint) from error
    return _collect(process, timeout_s, rest_s, most)


def _collect(
    process: subprocess.Popen[bytes], timeout_s: float, rest_s: float, most: int
) -> Completed:
    """Collect a command's output; kill it after `timeout_s`, or if this process is interrupted."""
    kept = [bytearray() for _ in range(2)]  # the first `most` bytes of each stream
    pid = 0  # of a command that was killed
    try:
        _read(process, kept, most, time.monotonic() + timeout_s)
    except BaseException as error:
        pid = process.pid
        _kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):  # an escaped child may hold the pipes
            _read(process, kept, most, time.monotonic() + rest_s)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
    stdout, stderr = (data.decode("utf-8", "replace") for data in kept)
    return Completed(TIMED_OUT if pid else process.returncode, stdout, stderr, pid)


def _read(
    process: subprocess.Popen[bytes], kept: Sequence[bytearray], most: int, deadline: float
) -> None:
    """Read all output, and keep its beginning. Raises TimeoutExpired at the deadline."""
    with selectors.DefaultSelector() as selector:
        for pipe, beginning in zip((process.stdout, process.stderr), kept, strict=True):
            if pipe:
                selector.register(pipe, selectors.EVENT_READ, beginning)
        while selector.get_map():
            if (left := deadline - time.monotonic()) <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                key.data.extend(data[: most - len(key.data)])
                if not data:
                    selector.unregister(key.fileobj)
        process.wait(max(0.0, deadline - time.monotonic()))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and its children: a child that holds our pipes would make us wait."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def why_no_answer(done: Completed) -> str:
    """Return the line that says why the scheduler did not answer; "" if it did."""
    if done.rc == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    for line in lines:
        if any(words in line for words in TEMPORARY_FAULTS + PERMANENT_FAULTS):
            return line
    if done.rc == TIMED_OUT:
        return lines[-1] if lines else "the command was still running and was killed"
    return ""


def is_temporary(cause: str) -> bool:
    """Return whether another try may help."""
    return not any(words in cause for words in PERMANENT_FAULTS)


def unreachable_error(
    program: str, done: Completed, elapsed_s: float, number: int = 1
) -> SchedulerUnreachableError:
    """Return the error of a command that got no answer, after this number of tries."""
    cause = why_no_answer(done)
    hint = "try again later; jobs that are already in the queue are not affected"
    tries = "1 try" if number == 1 else f"{number} tries"
    if not is_temporary(cause):
        message, hint = f"{program} failed", "check SLURM_CONF and munge on this machine"
    elif done.rc == TIMED_OUT or elapsed_s >= 1:  # not "within 0 s"
        message = f"{program} got no answer within {elapsed_s:.0f} s ({tries})"
    else:
        message = f"{program} could not reach Slurm ({tries})"
    return SchedulerUnreachableError(message, cause=cause, hint=hint)
