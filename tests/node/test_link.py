"""The link between agents: who may join, who decides, and who leaves when."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterrun.node.base.causes import Cause, Ending, Failure, NodeError
from clusterrun.node.base.identity import Identity
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.conductor.leader import problems
from clusterrun.node.link import connection as link_module
from clusterrun.node.link import head as head_module
from clusterrun.node.link.connection import (
    REST_S,
    STRANGER_BYTES,
    Channel,
    LaunchParameters,
    Realm,
    Report,
)
from clusterrun.node.link.head import Head, Peer
from clusterrun.node.link.member import PINGS, Clock, Member, Offset, Place, now_us
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.paths import RunPaths
from tests.node.jobs import who
from tests.patience import patience


def own(rank: int, nodes: int = 3) -> Identity:
    return who(rank, *(f"n{other}" for other in range(nodes)))


def report(rank: int, **changes: Any) -> Report:
    given = {"node": f"n{rank}", "node_rank": rank, "versions": {"torch": "2"}}
    return Report(**{**given, **changes})


async def given(found: Report) -> Report:
    return found


def realm(path: Path, attempt: int = 1) -> Realm:
    paths = RunPaths(root=path / "job" / "run")
    paths.attempts_dir.mkdir(parents=True, exist_ok=True)
    take_attempt(paths, attempt, "")
    return Realm(paths=paths, attempt=attempt)


def failure(rank: int, at: float, code: int = 3) -> Failure:
    return Failure(
        at=at, node=f"n{rank}", rank=rank, code=code, signal=0, cause=Cause.EXIT, message="x"
    )


def member(
    rank: int, nodes: int, place: Realm, port: int, timeout_s: float, clock: Clock | None = None
) -> Member:
    return Member(
        own(rank, nodes),
        place,
        Place("127.0.0.1", port),
        timeout_s,
        clock or Clock(),
        lambda offset: None,
        lambda message: None,
        {},
        SharedDisk(),
    )


async def always() -> None:
    """Find no node that cannot take part."""


class Nodes:
    """The conductor's end of the link and its members, in one event loop."""

    def __init__(self, path: Path, nodes: int = 3, timeout_s: float = 10) -> None:
        place = realm(path)
        self.head = Head(place, nodes, lambda: timeout_s, SharedDisk())
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = self.port = self.socket.getsockname()[1]
        self.members = [member(rank, nodes, place, port, timeout_s) for rank in range(nodes)]
        self.check: Callable[[], Awaitable[None]] = always

    async def lead(self) -> int:
        """Gather the nodes and welcome them; return how many there are. Raises NodeError."""
        await asyncio.start_server(self._knocked, sock=self.socket, backlog=1024)
        try:
            reports = await self.head.meet(self.check)
            if found := problems(reports):
                raise NodeError(122, "; ".join(found))
        except NodeError as error:
            await self.head.refuse(Ending.refused(error))
            raise
        self.head.welcome(LaunchParameters(address="", port=7, interface="", precision="bf16"))
        return len(reports)

    async def _knocked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await self.head.admit(reader, writer):
            writer.close()

    async def meet(self, *reports: Report) -> list[Any]:
        found = reports or tuple(report(rank) for rank in range(len(self.members)))
        meeting = (node.meet(given(one)) for node, one in zip(self.members, found, strict=True))
        return await asyncio.gather(self.lead(), *meeting, return_exceptions=True)

    async def end(self) -> list[Ending]:
        stopping = asyncio.ensure_future(self._stop())
        endings = await asyncio.gather(*(node.ending() for node in self.members))
        leaving = asyncio.gather(*(node.rest(is_well=False) for node in self.members))
        await stopping
        await self.head.close()
        await leaving
        return endings

    async def _stop(self) -> None:
        await self.head.stop(await self.head.decision.wait())


async def test_the_earliest_failure_decides_on_all_nodes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.meet()
    now = time.time()
    nodes.head.report_failure(failure(0, now, code=1))
    nodes.members[2].report_failure(failure(2, now - 0.2, code=3))
    endings = await nodes.end()
    assert [ending.code for ending in endings] == [3, 3, 3]
    assert {ending.reason for ending in endings} == {"rank 2 on n2: x"}


async def test_after_a_failure_all_wait_until_nothing_runs_anywhere(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.meet()
    nodes.members[0].report_failure(failure(1, time.time()))
    stopping = asyncio.ensure_future(nodes._stop())
    await asyncio.gather(*(node.ending() for node in nodes.members))
    early = [asyncio.ensure_future(node.rest(is_well=False)) for node in nodes.members[:2]]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in (*early, stopping))
    early.append(asyncio.ensure_future(nodes.members[2].rest(is_well=False)))
    await stopping
    await nodes.head.close()
    await asyncio.gather(*early)


