"""An agent's end of the link: reach the conductor, report to it, and stop when it decides."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from clusterrun.node.base.causes import Ending, Failure, NodeError, NodeExit, lost_node
from clusterrun.node.base.identity import Identity
from clusterrun.node.base.ports import interface_of
from clusterrun.node.base.tasks import SharedDisk, Tasks, guarded
from clusterrun.node.link.connection import (
    ANSWER_S,
    STRANGER_BYTES,
    Channel,
    LaunchParameters,
    Realm,
    Report,
    StopDecision,
    is_proof,
    proof,
)
from clusterrun.node.recovery.lost import known_address
from clusterrun.shared.typed import decoded

RETRY_S = 0.03  # the conductor may be about to listen
RETRY_MOST_S = 2.0
CONNECT_S = 10.0
NAMING = 3  # nodes that tell the names of all: the first may be the one that does not come
ALIVE_S = 15.0  # between two heartbeats
REST_S = 90.0  # the conductor decides earlier
PINGS = 8
LEAST_US = 1_000  # NTP keeps clocks closer than this
UNANSWERED = 20  # heartbeats until the conductor is considered lost; Slurm may suspend it


def now_us() -> int:
    """Return this node's time in µs since the epoch."""
    return time.time_ns() // 1000


class Clock:
    """This node's clock, and how far it is ahead of the conductor's; 0 until the nodes have met."""

    def __init__(self, now_us: Callable[[], int] = now_us) -> None:
        self.now_us = now_us
        self.offset_us = self._sent_us = 0
        self._measured: list[Offset] = []

    def corrected(self, epoch_us: int) -> int:
        """Convert a time of this node to the conductor's."""
        return epoch_us - self.offset_us

    def corrected_s(self, epoch_s: float) -> float:
        """Convert a time of this node, in seconds, to the conductor's."""
        return epoch_s - self.offset_us / 1_000_000

    def ping(self) -> None:
        """Record that a ping was sent."""
        self._sent_us = self.now_us()

    def pong(self, head_us: int) -> Offset | None:
        """Measure by a ping's answer; after PINGS, return the offset of the fastest (RFC 5905)."""
        now_us = self.now_us()
        middle_us = (self._sent_us + now_us) // 2
        self._measured.append(Offset(offset_us=middle_us - head_us, rtt_us=now_us - self._sent_us))
        if len(self._measured) < PINGS:
            return None
        measured, self._measured = self._measured, []
        return min(measured, key=lambda offset: offset.rtt_us)


class Offset(NamedTuple):
    """How far this clock is ahead of the conductor's, measured by a ping that took `rtt_us`."""

    offset_us: int
    rtt_us: int

    @property
    def is_certain(self) -> bool:
        """Return whether the clocks differ by more than the ping can explain."""
        return abs(self.offset_us) > max(LEAST_US, self.rtt_us / 2)


Answerer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]] | dict[str, Any]]


class Place(NamedTuple):
    """Where the conductor listens; `host` may be several names and addresses, with commas."""

    host: str
    port: int


