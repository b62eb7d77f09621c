"""The conductor's end of the link: gather an attempt's nodes, hear them, and tell them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from clusterrun.launch.plan import LOOPBACK
from clusterrun.node.base.causes import Ending, Failure, NodeError, NodeExit, lost_node
from clusterrun.node.base.tasks import SharedDisk, Tasks
from clusterrun.node.link.connection import (
    ANSWER_S,
    LEAVE_S,
    REST_S,
    SETTLE_S,
    Channel,
    LaunchParameters,
    Realm,
    Report,
    StopDecision,
    is_proof,
    proof,
)
from clusterrun.shared.typed import decoded
from clusterrun.shared.wording import count

LOOK_S = 0.5  # between checks of what nodes have written
HANG_UP_S = 1.0  # for members to leave after the meeting has failed
REPLY_S = 20.0  # an agent that takes longer to answer a question is stopped or gone


@dataclass(kw_only=True)
class Peer:
    """A member, as the conductor knows it."""

    node: str
    node_rank: int
    channel: Channel
    is_done: bool = False  # its ranks have ended
    left_as_asked: bool = False  # one of them exits because it was asked to
    is_gone: bool = False  # it has disconnected, or its step has ended
    rests: bool | None = None  # whether it will wait for the next attempt; None: not known yet

    @property
    def is_beside(self) -> bool:
        """Return whether it runs on the conductor's machine, whose name may be 127.0.1.1 there."""
        address = self.channel.peer_address
        return address in (self.channel.own_address, "::1") or address.startswith("127.")


class Answers(NamedTuple):
    """The members' answers by node rank, and the node ranks that did not answer."""

    given: Mapping[int, Mapping[str, Any]]
    silent: frozenset[int]


class Questions:
    """Ask all `members` (node ranks) in parallel, one question at a time; `send` sends to all."""

    def __init__(self, send: Callable[..., None], members: Callable[[], Iterable[int]]) -> None:
        self._send, self._members = send, members
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._missing: set[int] = set()  # the members whose answers are awaited
        self._answered = asyncio.Event()
        self._lock = asyncio.Lock()

    async def ask(self, what: str, *, within_s: float | None = None, **fields: Any) -> Answers:
        """Return the answers of all present members, once all have answered or time is up."""
        async with self._lock:
            self._number += 1
            self._answers, self._missing = {}, set(self._members())
            self._answered.clear()
            self._send("ask", question=self._number, what=what, **fields)
            self.drop_gone()  # if no member is present, there is nothing to wait for
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._answered.wait(), within_s or REPLY_S)
            return Answers(given=self._answers, silent=frozenset(self._missing))

    def take(self, member: int, message: dict[str, Any]) -> None:
        """Accept a member's answer to the open question."""
        if message.get("question") == self._number:
            self._answers[member] = message
            self.drop_gone()

    def drop_gone(self) -> None:
        """Stop waiting for members that are gone."""
        self._missing &= set(self._members()) - self._answers.keys()
        if not self._missing:
            self._answered.set()