def killed(rank: int, at: float) -> Failure:
    return dataclasses.replace(
        failure(rank, at, code=137), signal=int(signal.SIGKILL), cause=Cause.SIGNAL
    )


@pytest.mark.parametrize(
    ("found", "is_waiting", "code"),
    [
        (None, False, 137),
        (dataclasses.replace(failure(2, 0.0), has_lost_peer=True), False, 137),
        (failure(2, 0.0), True, 3),
    ],
)
async def test_a_killed_rank_ends_the_attempt_once_no_node_finds_an_earlier_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: Failure | None,
    is_waiting: bool,
    code: int,
) -> None:
    settle_s = patience()
    monkeypatch.setattr(link_module, "SETTLE_S", settle_s)
    monkeypatch.setattr(head_module, "SETTLE_S", settle_s)
    nodes = Nodes(tmp_path)
    now = time.time()

    async def look(message: Mapping[str, Any]) -> dict[str, Any]:
        if found:
            nodes.members[2].report_failure(dataclasses.replace(found, at=now - 1))
        return {}

    for node in nodes.members:
        node._answerers = {"look": look}
    await nodes.meet()
    since = time.monotonic()
    nodes.members[1].report_failure(killed(1, now))
    assert (await nodes.head.decision.wait()).code == code
    assert (time.monotonic() - since > 0.8 * settle_s) is is_waiting
    await nodes.head.close()


async def resting(nodes: Nodes) -> list[asyncio.Task[int]]:
    """Have all nodes meet and fail, and rest."""
    await nodes.meet()
    nodes.head.report_failure(failure(0, time.time()))
    stopping = asyncio.ensure_future(nodes._stop())
    await asyncio.gather(*(node.ending() for node in nodes.members))
    tasks = [asyncio.ensure_future(node.rest(is_well=True)) for node in nodes.members]
    await stopping
    assert nodes.head.is_whole
    return tasks


