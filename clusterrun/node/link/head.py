"""The head's end of the link: it gathers the nodes, decides for all, and lets them go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterrun.node.agent.identity import LOOPBACK, Identity
from clusterrun.node.agent.ports import listening_socket
from clusterrun.node.agent.report import Agreement, Report, problems
from clusterrun.node.agent.shared_disk import SharedDisk
from clusterrun.node.agent.tasks import Tasks, guarded
from clusterrun.node.link.clock import now_us
from clusterrun.node.link.connection import (
    ANSWER_S,
    LEAVE_S,
    STRANGER_BYTES,
    Channel,
    Decision,
    failure_in,
)
from clusterrun.node.link.handshake import Realm, is_proof, nonce, nonce_in, proof
from clusterrun.node.link.questions import Questions
from clusterrun.node.recovery.causes import Ending, Failure, NodeError, NodeExit, lost_node

LOOK_S = 0.5  # at what other nodes may have left, while they are waited for
RETURN_S = 20.0  # for a node that left while the others were waited for
STRANGERS = 64  # handshakes that may be open besides those of all nodes
BACKLOG = 1024
Conclude = Callable[[Sequence[Report], str], Agreement]


@dataclass(kw_only=True)
class Member:
    """Another node, as the head knows it."""

    report: Report
    channel: Channel
    is_done: bool = False
    is_gone: bool = False


class Head:
    """Listen for the other nodes, agree with them, and decide how the attempt ends."""

    def __init__(
        self,
        who: Identity,
        realm: Realm,
        ports: Sequence[int],
        timeout_s: float,
        conclude: Conclude,
        disk: SharedDisk,
    ) -> None:
        self._who, self._realm, self._ports, self._disk = who, realm, ports, disk
        self._timeout_s, self._conclude = timeout_s, conclude
        self._members: dict[int, Member] = {}
        self._left: dict[int, float] = {}  # by node rank, those that were here, and until when
        self._is_launched = False
        self._changed = asyncio.Event()
        self._all_done = asyncio.Event()
        self._is_done = False
        self._decision = Decision()
        self._readers, self._handshakes = Tasks(), Tasks()
        self.questions = Questions(self._send_all, self._present)
        self.interrupted: Callable[[], None] = lambda: None
        self.left_behind = False

    async def meet(self, report: Report) -> Agreement:
        """Wait for all nodes, conclude from their reports, and welcome them."""
        self._secret = await self._shared_secret()
        server = await self._listen()
        try:
            return await guarded(self._agree(report), self._realm.watch(self._disk, LOOK_S))
        except NodeError as error:
            self._broadcast(Ending(code=error.code, reason=error.message))
            await self._close()
            raise
        finally:
            server.close()
            self._handshakes.cancel()

    async def _shared_secret(self) -> bytes:
        """Leave the secret where all nodes find it, once the disk takes it: it may be full."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return await self._disk.do(self._realm.create_secret)
            except OSError as error:
                if time.monotonic() > deadline:
                    text = f"{self._who.node}: cannot write {self._realm.secret_file}: {error}"
                    raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error
            await asyncio.sleep(LOOK_S)

    async def _agree(self, report: Report) -> Agreement:
        """Wait for all nodes, then welcome them before one can leave unseen."""
        deadline = time.monotonic() + self._timeout_s
        while not self._is_complete:
            self._changed.clear()
            now = time.monotonic()
            gone = [self._who.nodes[n] for n, at in self._left.items() if now - at > RETURN_S]
            if gone:
                text = f"{', '.join(gone)} left before the launch"
                raise NodeError(NodeExit.RENDEZVOUS_FAILED, text)
            if now > deadline:
                raise NodeError(NodeExit.RENDEZVOUS_FAILED, self._missing())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
        return self._welcome([report, *(m.report for _, m in sorted(self._members.items()))])

    @property
    def _is_complete(self) -> bool:
        """Say whether no other node need be waited for: all are here, or one is unfit."""
        members = self._members.values()
        return len(members) == len(self._who.nodes) - 1 or any(m.report.problem for m in members)

    def _welcome(self, reports: Sequence[Report]) -> Agreement:
        found = problems(reports)
        if found:
            raise NodeError(NodeExit.NODE_UNFIT, "; ".join(found))
        agreement = self._conclude(reports, self._address())
        self._is_launched = True
        self._send_all("welcome", port=agreement.port, precision=agreement.precision)
        return agreement

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
        text = f"{self._who.node}: none of the ports {self._ports[0]}… is free to meet the others"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text)

    def _missing(self) -> str:
        absent = [n for i, n in enumerate(self._who.nodes) if i and i not in self._members]
        return f"waited {self._timeout_s:.0f} s for {', '.join(absent)}"

    def _address(self) -> str:
        """Choose the address at which most nodes reached this one."""
        return Counter(m.channel.own_address for m in self._members.values()).most_common(1)[0][0]

    def _knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begin a handshake; if strangers hold too many open, the oldest gives way."""
        for oldest in list(self._handshakes)[: 1 - len(self._who.nodes) - STRANGERS]:
            oldest.cancel()
        self._handshakes.start(self._admit(reader, writer))

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = None
        try:
            member = await self._handshake(Channel(reader, writer))
        finally:
            if member is None:
                writer.close()
        if member is not None:
            self._members[member.report.node_rank] = member
            self._left.pop(member.report.node_rank, None)
            self._changed.set()
            self._readers.start(self._listen_to(member))

    async def _handshake(self, channel: Channel) -> Member | None:
        """Let in who proves to know the attempt's secret, and is a node that is still missing."""
        challenge = nonce()
        channel.send("challenge", nonce=challenge, **self._realm.label)
        hello = await channel.receive(ANSWER_S)
        if hello is None or hello.get("type") != "hello" or not self._realm.is_named_in(hello):
            return None
        own_end, theirs = channel.own_end, nonce_in(hello)
        if not is_proof(hello.get("proof"), self._secret, "member", challenge, theirs, own_end):
            return None
        try:
            report = Report.from_data(hello["report"])
        except (KeyError, TypeError, ValueError):
            return None
        if not 0 < report.node_rank < len(self._who.nodes) or report.node_rank in self._members:
            channel.send("refused", reason=f"there already is a node {report.node_rank}")
            return None
        channel.send("joined", proof=proof(self._secret, "head", theirs, own_end))
        channel.trust()
        return Member(report=report, channel=channel)

    async def _listen_to(self, member: Member) -> None:
        while (message := await member.channel.receive()) is not None:
            self._handle(member, message)
        if not self._is_launched:  # it may knock again
            del self._members[member.report.node_rank]
            self._left[member.report.node_rank] = time.monotonic()
            self._changed.set()
            return
        member.is_gone = True
        if not member.is_done and not self._decision.is_made:
            text = "its agent is gone: the connection to it closed"
            self._decision.add(lost_node(member.report.node, text))
        self._look_around()

    def _handle(self, member: Member, message: dict[str, Any]) -> None:
        if message.get("type") == "ping":
            member.channel.send("pong", clock_us=now_us())
        elif message.get("type") == "alive":
            member.channel.send("alive")
        elif message.get("type") == "failed":
            self._decision.add(failure_in(message, member.report.node))
        elif message.get("type") == "done":
            member.is_done = True
            self._look_around()
        elif message.get("type") == "answer":
            self.questions.take(member.report.node_rank, message)
        elif message.get("type") == "interrupt":
            self.interrupted()

    def _look_around(self) -> None:
        members = self._members.values()
        self.questions.look_around()
        if all(member.is_done or member.is_gone for member in members):
            self._all_done.set()
        if self._is_done and all(member.is_done for member in members):
            self._decision.complete()

    @property
    def has_leavers(self) -> bool:
        """Say whether a node's ranks have all ended well."""
        return self._is_done or any(member.is_done for member in self._members.values())

    def report_failure(self, failure: Failure) -> None:
        """Decide on this failure, or on one that came before it on another node."""
        self._decision.add(failure)

    def report_done(self) -> None:
        """Count this node as done."""
        self._is_done = True
        self._look_around()

    async def ending(self) -> Ending:
        """Wait until it is decided how the attempt ends, and tell all nodes."""
        ending = await self._decision.wait()
        self._broadcast(ending)
        return ending

    def conclude(self, ending: Ending) -> None:
        """End the attempt on all nodes."""
        self._decision.make(ending)

    def complete_with(self, completion: Callable[[], Ending]) -> None:
        """Have a good end be what `completion` says then."""
        self._decision.completion = completion

    def interrupt(self) -> None:
        """Do nothing: this node is the head."""

    def _broadcast(self, ending: Ending) -> None:
        self._send_all("stop", **ending.to_data())

    def _send_all(self, kind: str, **fields: Any) -> None:
        for member in self._members.values():
            member.channel.send(kind, **fields)

    def _present(self) -> list[int]:
        return [rank for rank, member in self._members.items() if not member.is_gone]

    async def leave(self) -> None:
        """Wait until no node has anything running, then let all go."""
        try:
            await asyncio.wait_for(self._all_done.wait(), LEAVE_S)
        except asyncio.TimeoutError:
            self.left_behind = True
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*(member.channel.close() for member in self._members.values()))
        self._readers.cancel()
