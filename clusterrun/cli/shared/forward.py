"""Run a command on the host that has the run directory, as if it ran here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from clusterrun.backends.hosts import homes, openssh
from clusterrun.backends.local.backend import last_number, remember_number
from clusterrun.errors import ElsewhereError, Exit, UsageError
from clusterrun.verbs import find

VERBS: Final = ("status", "top", "logs", "cancel", "resume", "diagnose", "plan")
_LAST_ID: Final = "CLUSTERRUN_LAST_JOB_ID"  # of this machine; the other must use a larger one
_DISPLAY: Final = ("TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE")


def forward(args: Sequence[str], there: ElsewhereError, verb: str = "") -> int:
    """Run a command line there; return its status. Raises UsageError, SchedulerUnreachableError."""
    own_args = takewhile(lambda word: word != "--", args)  # the rest is for the script
    if any(word.partition("=")[0] == "--bundle" for word in own_args):
        run_dir = next(iter(there.runs.values()))
        hint = f"log in to {there.host} and run the command there; the run directory is {run_dir}"
        raise UsageError(f"--bundle writes a file here, but {there.message}", hint=hint)
    streams = (sys.stdin, sys.stdout, sys.stderr)
    is_terminal = all(each is not None and each.isatty() for each in streams)
    env = {name: os.environ[name] for name in _DISPLAY if name in os.environ}
    env[ElsewhereError.VARIABLE] = json.dumps(dict(there.runs))  # run directories, by word
    if verb == "resume":
        env[_LAST_ID] = str(last_number(find.own_runs()))
    words = openssh.module(there.python, "clusterrun", *args, env=env)
    status = openssh.run(there.host, words, is_terminal=is_terminal)
    if verb == "resume":  # `ask` also records the new job's id here
        homes.ask([find.locate(word or None) for word in there.runs])
    return status


def accept_forwarded() -> None:
    """Take over what `forward` sent with this command line: run directories and the last job id."""
    with contextlib.suppress(KeyError, ValueError):
        remember_number(int(os.environ.pop(_LAST_ID)))
    with contextlib.suppress(ValueError):
        find.FORWARDED.update(json.loads(os.environ.pop(ElsewhereError.VARIABLE)))
    if not sys.stdin.isatty():  # without a terminal, no signal tells that the connection has ended
        threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()


def _interrupt_at_end_of_input() -> None:
    """Interrupt this process when stdin, its connection, ends; exit if it then still runs."""
    with contextlib.suppress(OSError):
        while os.read(0, 1 << 12):
            pass
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(2 * openssh.LAST_WORDS_S)
    os._exit(Exit.INTERRUPTED)  # the interrupt has not ended this process in time