class Member:
    """The agent of one node in one attempt; `record` gets the conductor's events and lines."""

    def __init__(
        self,
        who: Identity,
        realm: Realm,
        place: Place,
        timeout_s: float,  # to reach the conductor
        clock: Clock,
        compared: Callable[[Offset], None],  # gets how far the clocks differ, if they do
        record: Callable[[Mapping[str, Any]], None],
        answerers: Mapping[str, Answerer],  # by what the conductor asks
        disk: SharedDisk,
    ) -> None:
        self._who, self._realm, self._place, self._disk = who, realm, place, disk
        self._timeout_s, self._answerers, self._record = timeout_s, answerers, record
        self._clock, self._compared = clock, compared
        self._tasks = Tasks()
        self._channel: Channel | None = None
        self._decision = StopDecision()
        self._rest_is_over = asyncio.Event()  # the next attempt is known, or none will follow
        self._has_met = self.has_lost_conductor = False
        self._next_attempt = self._unanswered = 0

    async def meet(self, report: Awaitable[Report]) -> LaunchParameters:
        """Join the conductor, send this node's report, wait for the welcome. Raises NodeError."""
        self._channel = channel = await self._join(time.monotonic() + self._timeout_s)
        # From now on the conductor enforces the timeout: it may have started later.
        if self._who.node_rank < NAMING:
            channel.send("nodes", names=self._who.nodes)
        self._ping(channel)
        # An error in the report or a silent conductor ends the wait for the conductor's reply.
        reply = guarded(self._await_reply(channel), self._send_report(channel, report))
        message = await guarded(reply, self._watch_conductor(channel))
        if message.get("type") != "welcome":  # a refusal
            await channel.close()  # the conductor waits for this
            code = int(message.get("code", NodeExit.RENDEZVOUS_FAILED))
            reason = str(message.get("reason", "the conductor sent no welcome"))
            raise NodeError(code, reason, is_told=True)
        self._has_met = True
        self._tasks.start(self._listen(channel))
        self._tasks.start(self._watch_conductor(channel))
        return self._launch_parameters(channel, message)

    def _launch_parameters(self, channel: Channel, welcome: Mapping[str, Any]) -> LaunchParameters:
        """Return the welcome's parameters, completed by what differs between the nodes."""
        given: LaunchParameters = decoded(LaunchParameters, welcome)
        address = given.address or channel.peer_address  # "": it is on the conductor's machine
        own_address = address if self._who.is_first else channel.own_address
        return dataclasses.replace(given, address=address, interface=interface_of(own_address))

    async def _await_reply(self, channel: Channel) -> dict[str, Any]:
        """Return the welcome, or the conductor's refusal. Raises NodeError if neither comes."""
        while message := await channel.receive():
            self._unanswered = 0
            if message.get("type") in ("welcome", "stop"):
                return message
            self._handle(channel, message)
        raise self._lost(f"the conductor on {self._who.conductor} disconnected before the launch")

    async def _send_report(self, channel: Channel, report: Awaitable[Report]) -> None:
        """Send the report once it is ready. Raises the error that prevents it, if any."""
        channel.send("report", report=dataclasses.asdict(await report))

    def _lost(self, text: str) -> NodeError:
        self.has_lost_conductor = True
        return NodeError(NodeExit.RENDEZVOUS_FAILED, text)

    async def _watch_conductor(self, channel: Channel) -> None:
        """Wait until heartbeats are no longer answered. Raises NodeError before the welcome.

        Count heartbeats, not seconds: Slurm may suspend a job for hours.
        """
        while self._unanswered < UNANSWERED:
            channel.send("alive")
            self._unanswered += 1
            await asyncio.sleep(ALIVE_S)
        how = f"has not answered for {ALIVE_S * UNANSWERED:.0f} s"
        if not self._has_met:
            raise self._lost(f"the conductor {how}")
        self._end_without_conductor(f"the conductor {how}")

    def _end_without_conductor(self, text: str) -> None:
        if not self._decision.is_made:
            self.has_lost_conductor = True
            self._decision.make(Ending.of(lost_node(self._who.conductor, text)))
        self._rest_is_over.set()

    async def _join(self, deadline: float) -> Channel:
        """Connect to the conductor; retry, as it may be busy with many nodes. Raises NodeError."""
        first, *others = self._place.host.split(",")
        hosts = (await self._disk.do(partial(known_address, first)), *others)
        pause_s, problem = RETRY_S, "it does not answer"
        while time.monotonic() < deadline:
            for host in hosts:
                try:
                    if channel := await self._connect(host):
                        return channel
                except (OSError, ValueError, asyncio.TimeoutError) as error:
                    problem = str(error) or "no answer"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MOST_S)
        text = f"cannot reach the conductor on {first} within {self._timeout_s:.0f} s"
        raise self._lost(f"{text}: {problem}")

    async def _connect(self, host: str) -> Channel | None:
        """Connect to `host`; return None if it is not where this attempt's conductor listens."""
        opening = asyncio.open_connection(host, self._place.port, limit=STRANGER_BYTES)
        channel = Channel(*await asyncio.wait_for(opening, CONNECT_S))
        is_admitted = False
        try:
            is_admitted = await self._exchange_proofs(channel)
        finally:
            if not is_admitted:
                await channel.close()
        return channel if is_admitted else None

    async def _exchange_proofs(self, channel: Channel) -> bool:
        """Return whether both ends prove to know the secret: else it is another job's listener."""
        challenge = await channel.receive(ANSWER_S)
        if challenge is None or not self._realm.is_named_in(challenge):
            return False
        try:
            secret = await self._disk.do(self._realm.read_secret)
        except OSError:
            return False
        own_nonce, conductors_nonce = secrets.token_hex(16), str(challenge.get("nonce"))
        conductors_end = channel.peer_end
        about = {"node": self._who.node, "node_rank": self._who.node_rank, **self._realm.label}
        own_proof = proof(secret, "member", conductors_nonce, own_nonce, conductors_end)
        channel.send("hello", nonce=own_nonce, proof=own_proof, **about)
        answer = await channel.receive(ANSWER_S)
        given = answer.get("proof") if answer else None
        channel.is_trusted = is_proof(given, secret, "conductor", own_nonce, conductors_end)
        return channel.is_trusted

    async def _listen(self, channel: Channel) -> None:
        """Handle the conductor's messages until the connection closes: then it is lost."""
        while (message := await channel.receive()) is not None:
            self._unanswered = 0
            kind = message.get("type")
            if kind == "again":
                self._next_attempt = int(message.get("attempt", 0))
                self._rest_is_over.set()
            elif kind == "stop":
                with contextlib.suppress(ValueError):
                    self._decision.make(decoded(Ending, message))
            else:
                self._handle(channel, message)
        self._end_without_conductor("the conductor is gone: the connection closed")

    def _handle(self, channel: Channel, message: Mapping[str, Any]) -> None:
        """Handle a message of a kind that may come before the welcome and after it."""
        kind = message.get("type")
        if kind == "pong":
            self._handle_pong(channel, message)
        elif kind == "ask":
            self._tasks.start(answer(message, self._answerers, channel.send))
        elif kind in ("event", "say"):
            self._record(message)

    def _ping(self, channel: Channel) -> None:
        self._clock.ping()
        channel.send("ping")

    def _handle_pong(self, channel: Channel, message: Mapping[str, Any]) -> None:
        """Measure the clocks' difference; ping again until it has been measured often enough."""
        conductors_us = message.get("clock_us")
        if not isinstance(conductors_us, int):
            return
        if (offset := self._clock.pong(conductors_us)) is None:
            self._ping(channel)
        elif offset.is_certain:
            self._clock.offset_us = offset.offset_us
            self._compared(offset)

    def tell(self, kind: str, /, **fields: Any) -> None:
        """Report something to the conductor, if it is reached."""
        if self._channel is not None:
            self._channel.send(kind, **fields)

    def report_failure(self, failure: Failure) -> None:
        """Report a failure, in the conductor's time."""
        failure = dataclasses.replace(failure, at=self._clock.corrected_s(failure.at))
        self.tell("failed", **dataclasses.asdict(failure))

    async def ending(self) -> Ending:
        """Wait for the ending that the conductor decides."""
        return await self._decision.wait()

    async def rest(self, *, is_well: bool) -> int:
        """Report whether this node can begin the next attempt; return its number, 0 to exit."""
        self.tell("rested", well=is_well)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._rest_is_over.wait(), REST_S)
        return self._next_attempt

    def end_rest(self) -> None:
        """Leave: this agent was signalled to end."""
        self._next_attempt = 0
        self._rest_is_over.set()

    async def close(self) -> None:
        """Close the connection."""
        self._tasks.cancel()
        if self._channel is not None:
            await self._channel.close()


async def answer(
    message: Mapping[str, Any], answerers: Mapping[str, Answerer], send: Callable[..., None]
) -> None:
    """Answer a question; ignore an unknown one."""
    if (answerer := answerers.get(str(message.get("what")))) is not None:
        reply = answerer(message)
        fields = reply if isinstance(reply, dict) else await reply
        send("answer", question=message.get("question"), **fields)
