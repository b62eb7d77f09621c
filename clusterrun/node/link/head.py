"""The head's end of the link: gather the nodes, decide for all, and wait for their end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clusterrun.launch.plan import LOOPBACK
from clusterrun.node.base.causes import Ending, Failure, NodeError, NodeExit, lost_node
from clusterrun.node.base.identity import Identity
from clusterrun.node.base.ports import listening_socket
from clusterrun.node.base.report import LaunchParameters, Report, problems
from clusterrun.node.base.tasks import SharedDisk, Tasks, guarded
from clusterrun.node.link.clock import now_us
from clusterrun.node.link.connection import (
    ANSWER_S,
    LEAVE_S,
    REST_S,
    SETTLE_S,
    STRANGER_BYTES,
    Channel,
    StopDecision,
)
from clusterrun.node.link.handshake import Realm, is_proof, proof
from clusterrun.node.link.questions import Questions
from clusterrun.shared.typed import decoded

LOOK_S = 0.5  # between checks of other nodes' files
HANG_UP_S = 1.0  # for members to leave after the meeting has failed
BACKLOG = 1024
Decide = Callable[[Sequence[Report], str], LaunchParameters]
Prepare = Callable[[], Awaitable[None]]


@dataclass(kw_only=True)
class Peer:
    """A member, as the head knows it; `rests` is None until it can or cannot."""

    report: Report
    channel: Channel
    is_done: bool = False
    is_gone: bool = False
    rests: bool | None = None


class Head:
    """Node 0: welcome the members, if any, and decide how the attempt ends.

    It awaits `prepare` while they join, and calls `decide` once all have.
    If the realm may be `over`, it begins with those that have joined in time. `look` finds failures
    on this node.
    `left_behind`: a member did not report that all its processes are gone, or left alone.
    """

    def __init__(
        self,
        who: Identity,
        realm: Realm,
        ports: Sequence[int],
        timeout_s: float,
        decide: Decide,
        disk: SharedDisk,
        prepare: Prepare | None = None,
    ) -> None:
        self._who, self._realm, self._ports, self._disk = who, realm, ports, disk
        self._timeout_s, self._decide = timeout_s, decide
        self._prepare = prepare
        self._peers: dict[int, Peer] = {}
        self._is_launched = False
        self._changed = asyncio.Event()
        self._all_done = asyncio.Event()
        self._is_done = False
        self.decision = StopDecision()
        self._readers, self._handshakes = Tasks(), Tasks()
        self.questions = Questions(self._send_all, self._present)
        self.interrupted: Callable[[], None] = lambda: None
        self.look: Callable[[], None] = lambda: None
        self.left_behind = False

    async def meet(self, report: Report) -> LaunchParameters:
        """Wait for all nodes, decide by their reports, and welcome them. Raises NodeError."""
        if len(self._who.nodes) == 1:
            return await self._agree(report)
        self._secret = await self._shared_secret()
        server = await self._listen()
        try:
            return await guarded(self._agree(report), self._realm.watch(self._disk, LOOK_S))
        except NodeError as error:
            self._send_all("stop", **asdict(Ending(code=error.code, reason=error.message)))
            if readers := list(self._readers):
                # Until the members leave: a close with pings unread could lose the last message.
                await asyncio.wait(readers, timeout=HANG_UP_S)
            await self._close()
            raise
        finally:
            server.close()
            self._handshakes.cancel()

    async def _shared_secret(self) -> bytes:
        """Write the secret for all nodes, retrying while the disk is full."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return await self._disk.do(self._realm.create_secret)
            except OSError as error:
                if time.monotonic() > deadline:
                    text = f"{self._who.node}: cannot write {self._realm.secret_file}: {error}"
                    raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error
            await asyncio.sleep(LOOK_S)

    async def _agree(self, report: Report) -> LaunchParameters:
        """Wait for all nodes, then welcome them before one can disconnect unnoticed."""
        if self._prepare is not None:
            await self._prepare()
        deadline = time.monotonic() + self._timeout_s
        # Until all nodes have joined, or one is unfit.
        while len(self._peers) < len(self._who.nodes) - 1 and not any(
            peer.report.problem for peer in self._peers.values()
        ):
            self._changed.clear()
            now = time.monotonic()
            self._refuse_gone()
            if now > deadline and self._realm.over is None:
                absent = [n for i, n in enumerate(self._who.nodes) if i and i not in self._peers]
                text = f"{', '.join(absent)} did not join within {self._timeout_s:.0f} s"
                raise NodeError(NodeExit.RENDEZVOUS_FAILED, text)
            if now > deadline:
                break
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
        return self._welcome([report, *(peer.report for _, peer in sorted(self._peers.items()))])

    def _refuse_gone(self) -> None:
        if gone := [peer.report.node for peer in self._peers.values() if peer.is_gone]:
            text = f"{', '.join(gone)} disconnected before the launch"
            raise NodeError(NodeExit.RENDEZVOUS_FAILED, text)

    def _welcome(self, reports: Sequence[Report]) -> LaunchParameters:
        if found := problems(reports):
            raise NodeError(NodeExit.NODE_UNFIT, "; ".join(found))
        self._refuse_gone()
        # At this address most nodes reached this one.
        reached = Counter(peer.channel.own_address for peer in self._peers.values())
        address = max(reached, key=reached.__getitem__, default=LOOPBACK)
        parameters = self._decide(reports, address)
        self._is_launched = True
        about = {"port": parameters.port, "precision": parameters.precision}
        self._send_all("welcome", **about, variables=dict(parameters.variables))
        return parameters

    async def _listen(self) -> asyncio.Server:
        host = LOOPBACK if self._who.is_local else ""
        for port in self._ports:
            try:
                listener = listening_socket(port, host)
            except OSError:
                continue
            return await asyncio.start_server(
                self._knocked, sock=listener, limit=STRANGER_BYTES, backlog=BACKLOG
            )
        text = f"{self._who.node}: no free port for the agents ({self._ports[0]}, …)"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, f"{text}; set network.port_range")

    def _knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handshakes.start(self._admit(reader, writer))

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = None
        try:
            peer = await self._handshake(Channel(reader, writer))
        finally:
            if peer is None:
                writer.close()
        if peer is not None:
            self._peers[peer.report.node_rank] = peer
            self._changed.set()
            self._readers.start(self._listen_to(peer))

    async def _handshake(self, channel: Channel) -> Peer | None:
        """Admit a missing node that can prove it knows the attempt's secret."""
        challenge = secrets.token_hex(16)
        channel.send("challenge", nonce=challenge, **self._realm.label)
        hello = await channel.receive(ANSWER_S)
        if hello is None or hello.get("type") != "hello" or not self._realm.is_named_in(hello):
            return None
        own_end, theirs = channel.own_end, str(hello.get("nonce"))
        if not is_proof(hello.get("proof"), self._secret, "member", challenge, theirs, own_end):
            return None
        try:
            report = decoded(Report, hello["report"])
        except (KeyError, ValueError):
            return None
        if not 0 < report.node_rank < len(self._who.nodes) or report.node_rank in self._peers:
            return None
        channel.send("joined", proof=proof(self._secret, "head", theirs, own_end))
        channel.trust()
        return Peer(report=report, channel=channel)

    async def _listen_to(self, peer: Peer) -> None:
        while (message := await peer.channel.receive()) is not None:
            self._handle(peer, message)
        peer.is_gone = True
        self._changed.set()
        if self._is_launched and not peer.is_done and not self.decision.is_made:
            text = "its agent is gone: the connection closed"
            self.report_failure(lost_node(peer.report.node, text))
        self.look_around()

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        if message.get("type") == "ping":
            peer.channel.send("pong", clock_us=now_us())
        elif message.get("type") == "alive":
            peer.channel.send("alive")
        elif message.get("type") == "failed":
            try:
                self.report_failure(decoded(Failure, message))
            except ValueError:
                text = "its agent sent an unreadable message"
                self.report_failure(lost_node(peer.report.node, text))
        elif message.get("type") == "done":
            peer.is_done = True
            self.look_around()
        elif message.get("type") == "rested":
            peer.rests = message.get("well") is True
            self._changed.set()
        elif message.get("type") == "answer":
            self.questions.take(peer.report.node_rank, message)
        elif message.get("type") == "interrupt":
            self.interrupted()

    def addresses(self) -> dict[int, str]:
        """Return the addresses of the members that are present, by node rank."""
        return {rank: self._peers[rank].channel.peer_address for rank in self._present()}

    def look_around(self) -> None:
        """Notice what is complete: the answers, the ends of all, the attempt."""
        peers = self._peers.values()
        self.questions.look_around()
        if all(peer.is_done or peer.is_gone for peer in peers):
            self._all_done.set()
        if self._is_done and all(peer.is_done for peer in peers):
            self.decision.complete()

    @property
    def has_leavers(self) -> bool:
        """Return whether all ranks of any node have succeeded."""
        return self._is_done or any(peer.is_done for peer in self._peers.values())

    def report_failure(self, failure: Failure) -> None:
        """Stop the attempt for this failure, or for an earlier one on another node."""
        if not self.decision.failures:
            self._readers.start(self._hear_all())
        self.decision.add(failure)

    async def _hear_all(self) -> None:
        """Have all nodes look for failures: what they find reaches the head before the answers."""
        await self.questions.ask("look", within_s=SETTLE_S)
        self.look()
        self.decision.heard_all()

    def report_done(self) -> None:
        """Record that the ranks of this node have succeeded."""
        self._is_done = True
        self.look_around()

    async def ending(self) -> Ending:
        """Wait for the attempt's ending, and broadcast it."""
        ending = await self.decision.wait()
        self._send_all("stop", **asdict(ending))
        return ending

    def _send_all(self, kind: str, **fields: Any) -> None:
        for peer in self._peers.values():
            peer.channel.send(kind, **fields)

    def _present(self) -> list[int]:
        return [rank for rank, peer in self._peers.items() if not peer.is_gone]

    async def all_rest(self) -> bool:
        """Wait until all members have written their logs; return whether all of them rest."""
        until = time.monotonic() + REST_S
        while (left_s := until - time.monotonic()) > 0:
            peers = self._peers.values()
            is_refused = any(peer.is_gone or peer.rests is False for peer in peers)
            if is_refused or all(peer.rests for peer in peers):
                break
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        """Return whether all members rest."""
        return all(peer.rests and not peer.is_gone for peer in self._peers.values())

    def send_again(self, attempt: int) -> None:
        """Have the members that rest begin the next attempt."""
        self._send_all("again", attempt=attempt)

    async def leave(self) -> None:
        """Wait until nothing runs on any node, then close all connections."""
        self.look_around()
        self.left_behind = any(peer.rests and peer.is_gone for peer in self._peers.values())
        try:
            await asyncio.wait_for(self._all_done.wait(), LEAVE_S)
        except asyncio.TimeoutError:
            self.left_behind = True
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*(peer.channel.close() for peer in self._peers.values()))
        self._readers.cancel()