class Head:
    """The members of one attempt, and the decision how it ends."""

    def __init__(
        self,
        realm: Realm,
        nodes: int,
        timeout_s: Callable[[], float],
        disk: SharedDisk,
        *,
        may_lack_nodes: bool = False,  # it begins with the nodes that have joined in time
    ) -> None:
        self._realm, self._nodes, self._disk = realm, nodes, disk
        self._reading_secret: asyncio.Future[bytes] | None = None
        self._timeout_s, self._may_lack_nodes = timeout_s, may_lack_nodes
        self.peers: dict[int, Peer] = {}
        self._reports: dict[int, Report] = {}  # by node rank, like `peers`
        self.names: tuple[str, ...] = ()  # of all nodes in rank order, once the first has joined
        self._refusal: NodeError | None = None  # why the attempt cannot start
        self._has_unfit_node = False  # a report names a problem
        self._is_refused = False  # members were told why; a late node gets `_answer_to_late`
        self.is_launched = False  # members were told to start their ranks
        late = "the other nodes have started without this one"
        self._answer_to_late = Ending(code=int(NodeExit.RENDEZVOUS_FAILED), reason=late)
        self._changed = asyncio.Event()  # what `meet` and `_until` wait for may be met now
        self._is_released = False  # members that rest were told to begin the next attempt or exit
        self._readers = Tasks()  # of `_listen_to`, for each member, and `_hear_all`
        self.decision = StopDecision()
        self.questions = Questions(self._send_all, self._present)
        # Gets what the first node reports while its ranks run.
        self.heard: Callable[[str, dict[str, Any]], None] = lambda *_: None

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Admit a missing node that proves that it knows the secret; return whether it joined."""
        channel = Channel(reader, writer)
        own_nonce = secrets.token_hex(16)
        channel.send("challenge", nonce=own_nonce, **self._realm.label)
        hello = await channel.receive(ANSWER_S)
        if hello is None or hello.get("type") != "hello" or not self._realm.is_named_in(hello):
            return False  # it belongs to another attempt, or is no agent
        own_end, members_nonce = channel.own_end, str(hello.get("nonce"))
        secret, parts = await self.secret(), ("member", own_nonce, members_nonce, own_end)
        if not secret or not is_proof(hello.get("proof"), secret, *parts):
            return False
        node, rank = hello.get("node"), hello.get("node_rank")
        if not isinstance(node, str) or not isinstance(rank, int):
            return False
        if rank in self.peers or not 0 <= rank < self._nodes:
            return False
        channel.send("joined", proof=proof(secret, "conductor", members_nonce, own_end))
        channel.is_trusted = True
        if self.is_launched or self._is_refused:  # it is too late to join
            channel.send("stop", **asdict(self._answer_to_late))
            while await channel.receive(HANG_UP_S):
                pass  # a close with pings unread could lose the message
            await channel.close()
            return False
        peer = self.peers[rank] = Peer(node=node, node_rank=rank, channel=channel)
        self._readers.start(self._listen_to(peer))
        return True

    async def secret(self) -> bytes:
        """Return the attempt's secret, which is read once; b"" if it can't be read."""
        self._reading_secret = self._reading_secret or self._disk.do(self._realm.read_secret)
        try:
            return await asyncio.shield(self._reading_secret)
        except OSError:
            self._reading_secret = None  # the next call reads again: agents retry
            return b""

    async def meet(self, check: Callable[[], Awaitable[None]]) -> list[Report]:
        """Return all nodes' reports in rank order; call `check` meanwhile. Raises NodeError."""
        deadline = timeout_s = float("inf")
        while True:
            self._changed.clear()
            if self.peers and deadline == float("inf"):  # the first node has joined
                timeout_s = self._timeout_s()
                deadline = time.monotonic() + timeout_s
            self.check_refused()
            is_late = time.monotonic() > deadline
            can_begin = is_late and self._may_lack_nodes and 0 in self._reports
            has_all = len(self._reports) == self._nodes
            if can_begin or has_all or self._has_unfit_node:  # the caller refuses an unfit node
                break
            if is_late:
                raise NodeError(NodeExit.RENDEZVOUS_FAILED, self._absent(timeout_s))
            await check()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
        return [self._reports[rank] for rank in sorted(self._reports)]

    def check_refused(self) -> None:
        """Raise NodeError if a node has left or cannot take part."""
        if self._refusal is not None:
            raise self._refusal

    def _absent(self, timeout_s: float) -> str:
        names = [name for rank, name in enumerate(self.names) if rank not in self._reports]
        who = ", ".join(names) or count(self._nodes - len(self._reports), "node")
        return f"{who} did not join within {timeout_s:.0f} s"

    def welcome(self, parameters: LaunchParameters) -> None:
        """Start the ranks on all nodes."""
        self.is_launched = True
        about, is_beside = asdict(parameters), self.peers[0].is_beside
        # "" stands for the address at which a node has reached the conductor's machine.
        for peer in self.peers.values():
            address = "" if is_beside and not peer.is_beside else parameters.address
            peer.channel.send("welcome", **{**about, "address": address})

    @property
    def first_address(self) -> str:
        """The first node's address; if the conductor runs there, the one most others reached."""
        if not self.peers[0].is_beside:
            return self.peers[0].channel.peer_address
        others = [peer.channel for peer in self.peers.values() if not peer.is_beside]
        reached = Counter(channel.own_address for channel in others)
        return max(reached, key=reached.__getitem__, default=LOOPBACK)

    async def refuse(self, ending: Ending) -> None:
        """Tell the members why the attempt does not start."""
        self._answer_to_late, self._is_refused = ending, True
        self._send_all("stop", **asdict(ending))
        if readers := list(self._readers):
            # Until the members leave: a close with pings unread could lose the last message.
            await asyncio.wait(readers, timeout=HANG_UP_S)
        await self.close()

    async def _listen_to(self, peer: Peer) -> None:
        """Handle a member's messages until its connection closes: before `done`, it is lost."""
        while (message := await peer.channel.receive()) is not None:
            self._handle(peer, message)
        peer.is_gone = True
        self._changed.set()
        if not self.is_launched:
            text = f"{peer.node} disconnected before the launch"
            self._refusal = self._refusal or NodeError(NodeExit.RENDEZVOUS_FAILED, text)
        elif not peer.is_done and not self.decision.is_made:
            self.report_failure(lost_node(peer.node, "its agent is gone: the connection closed"))
        self.check_complete()

    def _handle(self, peer: Peer, message: dict[str, Any]) -> None:
        """Handle a member's message; pass what is about the training on to `heard`."""
        kind = message.get("type")
        if kind == "ping":
            peer.channel.send("pong", clock_us=time.time_ns() // 1000)
        elif kind == "alive":
            peer.channel.send("alive")
        elif kind == "report":
            with contextlib.suppress(KeyError, ValueError):
                report = self._reports[peer.node_rank] = decoded(Report, message["report"])
                self._has_unfit_node |= bool(report.problem)
            self._changed.set()
        elif kind == "failed":
            self._take_failure(peer, message)
        elif kind in ("done", "rested"):
            peer.is_done = True
            peer.left_as_asked |= message.get("has_left") is True
            if kind == "rested":
                peer.rests = message.get("well") is True
            self._changed.set()
            self.check_complete()
        elif kind == "answer":
            self.questions.take(peer.node_rank, message)
        elif kind in ("interrupt", "nodes") or peer.node_rank == 0:
            self.names = tuple(map(str, message.get("names", self.names)))
            self.heard(str(kind), message)

    def _take_failure(self, peer: Peer, message: dict[str, Any]) -> None:
        """Report a member's failure; before the launch, the attempt is refused for it."""
        try:
            failure: Failure = decoded(Failure, message)
        except ValueError:
            failure = lost_node(peer.node, "its agent sent an unreadable message")
        if self.is_launched:
            self.report_failure(failure)
        else:
            error = NodeError(failure.code, failure.message, cause=failure.cause)
            self._refusal = self._refusal or error
            self._changed.set()

    def step_ended(self) -> None:
        """Record that the step has ended, and so no agent is left."""
        self._is_released = True  # `until_released` need not wait for any agent
        for peer in self.peers.values():
            peer.is_gone = True
        self._changed.set()
        self.check_complete()

    def report_failure(self, failure: Failure) -> None:
        """Stop the attempt for this failure, or for an earlier one on another node."""
        if not self.decision.failures:
            self._readers.start(self._hear_all())
        self.decision.add(failure)

    async def _hear_all(self) -> None:
        """Have all nodes look for failures: what they find arrives before the answers."""
        await self.questions.ask("look", within_s=SETTLE_S)
        self.decision.heard_all()

    def check_complete(self) -> None:
        """Settle what is complete: the open question, and the attempt once all are done."""
        self.questions.drop_gone()
        if self.is_launched and all(peer.is_done for peer in self.peers.values()):
            self.decision.complete()

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Have the first node that is present record something."""
        if present := self._present():
            self.peers[min(present)].channel.send(kind, **fields)

    def _send_all(self, kind: str, **fields: Any) -> None:
        for peer in self.peers.values():
            peer.channel.send(kind, **fields)

    def _present(self) -> list[int]:
        return [rank for rank, peer in self.peers.items() if not peer.is_gone]

    async def stop(self, ending: Ending) -> bool:
        """Have all nodes end their ranks and write their logs; return whether the ranks ended."""
        peers = self.peers.values()
        self._send_all("stop", **asdict(ending))
        await self._until(self._have_stopped, LEAVE_S)
        await self._until(lambda: all(p.is_gone or p.rests is not None for p in peers), REST_S)
        return self._have_stopped()

    def _have_stopped(self) -> bool:
        return all(peer.is_done or peer.is_gone for peer in self.peers.values())

    async def until_released(self, within_s: float) -> None:
        """Wait until the members that rest have their answer or one is gone, or time is up."""
        await self._until(lambda: self._is_released or not self.is_whole, within_s)

    async def _until(self, is_met: Callable[[], bool], within_s: float) -> None:
        """Wait until the condition is met, at most `within_s`; check it again at each change."""
        deadline = time.monotonic() + within_s
        while not is_met() and (left_s := deadline - time.monotonic()) > 0:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)

    @property
    def has_lost_rest(self) -> bool:
        """Return whether a member that rested is gone."""
        return any(peer.rests and peer.is_gone for peer in self.peers.values())

    @property
    def is_whole(self) -> bool:
        """Return whether all members rest."""
        return all(peer.rests and not peer.is_gone for peer in self.peers.values())

    def release(self, attempt: int = 0) -> None:
        """Have the members that rest begin the next attempt, or leave."""
        if attempt:
            self._send_all("again", attempt=attempt)
        self._is_released = True
        self._changed.set()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(peer.channel.close() for peer in self.peers.values()))
        self._readers.cancel()
