"""Receive signals through a pipe, so that none is lost and none interrupts work."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator

HEARD = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGURG,
    signal.SIGCHLD,
    signal.SIGHUP,
)


class Signals:
    """The pending signals; create this first, in the main thread.

    It sets handlers: children would inherit SIG_IGN or a mask.
    """

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        for descriptor in (self._reader, writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in HEARD:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])

    def wait(self, seconds: float) -> list[int]:
        """Return the signals as soon as one arrives, or none after `seconds`."""
        readable, _, _ = select.select([self._reader], [], [], max(0.0, seconds))
        return list(os.read(self._reader, 4096)) if readable else []

    def ignore(self) -> None:
        """Ignore the signals from now on: Python restores the defaults before it exits."""
        for number in HEARD:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held(number: signal.Signals) -> Iterator[None]:
    """Block a signal, also in children; it arrives afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
