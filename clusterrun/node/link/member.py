"""A member's end of the link: find the head, report failures, and stop when the head decides."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from clusterrun.node.base.causes import Ending, Failure, NodeError, NodeExit, lost_node
from clusterrun.node.base.identity import Identity
from clusterrun.node.base.ports import interface_of
from clusterrun.node.base.report import LaunchParameters, Report
from clusterrun.node.base.tasks import SharedDisk, Tasks, guarded
from clusterrun.node.link.clock import Clock, Offset
from clusterrun.node.link.connection import ANSWER_S, LEAVE_S, STRANGER_BYTES, Channel, StopDecision
from clusterrun.node.link.handshake import Realm, is_proof, proof
from clusterrun.node.link.questions import Answerer, answer
from clusterrun.node.recovery import reach
from clusterrun.shared.typed import decoded

RETRY_S = 0.03  # the head may be about to listen
RETRY_MOST_S = 2.0
PATIENCE_S = 0.2  # for one port to answer before the next is also tried
BUSY_S = 0.005  # added per node: the head may be busy with them
ALIVE_S = 15.0  # between two heartbeats
REST_S = 90.0  # the head decides earlier
UNANSWERED = 20  # heartbeats until the head is considered lost; Slurm or a debugger may suspend it


class Member:
    """A node that is not the head."""

    def __init__(
        self,
        who: Identity,
        realm: Realm,
        ports: Sequence[int],
        timeout_s: float,
        clock: Clock,
        compared: Callable[[Offset], None],
        answerers: Mapping[str, Answerer],
        disk: SharedDisk,
    ) -> None:
        self._who, self._realm, self._ports, self._disk = who, realm, ports, disk
        self._timeout_s, self._answerers = timeout_s, answerers
        self._clock, self._compared = clock, compared
        self._tasks = Tasks()
        self._channel: Channel | None = None
        self._decision = StopDecision()
        self._closed = asyncio.Event()
        self._is_done = self._has_met = False
        self._next_attempt = 0
        self._host = who.head_host
        self._unanswered = 0
        self.last_problem = "it does not answer"
        self._patience_s = PATIENCE_S + BUSY_S * len(who.nodes)

    async def meet(self, report: Report) -> LaunchParameters:
        """Join the head and wait for its welcome. Raises NodeError."""
        joining = self._join(report, time.monotonic() + self._timeout_s)
        channel = await guarded(joining, self._realm.watch(self._disk, RETRY_MOST_S))
        self._channel = channel
        # From now on the head enforces the timeout: it may have started later.
        self._ping(channel)
        message = await guarded(self._welcome(channel), self._watch_head(channel))
        if message.get("type") != "welcome":
            await channel.close()  # the head waits for this
            code = int(message.get("code", NodeExit.RENDEZVOUS_FAILED))
            reason = str(message.get("reason", "the head sent no welcome"))
            raise NodeError(code, reason, is_told=True)
        self._has_met = True
        self._tasks.start(self._listen(channel))
        self._tasks.start(self._watch_head(channel))
        return LaunchParameters(
            address=channel.peer_address,
            port=int(message["port"]),
            interface=interface_of(channel.own_address),
            precision=str(message["precision"]),
            variables={str(n): str(v) for n, v in message.get("variables", {}).items()},
        )

    async def _welcome(self, channel: Channel) -> dict[str, Any]:
        while message := await channel.receive():
            self._unanswered = 0
            if message.get("type") in ("welcome", "stop"):
                return message
            self._pong(channel, message)
        raise self._lost("disconnected before the launch")

    def _lost(self, how: str) -> NodeError:
        text = f"{self._who.node}: the head {self._who.nodes[0]} {how}"
        return NodeError(NodeExit.RENDEZVOUS_FAILED, text)

    async def _watch_head(self, channel: Channel) -> None:
        """Wait until the head no longer answers heartbeats. Raises NodeError before the welcome.

        Count heartbeats, not seconds: Slurm may suspend a job for hours.
        """
        while self._unanswered < UNANSWERED:
            channel.send("alive")
            self._unanswered += 1
            await asyncio.sleep(ALIVE_S)
        how = f"has not answered for {ALIVE_S * UNANSWERED:.0f} s"
        if not self._has_met:
            raise self._lost(how)
        self._head_is_lost(f"its agent {how}")

    def _head_is_lost(self, text: str) -> None:
        self._decision.make(Ending.of(lost_node(self._who.nodes[0], text)))
        self._closed.set()

    async def _join(self, report: Report, deadline: float) -> Channel:
        """Try the ports in turn; keep waiting for the silent ones.

        A silent listener may be a stranger, or a head that is busy with many nodes.
        """
        self._host = await self._disk.do(partial(reach.known_address, self._who.head_host))
        knocks: dict[int, asyncio.Task[Channel | None]] = {}
        pause_s, is_over = RETRY_S, self._realm.over or (lambda: False)
        try:
            while time.monotonic() < deadline and not await self._disk.do(is_over):
                for port in self._ports:
                    if port not in knocks:
                        knocks[port] = asyncio.ensure_future(self._enter(port, report))
                        # asyncio logs an exception that is never retrieved.
                        knocks[port].add_done_callback(lambda k: k.cancelled() or k.exception())
                    left_s = deadline - time.monotonic()
                    if channel := await self._answered(knocks, min(self._patience_s, left_s)):
                        return channel
                if channel := await self._answered(knocks, pause_s):
                    return channel
                pause_s = min(2 * pause_s, RETRY_MOST_S)
        finally:
            for knock in knocks.values():
                knock.cancel()
        head = self._who.nodes[0]
        text = f"{self._who.node}: cannot reach the head {head} within {self._timeout_s:.0f} s"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, f"{text}: {self.last_problem}")

    async def _answered(
        self, knocks: dict[int, asyncio.Task[Channel | None]], timeout_s: float
    ) -> Channel | None:
        """Return the first channel to the head, if any; drop the knocks that failed."""
        if not knocks:
            await asyncio.sleep(timeout_s)
            return None
        await asyncio.wait(knocks.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for port in [port for port, knock in knocks.items() if knock.done()]:
            try:
                if channel := knocks.pop(port).result():
                    return channel
            except Exception as error:  # noqa: BLE001 - a stranger's answer must not end us
                self.last_problem = str(error)
        return None

    async def _enter(self, port: int, report: Report) -> Channel | None:
        opening = asyncio.open_connection(self._host, port, limit=STRANGER_BYTES)
        try:
            channel = Channel(*await asyncio.wait_for(opening, ANSWER_S))
        except asyncio.TimeoutError as error:
            raise TimeoutError(f"no answer on port {port}") from error
        is_admitted = False
        try:
            is_admitted = await self._is_admitted(channel, report)
        finally:
            if not is_admitted:
                await channel.close()
        return channel if is_admitted else None

    async def _is_admitted(self, channel: Channel, report: Report) -> bool:
        """Exchange proofs with the head; a listener without one belongs to another job."""
        challenge = await channel.receive(ANSWER_S)
        if challenge is None or not self._realm.is_named_in(challenge):
            return False
        try:
            secret = await self._disk.do(self._realm.read_secret)
        except OSError:
            return False
        ours, theirs = secrets.token_hex(16), str(challenge.get("nonce"))
        head_end = channel.peer_end
        channel.send(
            "hello",
            nonce=ours,
            proof=proof(secret, "member", theirs, ours, head_end),
            report=dataclasses.asdict(report),
            **self._realm.label,
        )
        answer = await channel.receive(ANSWER_S)
        given = answer.get("proof") if answer else None
        is_head = is_proof(given, secret, "head", ours, head_end)
        if is_head:
            channel.trust()
        return is_head

    async def _listen(self, channel: Channel) -> None:
        while (message := await channel.receive()) is not None:
            self._unanswered = 0
            if message.get("type") == "pong":
                self._pong(channel, message)
            elif message.get("type") == "ask":
                self._tasks.start(answer(message, self._answerers, channel.send))
            elif message.get("type") == "again":
                self._next_attempt = int(message.get("attempt", 0))
                self._closed.set()
            elif message.get("type") == "stop":
                with contextlib.suppress(ValueError):
                    self._decision.make(decoded(Ending, message))
        self._head_is_lost("its agent is gone: the connection closed")

    def _ping(self, channel: Channel) -> None:
        self._clock.ping()
        channel.send("ping")

    def _pong(self, channel: Channel, message: Mapping[str, Any]) -> None:
        """Compare the clocks, before and after the welcome."""
        head_us = message.get("clock_us")
        if not isinstance(head_us, int):
            return
        offset = self._clock.pong(head_us)
        if offset is None:
            self._ping(channel)
        elif offset.is_certain:
            self._clock.offset_us = offset.offset_us
            self._compared(offset)

    def report_failure(self, failure: Failure) -> None:
        """Report a failure to the head, in the head's time."""
        failure = dataclasses.replace(failure, at=self._clock.corrected_s(failure.at))
        if self._channel is not None:
            self._channel.send("failed", **dataclasses.asdict(failure))

    def report_done(self) -> None:
        """Report to the head that the ranks of this node have succeeded, or are gone."""
        if self._channel is not None and not self._is_done:
            self._is_done = True
            self._channel.send("done")

    def interrupt(self) -> None:
        """Report to the head that this agent was signalled to end."""
        if self._channel is not None:
            self._channel.send("interrupt")

    async def ending(self) -> Ending:
        """Wait for the ending that the head decides."""
        return await self._decision.wait()

    async def rest(self, *, is_well: bool) -> int:
        """Report whether this node can begin the next attempt; return its number, 0 to leave."""
        if self._channel is not None:
            self._channel.send("rested", well=is_well)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closed.wait(), REST_S)
        return self._next_attempt

    def end_rest(self) -> None:
        """Leave: this agent was signalled to end."""
        self._next_attempt = 0
        self._closed.set()

    async def leave(self) -> None:
        """Report that nothing runs here now, and wait until the head closes the link."""
        self.report_done()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closed.wait(), LEAVE_S)
        self._tasks.cancel()
        if self._channel is not None:
            await self._channel.close()
