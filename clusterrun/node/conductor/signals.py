"""Receive signals without doing anything in their handlers: none is lost, none interrupts work."""

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
    """The signals that have arrived; create it first of all, in the main thread.

    Handlers rather than SIG_IGN or a mask: children start with default dispositions.
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
        """Return the numbers of the signals that arrive within a time, as soon as one does."""
        readable, _, _ = select.select([self._reader], [], [], max(0.0, seconds))
        return list(os.read(self._reader, 4096)) if readable else []

    def ignore(self) -> None:
        """Take no more of them: Python gives them back their defaults before it is gone."""
        for number in HEARD:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held(number: signal.Signals) -> Iterator[None]:
    """Hold back a signal, from children too; it arrives afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
