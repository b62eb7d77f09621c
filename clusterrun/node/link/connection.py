"""The line between the agents of one job: they meet, fail together, and leave together.

JSON lines over TCP between the head and each other node; the messages are those of
docs/contracts.md. What ends the job is decided by the head alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from clusterrun.node.agent.report import Agreement, Report
from clusterrun.node.link.questions import Questions
from clusterrun.node.recovery.causes import Ending, Failure, lost_node

LINE_BYTES = 1 << 20
STRANGER_BYTES = 4096  # of a line from who has not proved to be an agent
TEXT_CHARS = 8192  # of each text in a message
HELLO_CHARS = 512  # the same to a stranger, which reads no more
SETTLE_S = 0.4  # after the first failure, so that one that came earlier elsewhere can arrive
CAUSE_S = 10.0  # the same if ranks only lost others, which may take long to die
LEAVE_S = 12.0  # longer than an agent needs to end what ignores SIGTERM
ANSWER_S = 60.0  # a busy node, or one whose file system stalls, is slow


class Link(Protocol):
    """What an agent sees of the others, be it the head or not."""

    async def meet(self, report: Report) -> Agreement:
        """Wait for all nodes, and agree with them; raises NodeError when they can't train."""

    def report_failure(self, failure: Failure) -> None:
        """Tell all nodes that something of this node failed."""

    def report_done(self) -> None:
        """Tell all nodes that the ranks of this one have ended well."""

    async def ending(self) -> Ending:
        """Wait for how the attempt ends, on all nodes alike."""

    async def leave(self) -> None:
        """Leave when the others do; nothing of this node runs any more."""

    def interrupt(self) -> None:
        """Tell the head that this node's agent was asked to end, where the ranks can save."""


class Leader(Link, Protocol):
    """What the head's agent can do besides: it decides for all nodes."""

    questions: Questions
    interrupted: Callable[[], None]
    left_behind: bool  # a node that did not say that nothing of it runs any more

    @property
    def has_leavers(self) -> bool:
        """Say whether a node's ranks have all ended well."""

    def conclude(self, ending: Ending) -> None:
        """End the attempt on all nodes."""

    def complete_with(self, completion: Callable[[], Ending]) -> None:
        """Have a good end be what `completion` says then."""


class Channel:
    """One connection to another agent, as messages.

    Until the other side has proved to be one, it may send little.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._received = bytearray()
        self._is_trusted = self._is_skipping = False
        keep_alive(writer.get_extra_info("socket"))

    def trust(self) -> None:
        """Take long messages, and pass over what cannot be read: the other side is an agent."""
        self._is_trusted = True

    async def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the next message; None if the other side is gone, or a stranger."""
        try:
            return await asyncio.wait_for(self._message(), timeout_s)
        except (OSError, EOFError, asyncio.TimeoutError):
            return None

    async def _message(self) -> dict[str, Any] | None:
        while True:
            message = _parsed(await self._line())
            if message is not None or not self._is_trusted:
                return message

    async def _line(self) -> bytes:
        """Wait for a whole line; empty if it was too long. Raises EOFError after the last."""
        while (end := self._received.find(b"\n")) < 0:
            data = await self._reader.read(LINE_BYTES)
            if not data:
                raise EOFError
            self._received += data
            if len(self._received) > (LINE_BYTES if self._is_trusted else STRANGER_BYTES):
                self._skip()
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        was_skipping, self._is_skipping = self._is_skipping, False
        return b"" if was_skipping else line

    def _skip(self) -> None:
        """Forget a line that is too long, but for what follows it."""
        if not self._is_trusted:
            raise EOFError
        if b"\n" not in self._received:
            self._received.clear()
            self._is_skipping = True

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, long texts cut; a connection that is gone is noticed by who reads it."""
        with contextlib.suppress(OSError, RuntimeError):
            size = TEXT_CHARS if self._is_trusted else HELLO_CHARS
            message = {"type": kind, **_cut(fields, size)}
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        """Send what is left and close."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

    @property
    def own_address(self) -> str:
        """The address of this host on the connection."""
        return plain_address(self._writer.get_extra_info("sockname"))

    @property
    def peer_address(self) -> str:
        """The address of the other host on the connection."""
        return plain_address(self._writer.get_extra_info("peername"))

    @property
    def own_end(self) -> str:
        """Address and port of this side, for the head's proof."""
        return _end(self._writer.get_extra_info("sockname"))

    @property
    def peer_end(self) -> str:
        """Address and port of the other side, for a member's proof."""
        return _end(self._writer.get_extra_info("peername"))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _cut(value: Any, size: int) -> Any:
    """Cut the texts in a message, so that the other side takes the line."""
    if isinstance(value, str):
        return value[:size]
    if isinstance(value, Mapping):
        return {name: _cut(part, size) for name, part in value.items()}
    return [_cut(part, size) for part in value] if isinstance(value, (list, tuple)) else value


