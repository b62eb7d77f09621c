"""The link between agents: who may join, who decides, and who leaves when."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterrun.node import link as link_module
from clusterrun.node.clock import PINGS, Clock, Comparison, Offset, now_us
from clusterrun.node.endings import Cause, Ending, Failure, NodeError
from clusterrun.node.handshake import Realm
from clusterrun.node.head import Head
from clusterrun.node.identity import Identity
from clusterrun.node.member import Member
from clusterrun.node.ports import candidate_ports
from clusterrun.node.report import Agreement, Report
from clusterrun.paths import RunPaths

PORTS = candidate_ports("test of the link", 1, "link")


def who(rank: int, nodes: int = 3) -> Identity:
    return Identity(
        job_id="1",
        node=f"n{rank}",
        node_rank=rank,
        nodes=tuple(f"n{other}" for other in range(nodes)),
        head_host="127.0.0.1",
        is_local=True,
    )


def report(rank: int, **changes: Any) -> Report:
    given = {"node": f"n{rank}", "node_rank": rank, "versions": {"torch": "2"}}
    return Report(**{**given, **changes})


def conclude(reports: Sequence[Report], address: str) -> Agreement:
    return Agreement(address=address, port=len(reports), interface="lo", precision="bf16")


def realm(path: Path, attempt: int = 1) -> Realm:
    return Realm.of(RunPaths(root=path / "job" / "run"), attempt)


def failure(rank: int, at: float, code: int = 3) -> Failure:
    return Failure(
        at=at, node=f"n{rank}", rank=rank, code=code, signal=0, cause=Cause.EXIT, message="x"
    )


def member(
    rank: int, nodes: int, place: Realm, timeout_s: float, clock: Clock | None = None
) -> Member:
    return Member(
        who(rank, nodes),
        place,
        PORTS,
        timeout_s,
        lambda address: f"if of {address}",
        clock or Clock(),
        lambda offset: None,
        {},
    )


class Nodes:
    """A head and its members, in one event loop."""

    def __init__(self, path: Path, nodes: int = 3, timeout_s: float = 10) -> None:
        place = realm(path)
        self.head = Head(who(0, nodes), place, PORTS, timeout_s, conclude)
        self.members = [member(rank, nodes, place, timeout_s) for rank in range(1, nodes)]

    @property
    def all(self) -> list[Head | Member]:
        return [self.head, *self.members]

    async def meet(self, *reports: Report) -> list[Any]:
        given = reports or tuple(report(rank) for rank in range(len(self.all)))
        meeting = (node.meet(one) for node, one in zip(self.all, given, strict=True))
        return await asyncio.gather(*meeting, return_exceptions=True)

    async def end(self) -> list[Ending]:
        endings = await asyncio.gather(*(node.ending() for node in self.all))
        await asyncio.gather(*(node.leave() for node in self.all))
        return endings


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(limited())


def test_all_nodes_agree_on_what_the_head_concluded(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path)
        agreements = await nodes.meet()
        assert {a.address for a in agreements} == {"127.0.0.1"}
        assert {(a.port, a.precision) for a in agreements} == {(3, "bf16")}
        assert [a.interface for a in agreements] == ["lo", *["if of 127.0.0.1"] * 2]
        for node in nodes.all:
            node.report_done()
        assert [ending.code for ending in await nodes.end()] == [0, 0, 0]

    run(story())


def test_no_node_leaves_before_all_are_done(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path)
        await nodes.meet()
        nodes.head.report_done()
        nodes.members[0].report_done()
        ending = asyncio.ensure_future(nodes.end())
        await asyncio.sleep(0.3)
        assert not ending.done()
        nodes.members[1].report_done()
        assert [e.code for e in await ending] == [0, 0, 0]

    run(story())


def test_the_earliest_failure_decides_on_all_nodes(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path)
        await nodes.meet()
        now = time.time()
        nodes.head.report_failure(failure(0, now, code=1))
        nodes.members[1].report_failure(failure(2, now - 0.2, code=3))
        endings = await nodes.end()
        assert [ending.code for ending in endings] == [3, 3, 3]
        assert not any(member.decided_alone for member in nodes.members)
        assert {ending.reason for ending in endings} == {"rank 2 on n2: x"}

    run(story())


def test_after_a_failure_all_wait_until_nothing_runs_anywhere(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path)
        await nodes.meet()
        nodes.members[0].report_failure(failure(1, time.time()))
        await asyncio.gather(*(node.ending() for node in nodes.all))
        early = [asyncio.ensure_future(node.leave()) for node in (nodes.head, nodes.members[0])]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in early)
        await nodes.members[1].leave()
        await asyncio.gather(*early)

    run(story())


def test_a_clock_that_is_off_does_not_make_a_node_the_first(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=2)
        clock = Clock(lambda: now_us() - 3600_000_000)
        nodes.members = [member(1, 2, realm(tmp_path), 9, clock)]
        await nodes.meet()
        await compared(clock)
        nodes.head.report_failure(failure(0, time.time() - 0.1, code=5))
        nodes.members[0].report_failure(failure(1, time.time() - 3600, code=1))
        assert [ending.code for ending in await nodes.end()] == [5, 5]

    run(story())


async def compared(clock: Clock) -> None:
    while clock.offset_us == 0:
        await asyncio.sleep(0.01)


def test_a_node_with_another_clock_finds_the_time_of_the_head(tmp_path: Path) -> None:
    async def story() -> None:
        nodes, clock, found = Nodes(tmp_path, nodes=2), Clock(lambda: now_us() + 2_000_000), []
        nodes.members = [
            Member(who(1, 2), realm(tmp_path), PORTS, 9, str, clock, lambda o: found.append(o), {})
        ]
        await nodes.meet()
        await compared(clock)
        (offset,) = found
        assert clock.offset_us == offset.offset_us
        assert abs(offset.offset_us - 2_000_000) <= offset.rtt_us / 2 + 1
        assert abs(clock.corrected(clock.now_us()) - now_us()) < 1_000_000

    run(story())


def test_equal_clocks_are_left_alone_however_slow_the_network(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=3)
        await nodes.meet()
        comparisons = [node._comparison for node in nodes.members]
        while not all(len(each._found) == PINGS for each in comparisons):
            await asyncio.sleep(0.01)
        assert [node._clock.offset_us for node in nodes.members] == [0, 0]

    run(story())


def test_the_quickest_ping_counts() -> None:
    times = iter([t for n in range(PINGS) for t in (n * 1000, n * 1000 + (40 if n == 3 else 800))])
    comparison = Comparison(Clock(lambda: next(times)))
    results = []
    for number in range(PINGS):
        comparison.ping()
        results.append(comparison.pong(number * 1000 - 5_000))
    assert results == [None] * (PINGS - 1) + [Offset(offset_us=5_020, rtt_us=40)]


@pytest.mark.parametrize(
    ("offset_us", "rtt_us", "is_certain"),
    [(2_000, 100, True), (-2_000, 100, True), (900, 100, False), (2_000, 4_000, False)],
)
def test_clocks_differ_only_beyond_what_the_ping_explains(
    offset_us: int, rtt_us: int, is_certain: bool
) -> None:
    assert Offset(offset_us=offset_us, rtt_us=rtt_us).is_certain is is_certain


def test_a_lost_member_ends_the_job(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path)
        await nodes.meet()
        nodes.head.report_done()
        nodes.members[0].report_done()
        await nodes.members[1]._channel.close()  # type: ignore[union-attr]  # as if killed
        ending = await nodes.head.ending()
        assert (ending.code, ending.reason.split(":")[0]) == (123, "n2")
        assert (await nodes.members[0].ending()).code == 123
        since = time.monotonic()
        await asyncio.gather(nodes.head.leave(), nodes.members[0].leave())
        assert time.monotonic() - since < 2

    run(story())


def test_a_lost_head_ends_the_members(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path)
        await nodes.meet()
        await nodes.head._close()
        endings = await asyncio.gather(*(member.ending() for member in nodes.members))
        assert [(e.code, e.reason.split(":")[0]) for e in endings] == [(123, "n0")] * 2

    run(story())


def test_a_head_waits_for_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, tries = Realm.create_secret, iter((True, True, False))

    def created(place: Realm) -> bytes:
        if next(tries):
            raise OSError(28, "No space left on device")
        return create(place)

    monkeypatch.setattr(Realm, "create_secret", created)

    async def story() -> None:
        assert [agreement.port for agreement in await Nodes(tmp_path).meet()] == [3, 3, 3]

    run(story())


def test_a_head_whose_disk_stays_full_says_so(tmp_path: Path) -> None:
    (tmp_path / "job").touch()

    async def story() -> None:
        (error,) = await Nodes(tmp_path, nodes=1, timeout_s=0.5).meet()
        assert error.code == 121
        assert "n0: cannot write" in error.message

    run(story())


@pytest.mark.parametrize(
    ("changed", "code", "text"),
    [
        (report(2, versions={"torch": "1"}), 122, "torch differs between nodes"),
        (report(2, problem="2 GPUs were given"), 122, "n2: 2 GPUs were given"),
    ],
)
def test_nodes_that_do_not_fit_are_refused_everywhere(
    tmp_path: Path, changed: Report, code: int, text: str
) -> None:
    async def story() -> None:
        errors = await Nodes(tmp_path).meet(report(0), report(1), changed)
        assert [error.code for error in errors if isinstance(error, NodeError)] == [code] * 3
        assert all(text in error.message for error in errors)
        assert [error.is_told for error in errors] == [False, True, True]

    run(story())


def test_a_conclusion_that_fails_is_told_to_all(tmp_path: Path) -> None:
    def refuse(reports: Sequence[Report], address: str) -> Agreement:
        raise NodeError(121, "no port for the rendezvous")

    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=2)
        nodes.head._conclude = refuse
        assert [error.code for error in await nodes.meet()] == [121, 121]

    run(story())


def test_the_head_names_who_did_not_come(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=4, timeout_s=0.5)
        outcome = await asyncio.gather(
            nodes.head.meet(report(0)), nodes.members[1].meet(report(2)), return_exceptions=True
        )
        assert [error.code for error in outcome if isinstance(error, NodeError)] == [121, 121]
        assert "n1, n3" in outcome[0].message  # type: ignore[union-attr]

    run(story())


def test_p2_only_agents_of_the_same_attempt_are_let_in(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=2, timeout_s=1)
        others = [
            member(1, 2, realm(tmp_path / "other"), 0.3),
            member(1, 2, realm(tmp_path, attempt=2), 0.3),
            member(1, 2, _with_wrong_secret(tmp_path), 0.3),
        ]
        outcome = await asyncio.gather(
            nodes.head.meet(report(0)),
            *(other.meet(report(1)) for other in others),
            return_exceptions=True,
        )
        assert [error.code for error in outcome if isinstance(error, NodeError)] == [121] * 4
        assert "waited 1 s for n1" in outcome[0].message  # type: ignore[union-attr]

    run(story())


def _with_wrong_secret(path: Path) -> Realm:
    guessed = path / "guessed"
    guessed.write_text("0" * 64)
    return dataclasses.replace(realm(path), secret_file=guessed)


def test_p2_a_member_passes_over_the_head_of_another_job(tmp_path: Path) -> None:
    async def story() -> None:
        first, second = Nodes(tmp_path / "a", nodes=2), Nodes(tmp_path / "b", nodes=2)
        heads = [asyncio.ensure_future(nodes.head.meet(report(0))) for nodes in (first, second)]
        await second.members[0].meet(report(1))
        await first.members[0].meet(report(1))
        await asyncio.gather(*heads)
        second.head.report_failure(failure(0, time.time()))
        for node in first.all:
            node.report_done()
        assert [ending.code for ending in await first.end()] == [0, 0]
        assert [ending.code for ending in await second.end()] == [3, 3]

    run(story())


def test_p2_ports_that_are_taken_by_something_silent_cost_no_wait(tmp_path: Path) -> None:
    """The silent ports, one after the other, would take longer than the nodes have."""

    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=2, timeout_s=10)
        with contextlib.ExitStack() as taken:
            for port in PORTS[:-1]:
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            for agreement in await nodes.meet():
                assert isinstance(agreement, Agreement)

    run(story())


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"type": "hello"}\n', b"\xff" * 100 + b"\n"],
)
def test_strangers_are_shown_out_and_do_no_harm(tmp_path: Path, said: bytes) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=2)
        meeting = asyncio.ensure_future(nodes.head.meet(report(0)))
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", PORTS[0])
        challenge = json.loads(await reader.readline())
        assert set(challenge) == {"type", "nonce", "run", "attempt"}
        writer.write(said)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await nodes.members[0].meet(report(1))
        assert (await meeting).port == 2

    run(story())


def test_a_second_agent_of_the_same_node_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=3, timeout_s=1)
        twin = member(1, 3, realm(tmp_path), 0.5)
        outcome = await asyncio.gather(
            nodes.head.meet(report(0)),
            nodes.members[0].meet(report(1)),
            twin.meet(report(1)),
            return_exceptions=True,
        )
        assert [error.code for error in outcome if isinstance(error, NodeError)] == [121] * 3

    run(story())


def test_a_head_notes_that_it_left_a_silent_node_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterrun.node.head.LEAVE_S", 0.3)

    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=2)
        await nodes.meet()
        nodes.head.report_failure(failure(0, time.time()))
        await nodes.head.ending()
        await nodes.head.leave()
        assert nodes.head.left_behind

    run(story())


def test_a_member_decides_alone_when_the_head_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterrun.node.member.HEAD_DECIDES_S", 0.2)

    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=2)
        await nodes.meet()
        nodes.head._handle = lambda member, message: None  # type: ignore[method-assign]
        assert not nodes.members[0].decided_alone
        for _ in range(2):
            nodes.members[0].report_failure(failure(1, time.time()))
        assert (await nodes.members[0].ending()).code == 3
        await asyncio.sleep(0.3)  # the second decides nothing
        assert nodes.members[0].decided_alone

    run(story())


def test_many_nodes_meet_quickly(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, nodes=400)
        since = time.monotonic()
        agreements = await nodes.meet()
        assert {a.port for a in agreements} == {400}
        for node in nodes.all:
            node.report_done()
        assert {ending.code for ending in await nodes.end()} == {0}
        assert time.monotonic() - since < 10

    run(story())


def test_addresses_are_written_plainly() -> None:
    assert link_module.plain_address(("::ffff:10.0.0.1", 1, 0, 0)) == "10.0.0.1"
    assert link_module.plain_address(("fe80::1%eth0", 1, 0, 0)) == "fe80::1"
    assert link_module.plain_address(None) == ""


def test_nodes_stop_waiting_for_one_that_left_word_that_it_is_unfit(tmp_path: Path) -> None:
    async def story() -> None:
        nodes = Nodes(tmp_path, timeout_s=60)
        meeting = asyncio.gather(
            nodes.head.meet(report(0)), nodes.members[0].meet(report(1)), return_exceptions=True
        )
        await asyncio.sleep(0.3)
        realm(tmp_path).verdict.write_text("122\n")
        for error in await asyncio.wait_for(meeting, 10):
            assert isinstance(error, NodeError)
            assert error.code == 122
            assert error.is_told

    run(story())


def test_a_member_without_head_stops_waiting_when_the_head_left_word(tmp_path: Path) -> None:
    async def story() -> None:
        realm(tmp_path).verdict.parent.mkdir(parents=True, exist_ok=True)
        realm(tmp_path).verdict.write_text("122\n")
        with pytest.raises(NodeError, match="cannot take part"):
            await member(1, 2, realm(tmp_path), 60).meet(report(1))

    run(story())
