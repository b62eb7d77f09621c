"""The rank's side of the control page: count calls, and read the call at which to save."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

from clusterrun.rank.emit import say
from clusterrun.shared.control_page import ControlPage

DECISION_TIMEOUT_S = 60.0


class CallCounter:
    """Counts the calls of this rank up to the one at which all ranks save and stop."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # A launcher of a single process sets no LOCAL_RANK.
        text = os.environ.get("LOCAL_RANK", "0")
        self._rank = int(text) if text.isdigit() else 0
        self._page = control_page(self._rank) if text.isdigit() else None
        self._calls = 0
        self._dealt_with = 0  # the newest request that this rank has waited for
        self._at = 0
        self._is_reached = False

    def should_checkpoint(self) -> bool:
        """Count this call, and return whether it is the one to save at."""
        if self._page is None or os.getpid() != self._pid:
            return False  # a forked process is not counted
        self._calls += 1
        if self._calls == 1:
            self._leave_sigterm_to_agent(self._page)
        self._page.count(self._rank, self._calls)
        held = self._page.held
        if held > self._dealt_with:
            self._await_decision(self._page, held)
        if self._calls != self._at:
            return False
        self._is_reached = True
        return True

    def should_stop(self) -> bool:
        """Return whether the save point was reached; if so, tell the agent that the rank stops."""
        if self._is_reached and self._page is not None and os.getpid() == self._pid:
            self._page.stopping(self._rank)
        return self._is_reached

    def _leave_sigterm_to_agent(self, page: ControlPage) -> None:
        """Ignore SIGTERM from now on: the agent also gets it, and has all ranks save and stop.

        Slurm may signal every process of a step. A handler of the script stays, and child
        processes regain the default action.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _nothing)
            signal.siginterrupt(signal.SIGTERM, False)  # no EINTR in the script's C libraries
            os.register_at_fork(after_in_child=_restore_sigterm)
            page.shielded(self._rank)

    def _await_decision(self, page: ControlPage, held: int) -> None:
        """Wait until the agents have chosen the call, up to a limit: an agent may be dead."""
        self._dealt_with = held
        deadline = time.monotonic() + DECISION_TIMEOUT_S
        while (decided := page.save_point).request < held:
            if time.monotonic() > deadline:
                waited = f"no save point was chosen within {DECISION_TIMEOUT_S:.0f} s"
                say(f"{waited}; training continues")
                return
            time.sleep(0.001)
        if decided.at:
            self._at = decided.at


def _nothing(*_: object) -> None:
    """Handle a signal by doing nothing."""


def _restore_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def control_page(local_rank: int) -> ControlPage | None:
    """Map the page that the agent made; None outside a run, or if it can't be mapped."""
    spool = os.environ.get("CLUSTERRUN_SPOOL")
    path = Path(spool or "", "control")
    try:
        return ControlPage(path, local_rank + 1) if spool and path.is_file() else None
    except (OSError, ValueError):
        return None  # the training continues and is never asked to save