async def test_members_that_rest_begin_the_attempt_that_is_named(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    rests = await resting(nodes)
    nodes.head.release(2)
    assert await asyncio.gather(*rests) == [2, 2, 2]
    assert not nodes.head.has_lost_rest
    await nodes.head.close()


async def test_no_node_rests_if_one_member_cannot(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.meet()
    rests = [
        asyncio.ensure_future(node.rest(is_well=node is nodes.members[0])) for node in nodes.members
    ]
    since = time.monotonic()
    assert await nodes.head.stop(Ending.completed())
    assert not nodes.head.is_whole
    assert time.monotonic() - since < REST_S / 2
    await nodes.head.close()
    assert await asyncio.gather(*rests) == [0, 0, 0]


async def test_agents_that_rest_are_not_whole_once_one_is_gone(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    rests = await resting(nodes)
    broken = asyncio.ensure_future(nodes.head.until_released(60 * patience()))
    await nodes.members[1].close()
    await broken
    assert nodes.head.has_lost_rest
    rests.pop(1).cancel()
    await nodes.head.close()
    assert await asyncio.gather(*rests) == [0, 0]


async def test_a_clock_that_is_off_does_not_make_a_node_the_first(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=2)
    clock = Clock(lambda: now_us() - 3600_000_000)
    nodes.members[1] = member(1, 2, realm(tmp_path), nodes.port, 9, clock)
    await nodes.meet()
    while clock.offset_us == 0:
        await asyncio.sleep(0.01)
    nodes.head.report_failure(failure(0, time.time() - 0.1, code=5))
    nodes.members[1].report_failure(failure(1, time.time() - 3600, code=1))
    assert [ending.code for ending in await nodes.end()] == [5, 5]


def test_the_quickest_ping_counts() -> None:
    times = iter([t for n in range(PINGS) for t in (n * 1000, n * 1000 + (40 if n == 3 else 800))])
    clock = Clock(lambda: next(times))
    results = []
    for number in range(PINGS):
        clock.ping()
        results.append(clock.pong(number * 1000 - 5_000))
    assert results == [None] * (PINGS - 1) + [Offset(offset_us=5_020, rtt_us=40)]
    for offset_us, rtt_us, is_certain in (
        (-2_000, 100, True),
        (900, 100, False),
        (2_000, 4_000, False),  # the ping may explain it
    ):
        assert Offset(offset_us=offset_us, rtt_us=rtt_us).is_certain is is_certain


async def test_a_node_that_leaves_before_the_launch_is_named_at_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    meeting = asyncio.ensure_future(nodes.lead())
    channel = await nodes.members[1]._join(time.monotonic() + 10 * patience())
    await channel.close()
    with pytest.raises(NodeError, match="n1 disconnected before the launch") as caught:
        await meeting
    assert caught.value.code == 121


async def test_a_node_that_cannot_take_part_reports_why(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    meeting = asyncio.ensure_future(nodes.lead())
    one = nodes.members[1]
    one._channel = await one._join(time.monotonic() + 10 * patience())
    one.report_failure(dataclasses.replace(failure(1, time.time(), 124), cause=Cause.CANCELLED))
    await one.close()
    with pytest.raises(NodeError) as caught:
        await meeting
    assert (caught.value.code, caught.value.cause) == (124, Cause.CANCELLED)


STALL_S = 1.5


async def test_a_shared_file_system_that_stalls_does_not_keep_nodes_from_meeting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conductor's patience with the others is longer than the stall."""
    original = Realm.read_secret

    def stalled(place: Realm) -> bytes:
        callers.add(threading.current_thread())
        time.sleep(STALL_S)
        return original(place)

    nodes = Nodes(tmp_path, nodes=40, timeout_s=25)
    monkeypatch.setattr(Realm, "read_secret", stalled)
    callers: set[threading.Thread] = set()
    count, *met = await nodes.meet()
    assert (count, {parameters.port for parameters in met}) == (40, {7})
    assert callers
    assert threading.main_thread() not in callers  # the loop has not waited


async def test_a_member_notices_a_conductor_that_gives_no_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterrun.node.link.member.ALIVE_S", 0.1 * patience())
    monkeypatch.setattr("clusterrun.node.link.member.UNANSWERED", 5)
    nodes = Nodes(tmp_path, nodes=2)
    await nodes.meet()
    await asyncio.sleep(0.7 * patience())
    assert not nodes.members[0]._decision.is_made
    nodes.head._handle = lambda member, message: None  # type: ignore[method-assign]
    ending = await nodes.members[1].ending()
    assert (ending.code, ending.cause) == (123, Cause.NODE_LOST)
    assert ending.reason.startswith("n0: the conductor has not answered for ")
    assert nodes.members[1].has_lost_conductor


async def test_a_message_that_is_too_long_is_no_lost_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.meet()
    channel = nodes.members[0]._channel
    assert channel is not None
    channel._writer.write(b"no message\n")
    long = dataclasses.replace(failure(1, time.time()), message="é" * (2 << 20))
    nodes.members[0].report_failure(long)
    endings = await nodes.end()
    assert {(ending.code, ending.cause) for ending in endings} == {(3, Cause.EXIT)}
    assert endings[0].reason.startswith("rank 1 on n1: éé")
    assert len(endings[0].reason) < 10_000


async def test_the_cause_of_lost_connections_may_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may take many seconds to die after its connections are closed."""
    monkeypatch.setattr(link_module, "SETTLE_S", 0.02)
    raised = dataclasses.replace(failure(1, time.time(), code=1), cause=Cause.EXCEPTION)
    lost = dataclasses.replace(raised, has_lost_peer=True)

    async def story(first: Failure, other: Failure) -> Ending:
        decision = link_module.StopDecision()
        decision.add(first)
        await asyncio.sleep(0.5)
        decision.add(other)
        return await decision.wait()

    own = failure(0, time.time() + 1, code=139)
    assert (await story(lost, own)).code == 139
    assert (await story(raised, own)).code == 1  # decided at once
    fewer_there = dataclasses.replace(raised, cause=Cause.WORLD_ELSEWHERE)
    assert (await story(fewer_there, own)).code == 139


async def test_ranks_that_may_fail_alike_are_awaited_if_no_restart_has_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "SETTLE_S", 0.02)
    at_line = dataclasses.replace(failure(1, 1.0), cause=Cause.EXCEPTION, where="train.py:1")

    async def story(alike_s: float, *, may_wait: bool = True, line: Failure = at_line) -> Ending:
        monkeypatch.setattr(link_module, "ALIKE_S", alike_s)
        decision = link_module.StopDecision()
        decision.may_wait = lambda alike, reports: bool(alike) and may_wait and reports < 2
        decision.add(line)
        await asyncio.sleep(0.2)
        decision.add(line)
        return await decision.wait()

    assert (await story(3600)).alike == 2
    assert (await story(0.05)).alike == 1
    assert (await story(3600, may_wait=False)).alike == 1
    assert (await story(3600, line=failure(1, 1.0))).alike == 0, "no place of the script"


async def test_a_refusal_reaches_a_member_that_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ping = Member._ping

    def ping_late(member: Member, channel: Channel) -> None:
        time.sleep(0.3)  # blocks only the member's thread
        ping(member, channel)

    def other(node: Member) -> int:
        with pytest.raises(NodeError) as refusal:
            asyncio.run(node.meet(given(report(1, versions={"torch": "1"}))))
        return int(refusal.value.code)

    nodes = Nodes(tmp_path, nodes=2)
    monkeypatch.setattr(Member, "_ping", ping_late)
    joined = asyncio.get_running_loop().run_in_executor(None, other, nodes.members[1])
    meeting = await asyncio.gather(
        nodes.lead(), nodes.members[0].meet(given(report(0))), return_exceptions=True
    )
    assert [error.code for error in meeting if isinstance(error, NodeError)] == [122, 122]
    assert await joined == 122


async def test_it_is_named_who_did_not_come(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=4, timeout_s=0.5 * patience())
    there = (nodes.members[rank].meet(given(report(rank))) for rank in (0, 2))
    outcome = await asyncio.gather(nodes.lead(), *there, return_exceptions=True)
    assert [error.code for error in outcome if isinstance(error, NodeError)] == [121] * 3
    assert "n1, n3 did not join" in outcome[0].message  # type: ignore[union-attr]


async def test_only_agents_of_the_same_attempt_are_let_in(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=2, timeout_s=patience())
    others = [
        member(1, 2, place, nodes.port, 0.3 * patience())
        for place in (
            Realm(paths=RunPaths(root=tmp_path / "not taken" / "job" / "run"), attempt=1),
            realm(tmp_path, attempt=2),
            realm(tmp_path / "another secret"),
        )
    ]
    outcome = await asyncio.gather(
        nodes.lead(),
        nodes.members[0].meet(given(report(0))),
        *(other.meet(given(report(1))) for other in others),
        return_exceptions=True,
    )
    assert [error.code for error in outcome if isinstance(error, NodeError)] == [121] * 5
    assert "n1 did not join within " in outcome[0].message  # type: ignore[union-attr]


HELLO = {"type": "hello", "run": "job/run", "attempt": 1, "nonce": "1", "report": {}}


def hello(**changes: Any) -> bytes:
    return json.dumps({**HELLO, **changes}).encode() + b"\n"


@pytest.fixture(name="no_trouble")
def _no_trouble(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """See that asyncio has nothing to print of tasks and callbacks that fail."""
    found: list[str] = []

    def note(loop: Any, context: dict[str, Any]) -> None:
        found.append(repr(context))

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", note)
    yield
    gc.collect()  # tasks whose failure nobody saw say so when they go
    assert found == []


@pytest.mark.usefixtures("no_trouble")
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100 + b"\n",
        b"[" * 4000 + b"\n",
        b"x" * (STRANGER_BYTES + 1000),
        hello(proof="\ud800", nonce="\ud800"),
        hello(nonce=[[]], proof=None),
    ],
)
async def test_strangers_are_shown_out_and_do_no_harm(tmp_path: Path, said: bytes) -> None:
    nodes = Nodes(tmp_path, nodes=1)
    meeting = asyncio.ensure_future(nodes.lead())
    reader, writer = await asyncio.open_connection("127.0.0.1", nodes.port)
    assert set(json.loads(await reader.readline())) == {"type", "nonce", "run", "attempt"}
    writer.write(said)
    if not said:
        writer.write_eof()
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    await nodes.members[0].meet(given(report(0)))
    assert await meeting == 1


CHALLENGE = {"type": "challenge", "run": "job/run", "attempt": 1, "nonce": "1"}


@pytest.mark.usefixtures("no_trouble")
@pytest.mark.parametrize(
    "answers",
    [
        (b"[" * 4000,),
        ({**CHALLENGE, "nonce": "\ud800"}, {"type": "joined", "proof": "\ud800"}),
        ({**CHALLENGE, "nonce": [[]]}, {"type": "joined"}),
        (CHALLENGE, b"[" * 4000),
    ],
)
async def test_no_answer_of_a_stranger_ends_a_member(
    tmp_path: Path, answers: tuple[dict[str, Any] | bytes, ...]
) -> None:
    knocks = []

    async def stand(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer where the member expects the conductor."""
        knocks.append(reader)
        for answer in answers:
            writer.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())
            writer.write(b"\n")
            with contextlib.suppress(OSError):
                await reader.readline()
        writer.close()

    nodes = Nodes(tmp_path, nodes=1)
    async with await asyncio.start_server(stand, sock=nodes.socket.dup()):
        meeting = asyncio.ensure_future(nodes.members[0].meet(given(report(0))))
        while not knocks:
            await asyncio.sleep(0.01)
    assert await nodes.lead() == 1
    assert (await meeting).port == 7


async def test_who_passes_messages_on_to_the_conductor_is_not_taken_for_it(tmp_path: Path) -> None:
    passed_on: list[bytes] = []
    nodes = Nodes(tmp_path, nodes=1, timeout_s=patience())

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            passed_on.append(line)
            writer.write(line)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_conductor, to_conductor = await asyncio.open_connection("127.0.0.1", nodes.port)
        await asyncio.gather(pump(reader, to_conductor), pump(from_conductor, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    deceived = member(0, 1, realm(tmp_path), port, 0.5 * patience())
    meeting = asyncio.ensure_future(nodes.lead())
    with pytest.raises(NodeError, match="cannot reach the conductor"):
        await deceived.meet(given(report(0)))
    assert not nodes.head.peers
    meeting.cancel()
    server.close()
    kinds = [json.loads(line)["type"] for line in passed_on]
    assert "hello" in kinds
    assert "joined" not in kinds


async def test_a_second_agent_of_the_same_node_is_refused(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=3, timeout_s=patience())
    twin = member(1, 3, realm(tmp_path), nodes.port, 0.5 * patience())
    meeting = asyncio.ensure_future(nodes.lead())
    first = asyncio.ensure_future(nodes.members[1].meet(given(report(1))))
    while not nodes.head.peers:
        await asyncio.sleep(0.01)
    outcome = await asyncio.gather(
        meeting, first, twin.meet(given(report(1))), return_exceptions=True
    )
    assert [error.code for error in outcome if isinstance(error, NodeError)] == [121] * 3


async def test_nodes_that_are_checked_start_without_one_that_is_late(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=2, timeout_s=0.3 * patience())
    nodes.head._may_lack_nodes = True
    meeting = asyncio.ensure_future(nodes.lead())
    await nodes.members[0].meet(given(report(0)))
    assert await meeting == 1
    with pytest.raises(NodeError, match="have started without this one"):
        await nodes.members[1].meet(given(report(1)))


async def test_many_nodes_meet_quickly(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, nodes=400, timeout_s=10 * patience())
    since = time.monotonic()
    count, *met = await nodes.meet()
    assert (count, {a.port for a in met}) == (400, {7})
    for node in nodes.members:
        node.tell("done")
    assert {ending.code for ending in await nodes.end()} == {0}
    assert time.monotonic() - since < 10 * patience()


async def test_nodes_stop_waiting_for_one_whose_setup_has_failed(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, timeout_s=60)

    async def check() -> None:
        raise NodeError(122, "a node cannot take part")

    nodes.check = check
    meeting = asyncio.gather(
        nodes.lead(), nodes.members[0].meet(given(report(0))), return_exceptions=True
    )
    found = await asyncio.wait_for(meeting, 10 * patience())
    assert [error.code for error in found if isinstance(error, NodeError)] == [122, 122]


async def test_a_node_that_leaves_after_its_report_keeps_the_others_from_starting(
    tmp_path: Path,
) -> None:
    nodes = Nodes(tmp_path, nodes=1)
    server = await asyncio.start_server(nodes._knocked, sock=nodes.socket)
    meeting = asyncio.ensure_future(nodes.members[0].meet(given(report(0))))
    assert [found.node for found in await nodes.head.meet(always)] == ["n0"]
    nodes.head.check_refused()
    await nodes.members[0].close()
    meeting.cancel()
    while nodes.head.questions._members():
        await asyncio.sleep(0.01)
    with pytest.raises(NodeError, match="n0 disconnected before the launch"):
        nodes.head.check_refused()
    server.close()


@pytest.mark.parametrize(
    ("own_address", "peer", "address"),
    [
        ("127.0.1.1", "127.0.0.1", "10.0.0.1"),  # the host's name, as Debian's /etc/hosts has it
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.2", "10.0.0.2"),  # the conductor's node was left out
    ],
)
def test_the_ranks_meet_where_others_reach_the_first_node(
    tmp_path: Path, own_address: str, peer: str, address: str
) -> None:
    async def found() -> str:
        head = Head(realm(tmp_path), 2, lambda: 1.0, SharedDisk())
        ends = ((own_address, peer), ("10.0.0.1", "10.0.0.3"))
        for rank, (own_end, peer_end) in enumerate(ends):
            channel: Any = SimpleNamespace(own_address=own_end, peer_address=peer_end)
            head.peers[rank] = Peer(node=f"n{rank}", node_rank=rank, channel=channel)
        return head.first_address

    assert asyncio.run(found()) == address
