"""A connection between the conductor and an agent, and the decision that stops an attempt.

The messages are JSON lines over TCP; docs/contracts.md lists them. Both ends first prove that they
belong to the same attempt, without sending its secret. Each proof covers the address and port of
the conductor's end of the connection: a relay would have others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from clusterrun.node.base.causes import Cause, Ending, Failure
from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import parse_object
from clusterrun.shared.finding import Finding

LINE_BYTES = 1 << 24  # no agent sends a longer one
READ_BYTES = 1 << 20
STRANGER_BYTES = 32 << 10  # of a line from a peer that is not yet trusted
SETTLE_S = 0.4  # after the first failure: an earlier one may still arrive from another node
ALIKE_S = 2.0  # the same if other ranks may yet fail alike, and no restart has to wait
CAUSE_S = 10.0  # the same if the cause is on another node, whose rank may be slow to report it
LEAVE_S = 12.0  # longer than an agent needs to kill processes that ignore SIGTERM
REST_S = 10.0  # for all agents to write the rest of their logs
ANSWER_S = 60.0  # a busy node or a stalled file system is slow


class Channel:
    """Exchange messages with a peer. Until it is trusted, it may send only short lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._received = bytearray()
        self.is_trusted = False  # until the peer's proof; then it may also send long lines
        own, peer = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
        self.own_address, self.peer_address = plain_address(own), plain_address(peer)
        self.own_end = f"{self.own_address} {own[1]}" if own else ""  # for the proofs
        self.peer_end = f"{self.peer_address} {peer[1]}" if peer else ""
        _keep_alive(writer.get_extra_info("socket"))

    async def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None if none comes, or if a stranger's is unreadable."""
        message = None
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
            while message is None:
                message = parse_object(await asyncio.wait_for(self._line(), timeout_s))
                if not self.is_trusted:  # of a trusted peer, unreadable lines are skipped
                    break
        return message

    async def _line(self) -> bytes:
        """Return the next line. Raises EOFError after the last, or if one is too long."""
        while (end := self._received.find(b"\n")) < 0:
            limit = LINE_BYTES if self.is_trusted else STRANGER_BYTES
            if len(self._received) > limit or not (data := await self._reader.read(READ_BYTES)):
                raise EOFError
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, whose texts are short; the reader notices a closed connection."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(json.dumps({"type": kind, **fields}).encode() + b"\n")

    async def close(self) -> None:
        """Flush and close."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel detect within a minute that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # TCP_USER_TIMEOUT, in ms, covers unacknowledged data, for which keepalive (in s) waits.
    times = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 9, "TCP_USER_TIMEOUT": 60_000}
    for name, value in times.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def plain_address(name: Any) -> str:
    """Return a socket's numeric address, an IPv4-mapped one as IPv4."""
    text = str(name[0]).split("%", 1)[0] if name else ""
    return text.removeprefix("::ffff:") if "." in text else text


class Realm(NamedTuple):
    """The attempt whose agents may connect: all can read its secret."""

    paths: RunPaths
    attempt: int

    @property
    def label(self) -> dict[str, Any]:
        """Run and attempt, which both sides send unencrypted."""
        root = self.paths.root
        return {"run": f"{root.parent.name}/{root.name}", "attempt": self.attempt}

    def is_named_in(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message claims to come from this attempt."""
        return all(message.get(name) == value for name, value in self.label.items())

    def read_secret(self) -> bytes:
        """Return the secret; call this once the conductor has answered. Raises OSError."""
        if secret := read_attempt(self.paths, self.attempt).secret:  # NFS caches a missing file
            return secret.encode()
        raise FileNotFoundError(self.paths.attempt_record(self.attempt))


def proof(secret: bytes, *parts: str) -> str:
    """Return the HMAC of `parts`."""
    text = "\x00".join(parts).encode(errors="surrogatepass")
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def is_proof(given: object, secret: bytes, *parts: str) -> bool:
    """Check an HMAC in constant time; `given` may be anything."""
    right = proof(secret, *parts).encode()
    return hmac.compare_digest(str(given).encode(errors="surrogatepass"), right)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A node's report before the launch."""

    node: str
    node_rank: int
    versions: Mapping[str, str]
    capabilities: tuple[tuple[int, int], ...] = ()  # compute capabilities of the GPUs it may use
    problem: str = ""  # empty if the node is fit
    checks: tuple[Finding, ...] = ()  # the notes and failures of its preflight
    port: int = 0  # only the first node gives this and `variables`, as LaunchParameters has them
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LaunchParameters:
    """The launch parameters."""

    address: str  # the first node's
    port: int
    precision: str
    interface: str = ""  # this node's
    # What `accelerate launch` adds to the environment of node 0's first rank, empty if each node
    # starts `accelerate launch` itself.
    variables: Mapping[str, str] = field(default_factory=dict)


class StopDecision:
    """How the attempt ends: settled once, shortly after the first failure."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._waited_s = 0.0
        self.completion: Callable[[], Ending] = Ending.completed  # if all ranks succeed
        # Gets how many ranks failed alike and how many failed: may others still fail alike?
        self.may_wait: Callable[[int, int], bool] = lambda *_: False
        # While it returns True, nothing is settled: ranks save in their own handlers.
        self.is_held: Callable[[], bool] = lambda: False

    @property
    def is_made(self) -> bool:
        """Return whether the attempt's ending is settled."""
        return self._ending.done()

    def add(self, failure: Failure) -> None:
        """Add a failure."""
        self.failures.append(failure)
        if len(self.failures) == 1:
            asyncio.get_running_loop().call_later(SETTLE_S, self._decide)

    def heard_all(self) -> None:
        """Decide now if ranks were killed, and no node has reported what may have come first."""
        signals = {failure.signal for failure in self.failures if not failure.is_consequence}
        if signals == {signal.SIGKILL} and not self.is_held():
            self.make(Ending.of_first(self.failures))

    def complete(self) -> None:
        """Settle on completion, unless something failed."""
        if not self.failures and not self.is_held():
            self.make(self.completion())

    def make(self, ending: Ending) -> None:
        """Settle on an ending, unless one is settled."""
        if not self._ending.done():
            self._ending.set_result(ending)

    async def wait(self) -> Ending:
        """Wait for the ending."""
        return await asyncio.shield(self._ending)

    def _decide(self) -> None:
        """Settle on the first failure; if its cause may still arrive, look again later."""
        self._waited_s += SETTLE_S
        is_early = self.is_held() or self._waited_s < self._patience_s()
        if is_early and not self.is_made:
            asyncio.get_running_loop().call_later(SETTLE_S, self._decide)
            return
        self.make(Ending.of_first(self.failures))

    def _patience_s(self) -> float:
        """Return how long to wait, after the first failure, for its cause or for others alike."""
        if any(not failure.is_consequence for failure in self.failures):
            alike = Ending.of_first(self.failures).alike
            return ALIKE_S if self.may_wait(alike, len(self.failures)) else SETTLE_S
        # Consequences alone: their cause may yet come, mostly soon and from the same node.
        are_remote = [f.has_lost_peer or f.cause is Cause.WORLD_ELSEWHERE for f in self.failures]
        return CAUSE_S if any(are_remote) else 2 * SETTLE_S
