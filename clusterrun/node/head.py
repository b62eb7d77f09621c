"""The head's end of the link: it gathers the nodes, decides for all, and lets them go."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterrun.node.clock import now_us
from clusterrun.node.endings import Ending, Failure, NodeError, NodeExit, lost_node
from clusterrun.node.handshake import Realm, is_proof, nonce, proof
from clusterrun.node.identity import LOOPBACK, Identity
from clusterrun.node.link import (
    ANSWER_S,
    LEAVE_S,
    LINE_BYTES,
    Channel,
    Decision,
    failure_in,
)
from clusterrun.node.ports import listening_socket
from clusterrun.node.questions import Questions
from clusterrun.node.report import Agreement, Report, problems

LOOK_S = 0.5  # at what other nodes may have left, while they are waited for
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
    ) -> None:
        self._who, self._realm, self._ports = who, realm, ports
        self._timeout_s, self._conclude = timeout_s, conclude
        self._members: dict[int, Member] = {}
        self._all_here = asyncio.Event()
        self._all_done = asyncio.Event()
        self._is_done = False
        self._decision = Decision()
        self._readers: set[asyncio.Task[None]] = set()
        self.questions = Questions(self._send_all, self._present)
        self.interrupted: Callable[[], None] = lambda: None
        self.left_behind = False

    async def meet(self, report: Report) -> Agreement:
        """Wait for all nodes, conclude from their reports, and welcome them."""
        self._secret = await self._shared_secret()
        server = await self._listen()
        try:
            await self._wait_for_all()
        except NodeError as error:
            raise await self._refuse(error.code, error.message, is_told=error.is_told) from None
        finally:
            server.close()
        reports = [report, *(m.report for _, m in sorted(self._members.items()))]
        gone = [m.report.node for m in self._members.values() if m.is_gone]
        if gone:
            text = f"{', '.join(gone)} left before the launch"
            raise await self._refuse(NodeExit.NODE_LOST, text)
        found = problems(reports)
        if found:
            raise await self._refuse(NodeExit.NODE_UNFIT, "; ".join(found))
        try:
            agreement = self._conclude(reports, self._address())
        except NodeError as error:
            raise await self._refuse(error.code, error.message) from None
        for member in self._members.values():
            member.channel.send("welcome", port=agreement.port, precision=agreement.precision)
        return agreement

    async def _shared_secret(self) -> bytes:
        """Leave the secret where all nodes find it, once the disk takes it: it may be full."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._realm.create_secret()
            except OSError as error:
                if time.monotonic() > deadline:
                    text = f"{self._who.node}: cannot write {self._realm.secret_file}: {error}"
                    raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error
            await asyncio.sleep(LOOK_S)

    async def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._all_here.is_set():
            if time.monotonic() > deadline:
                raise NodeError(NodeExit.RENDEZVOUS_FAILED, self._missing())
            self._realm.check_open()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_here.wait(), LOOK_S)

    async def _listen(self) -> asyncio.Server:
        host = LOOPBACK if self._who.is_local else ""
        for port in self._ports:
            try:
                listener = listening_socket(port, host)
            except OSError:
                continue
            return await asyncio.start_server(
                self._accept, sock=listener, limit=LINE_BYTES, backlog=len(self._who.nodes)
            )
        text = f"{self._who.node}: none of the ports {self._ports[0]}… is free to meet the others"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text)

    def _missing(self) -> str:
        absent = [n for i, n in enumerate(self._who.nodes) if i and i not in self._members]
        return f"waited {self._timeout_s:.0f} s for {', '.join(absent)}"

    def _address(self) -> str:
        """Choose the address at which most nodes reached this one."""
        return Counter(m.channel.own_address for m in self._members.values()).most_common(1)[0][0]

    async def _refuse(self, code: int, message: str, *, is_told: bool = False) -> NodeError:
        self._broadcast(Ending(code=int(code), reason=message))
        await self._close()
        return NodeError(code, message, is_told=is_told)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        member = await self._handshake(channel)
        if member is None:
            await channel.close()
            return
        self._members[member.report.node_rank] = member
        if len(self._members) == len(self._who.nodes) - 1 or member.report.problem:
            self._all_here.set()
        task = asyncio.ensure_future(self._listen_to(member))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)

    async def _handshake(self, channel: Channel) -> Member | None:
        """Let in who proves to know the attempt's secret, and is a node that is still missing."""
        challenge = nonce()
        channel.send("challenge", nonce=challenge, **self._realm.label)
        hello = await channel.receive(ANSWER_S)
        if hello is None or hello.get("type") != "hello" or not self._realm.is_named_in(hello):
            return None
        if not is_proof(hello.get("proof"), self._secret, "member", challenge, hello.get("nonce")):
            return None
        try:
            report = Report.from_data(hello["report"])
        except (KeyError, TypeError, ValueError):
            return None
        if not 0 < report.node_rank < len(self._who.nodes) or report.node_rank in self._members:
            channel.send("refused", reason=f"there already is a node {report.node_rank}")
            return None
        channel.send("joined", proof=proof(self._secret, "head", hello["nonce"]))
        return Member(report=report, channel=channel)

    async def _listen_to(self, member: Member) -> None:
        while (message := await member.channel.receive()) is not None:
            self._handle(member, message)
        member.is_gone = True
        if not member.is_done and not self._decision.is_made:
            text = "its agent is gone: the connection to it closed"
            self._decision.add(lost_node(member.report.node, text))
            self._all_here.set()  # waiting for the rest makes no sense any more
        self._look_around()

    def _handle(self, member: Member, message: dict[str, Any]) -> None:
        if message.get("type") == "ping":
            member.channel.send("pong", clock_us=now_us())
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
        for task in self._readers:
            task.cancel()
