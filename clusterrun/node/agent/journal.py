"""What an agent says: events, lines in its node's log, and lines in the job's output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from clusterrun.launch.plan import Plan
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.report import LaunchParameters
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.node.base.tasks import task_error
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.link.clock import Clock, Offset
from clusterrun.shared.wording import count


class Journal:
    """The events and lines of one node, in the conductor's time."""

    def __init__(self, attempt: Attempt, forwarder: Forwarder, clock: Clock) -> None:
        self.forwarder, self.clock = forwarder, clock
        self._number, self._who = attempt.number, attempt.who

    def now_s(self) -> float:
        """Return the conductor's time in seconds."""
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

    def told(self, message: Mapping[str, Any]) -> None:
        """Record an event or a line of the conductor."""
        if message.get("type") == "event":
            self.event(str(message["name"]), **message["fields"])
        else:
            self.say(str(message["text"]), tell=False)

    def say_where(self, plan: Plan, parameters: LaunchParameters) -> None:
        """Log where the ranks meet."""
        world = f"{count(plan.nodes, 'node')} x {count(plan.procs_per_node, 'rank')}"
        where = f"{parameters.address}:{parameters.port}"
        over = f" over {parameters.interface}" if parameters.interface else ""
        text = f"{world}, rendezvous at {where}{over}, precision {parameters.precision}"
        self.say(text, tell=False)

    def say_not_forked(self, why: str) -> None:
        """Say why the ranks of this node are not forked; the first node tells the user."""
        self.say(why, tell=self._who.is_first)
        self.event("not_forked", reason=why)

    def clock_compared(self, offset: Offset) -> None:
        """Record that this node's clock differs from the conductor's."""
        self.event("clock", offset_us=offset.offset_us, rtt_us=offset.rtt_us)
        seconds = abs(offset.offset_us) / 1_000_000
        side = "ahead of" if offset.offset_us > 0 else "behind"
        text = f"this node's clock is {seconds:.3f} s {side} the conductor's; times are corrected"
        self.say(text, tell=False)

    def task_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report the error of a background task in one line instead of asyncio's traceback."""
        self.say(task_error(context))
