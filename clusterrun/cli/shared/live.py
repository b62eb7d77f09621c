"""Show a job on a terminal until it ends or a key is pressed: `top` and `status -f`."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import signal
import sys
import termios
import time
import tty
from typing import Final

from click.exceptions import Exit as ClickExit
from rich.console import Console
from rich.live import Live

from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.cli.shared.fitting import width_of
from clusterrun.cli.shared.screen import planned, screen
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.own_modules import module_argv
from clusterrun.verbs.status import wait

_READ_S: Final = 2.0  # between two readings of the files; the scheduler is asked less often
_TICK_S: Final = 0.25  # in which a new size of the terminal is seen
_COMMANDS: Final = {
    b"l": ("logs",),
    b"e": ("logs", "--errors"),
    b"s": ("diagnose", "--stacks"),
    b"c": ("cancel", "-y", "--checkpoint"),
    b"x": ("cancel", "-y"),
}


def print_screen(job: JobStatus) -> None:
    """Print the screen once; on a terminal, no line is longer than its width."""
    width = width_of(sys.stdout)
    console = Console(force_terminal=True, color_system="standard", width=width or 10_000)
    with console.capture() as text:
        console.print(screen(job, planned(job.record), width or 80))
    for line in text.get().splitlines():
        output.answer(line, wraps=False)


def watch(record: JobRecord) -> JobStatus | None:
    """Show a job until it ends, and return its last status; None if there is no terminal.

    The terminal is as before afterwards. Raises ClickExit if a person quits.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return None
    for variable in ("COLUMNS", "LINES"):  # a terminal may change its size
        os.environ.pop(variable, None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # it would leave the screen on the terminal
    has_colour = output.wants_colour(sys.stdout, output.current_session().color, os.environ)
    console = Console(file=sys.stdout, force_terminal=True, no_color=not has_colour)
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            return wait(record, rest=functools.partial(_rest, live, planned(record)))
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal was closed
            raise
        raise ClickExit(128 + signal.SIGHUP) from error
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _rest(live: Live, plan: str, job: JobStatus, pause_s: float) -> None:
    """Draw a job, and wait for a key; return early if the terminal has another size."""
    size = live.console.size
    live.update(screen(job, plan, *size), refresh=True)
    until = time.monotonic() + min(pause_s, _READ_S)
    while time.monotonic() < until and live.console.size == size:
        if not select.select([sys.stdin], [], [], _TICK_S)[0]:
            continue
        key, name = _key(), job.record.job_id or job.record.name
        if key in (b"", b"q", b"\x04"):
            live.stop()
            output.note(f"job {name} was not ended")
            raise ClickExit(0)
        if key in _COMMANDS:
            live.stop()
            with contextlib.suppress(KeyboardInterrupt):
                _run(_COMMANDS[key], name, job.record.run_dir)
            live.start()
            return


def _key() -> bytes:
    return os.read(sys.stdin.fileno(), 1).lower()


def _run(command: tuple[str, ...], name: str, run_dir: str) -> None:
    """Run a command about a job, and wait until a person has read what it prints."""
    if command[0] == "cancel":
        output.say(f"End job {name}? Press y for yes, any other key for no")
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
        if _key() != b"y":
            return
    output.say(f"clusterrun {' '.join(command)} {name}")
    words = module_argv(sys.executable, "clusterrun", *command, run_dir)
    os.spawnv(os.P_WAIT, sys.executable, words)
    output.say("Press a key to go back to the job")
    _key()