def _end(name: Any) -> str:
    return f"{plain_address(name)} {name[1]}" if name else ""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice, within a minute, that the other host is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The last is for data that is under way: keepalive waits for that.
    times = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 9, "TCP_USER_TIMEOUT": 60_000}
    for name, value in times.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def plain_address(name: Any) -> str:
    """Write a socket's address as numbers, an IPv4 one in its own form."""
    text = str(name[0]).split("%", 1)[0] if name else ""
    return text.removeprefix("::ffff:") if "." in text else text


class Decision:
    """Collect what failed, wait a moment for what failed before it, then decide once."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._waited_s = 0.0
        self.completion: Callable[[], Ending] = Ending.completed

    @property
    def is_made(self) -> bool:
        """Say whether the attempt's end is decided."""
        return self._ending.done()

    def add(self, failure: Failure) -> None:
        """Take one more failure into account."""
        self._failures.append(failure)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SETTLE_S, self._decide)

    def complete(self) -> None:
        """Decide that all is well, unless something failed."""
        if not self._failures:
            self.make(self.completion())

    def make(self, ending: Ending) -> None:
        """Decide, unless that is done."""
        if not self._ending.done():
            self._ending.set_result(ending)

    async def wait(self) -> Ending:
        """Wait for the decision."""
        return await asyncio.shield(self._ending)

    def _decide(self) -> None:
        self._waited_s += SETTLE_S
        if self._waited_s < self._patience_s() and not self.is_made:
            asyncio.get_running_loop().call_later(SETTLE_S, self._decide)
            return
        self.make(Ending.of_first(self._failures))

    def _patience_s(self) -> float:
        """Return how long the cause of the failures may take to arrive, if they have another."""
        if not all(failure.is_consequence for failure in self._failures):
            return SETTLE_S
        has_lost_peer = any(failure.has_lost_peer for failure in self._failures)
        return CAUSE_S if has_lost_peer else 2 * SETTLE_S


def failure_in(message: Mapping[str, Any], node: str) -> Failure:
    """Read a `failed` message of a node, whatever it holds."""
    try:
        return Failure.from_data(message)
    except (KeyError, TypeError, ValueError):
        return lost_node(node, "its agent sent a message that cannot be read")


class Alone:
    """The link of a job of one node."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._decision = Decision()
        self.questions = Questions(lambda kind, **fields: None, lambda: ())
        self.interrupted: Callable[[], None] = lambda: None
        self.left_behind = self.has_leavers = False

    async def meet(self, report: Report) -> Agreement:
        """Agree with oneself."""
        return self._agreement

    def report_failure(self, failure: Failure) -> None:
        """Decide on this failure, or on one that came before."""
        self._decision.add(failure)

    def report_done(self) -> None:
        """End well."""
        self._decision.complete()

    async def ending(self) -> Ending:
        """Wait for how the attempt ends."""
        return await self._decision.wait()

    async def leave(self) -> None:
        """Leave; nobody waits."""

    def interrupt(self) -> None:
        """Do nothing: this node is the head."""

    def conclude(self, ending: Ending) -> None:
        """End the attempt."""
        self._decision.make(ending)

    def complete_with(self, completion: Callable[[], Ending]) -> None:
        """Have a good end be what `completion` says then."""
        self._decision.completion = completion
