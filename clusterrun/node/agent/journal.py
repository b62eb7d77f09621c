"""What an agent says: events, lines in its node's log, and lines in the job's output."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.link.clock import Clock, Offset

LINE_CHARS = 1000


class Journal:
    """The events and lines of one node, in the head's time."""

    def __init__(self, attempt: Attempt, forwarder: Forwarder, clock: Clock) -> None:
        self.forwarder, self.clock = forwarder, clock
        self._number, self._who = attempt.number, attempt.who

    def now_s(self) -> float:
        """Return the head's time in seconds."""
        return self.clock.corrected_s(time.time())

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record an event; `fields` may have a time of its own."""
        about = {"ts": round(self.now_s(), 6), "type": kind, "attempt": self._number}
        self.forwarder.event({**about, "node": self._who.node, **fields})

    def of_rank(self, event: dict[str, Any]) -> None:
        """Record an event of a rank; a script's own values may have the names of ours."""
        event["ts"] = round(self.clock.corrected_s(event["ts"]), 6)
        about = {"attempt", "node", "type"}
        self.event(event["type"], **{n: v for n, v in event.items() if n not in about})

    def say(self, text: str, *, tell: bool = True, is_error: bool = False) -> None:
        """Write to the node's log, and with `tell` also to the job's output.

        With `is_error`, the log marks it so that readers find it among the error lines.
        """
        self.forwarder.say(f"error: {text}" if is_error else text)
        if tell:
            say_on_stderr(f"{self._who.node}: {text}")

    def say_not_forked(self, why: str) -> None:
        """Say why the ranks of this node are not forked; the head tells the user."""
        self.say(why, tell=self._who.is_head)
        self.event("not_forked", reason=why)

    def clock_compared(self, offset: Offset) -> None:
        """Record that this node's clock differs from the head's."""
        self.event("clock", offset_us=offset.offset_us, rtt_us=offset.rtt_us)
        seconds = abs(offset.offset_us) / 1_000_000
        side = "ahead of" if offset.offset_us > 0 else "behind"
        text = f"this node's clock is {seconds:.3f} s {side} the head's; times are corrected"
        self.say(text, tell=False)

    def task_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report the error of a background task in one line instead of asyncio's traceback."""
        error = context.get("exception")
        what = f": {type(error).__name__}: {error}" if error else ""
        self.say(f"internal error: {context['message']}{what}"[:LINE_CHARS])
