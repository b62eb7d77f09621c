"""What an agent writes on a host of its own arrives in the home byte for byte, and nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.backends.hosts import mirror
from clusterrun.backends.hosts.mirror import Receiver
from clusterrun.errors import ClusterrunError
from clusterrun.node.forward.logfile import NodeLog
from clusterrun.node.forward.spool import Piece
from clusterrun.rundir.attempt import read_attempt, take_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files

NODE = "gpu2"


class Pair:
    """A host of its own and the home, without what lies between."""

    def __init__(self, root: Path, attempts: int = 1) -> None:
        self.host, self.home = RunPaths(root=root / "host"), RunPaths(root=root / "home")
        for paths in (self.host, self.home):
            for number in range(1, attempts + 1):
                paths.attempt(number).mkdir(parents=True)
        self.shifts: dict[str, int] = {}
        self.receiver = Receiver(root=self.home.root, node=NODE)

    def move(self, most: int | None = None) -> int:
        """Bring a batch home, or its first parts: the rest is lost with the link."""
        wanted = self.receiver.wants()
        assert wanted is not None
        parts = mirror.news(self.host.root, **wanted, shifts=self.shifts)
        found = list(itertools.islice(parts, most))
        for path, at, data in found:
            self.receiver.take(path, at, data)
        return len(found)

    def finish(self) -> None:
        """Move until there is no more."""
        while self.move():
            continue

    def append(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)


def copied(root: Path) -> dict[str, bytes]:
    """Return all files below a directory."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def names(paths: RunPaths, number: int) -> list[Path]:
    logs = (paths.log, paths.log_errors, paths.nccl_log, paths.rank_errors)
    return [paths.events(NODE), paths.usage(NODE), *(of(number, NODE) for of in logs)]


def wholes(paths: RunPaths, number: int) -> list[Path]:
    return [of(number, NODE) for of in (paths.flight_dumps, paths.live_dumps)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 11), st.integers(1, 3000)),
        st.tuples(st.just("replace"), st.integers(0, 3), st.integers(1, 3000)),
        st.tuples(st.just("move"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("full"), st.integers(0, 2000), st.just(0)),
        st.tuples(st.just("room"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(acts=ACTS)
def test_the_home_equals_the_host_after_any_cuts(
    acts: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair, rng = Pair(tmp_path_factory.mktemp("pair"), attempts=2), random.Random(1)
    written: dict[Path, bytes] = {}
    growing = [path for number in (1, 2) for path in names(pair.host, number)]
    whole = [path for number in (1, 2) for path in wholes(pair.host, number)]
    room: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        append = mirror._append

        def scarce(path: Path, at: int, data: bytes) -> None:
            fits = data[: room[0]] if room else data
            append(path, at, fits)
            if fits != data:
                room[0] -= len(fits)
                raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(mirror, "_append", scarce)
        patch.setattr(mirror, "RETRY_S", 0.0)
        patch.setattr(mirror, "BATCH_BYTES", 5000)
        for act, first, second in acts:
            if act == "append":
                data = rng.randbytes(second)
                pair.append(growing[first], data)
                written[growing[first]] = written.get(growing[first], b"") + data
            elif act == "replace":
                whole[first].parent.mkdir(parents=True, exist_ok=True)
                data = written[whole[first]] = rng.randbytes(second)
                files.write_whole(whole[first], data)
            elif act == "move":
                pair.move(first)
            else:
                room[:] = [first] if act == "full" else []
        room.clear()
        pair.finish()
    assert copied(pair.home.root) == {
        str(path.relative_to(pair.host.root)): data for path, data in written.items()
    }


def test_all_that_an_agent_writes_arrives_and_nothing_else(pair: Pair) -> None:
    host = pair.host
    for path in (*names(host, 1), *wholes(host, 1), host.status(1)):
        pair.append(path, path.name.encode())
    expected = copied(host.root)
    others = (host.attempt_record(1), host.plan, host.outcome(1), host.request(1))
    for path in (*others, host.checkpoints_dir / "step-1" / "model.pt", host.log(1, "gpu3")):
        pair.append(path, b"secret")
    pair.finish()
    assert copied(pair.home.root) == expected
    found = [path for path in pair.home.root.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}


def test_a_file_that_has_become_shorter_goes_on_where_the_home_is(pair: Pair) -> None:
    """As after a crash of the host, which takes the end of files."""
    events = pair.host.events(NODE)
    pair.append(events, b"one\ntwo\n")
    pair.finish()
    events.write_bytes(b"one\n")
    pair.finish()
    pair.append(events, b"three\n")
    pair.finish()
    assert pair.home.events(NODE).read_bytes() == b"one\ntwo\nthree\n"


HOSTILE = """../x /etc/x . job.json plan.json events/gpu3.jsonl logs/a1/gpu3.log logs/a01/gpu2.log
logs/a0/gpu2.log logs/a1/../../x logs//a1/gpu2.log events/../events/gpu2.jsonl attempts/0/status
attempts/1/attempt.json attempts/7/status
attempts/\u0661/status logs/a1/gpu2.log\0 checkpoints/step-1"""


def test_a_host_can_write_nothing_but_its_own_files(pair: Pair) -> None:
    for path in ("", *HOSTILE.split()):
        with pytest.raises(ClusterrunError, match="not one of its own files"):
            pair.receiver.take(path, 0, b"x")
    assert copied(pair.home.root.parent) == {}


def test_what_can_not_be_written_is_said_once(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    (pair.home.root / "logs").touch()
    for _ in range(2):
        pair.receiver.take("logs/a1/gpu2.log", 0, b"x")
    pair.receiver.take("events/gpu2.jsonl", 0, b"x")  # it may point into the log
    assert copied(pair.home.root) == {"logs": b""}
    assert capsys.readouterr().err.count("cannot write") == 1
    assert pair.receiver.wants() is None


def test_a_home_that_rounds_times_of_change_gets_a_file_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    utime = os.utime
    rounded = lambda path, ns: utime(path, ns=tuple(n // 10**9 * 10**9 for n in ns))  # noqa: E731
    monkeypatch.setattr(mirror.os, "utime", rounded)
    pair.append(pair.host.flight_dumps(1, NODE), b"dump")
    assert [pair.move(), pair.move()] == [1, 0]


def test_a_pipe_on_the_host_is_not_read(pair: Pair) -> None:
    pair.host.flight_dumps(1, NODE).parent.mkdir(parents=True)
    os.mkfifo(pair.host.flight_dumps(1, NODE))
    pair.finish()
    assert copied(pair.home.root) == {}


def test_no_error_line_points_beyond_the_log_while_it_grows(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, home = pair.host, pair.home
    log = NodeLog(host.log(1, NODE), host.log_errors(1, NODE))
    rng, at = random.Random(2), 10**15
    for _ in range(300):
        for _ in range(rng.randrange(20)):
            at += 1
            log.add(Piece(b"%d\n" % at * rng.randrange(1, 400), is_cut=False), at, "0", "o")
            log.add(Piece(b"ValueError: %d\n" % at, is_cut=False), at, f"{at}", "e")
        log.flush()
        monkeypatch.setattr(mirror, "BATCH_BYTES", rng.randrange(1, 100_000))
        pair.move()
        size, side = files.size_of(home.log(1, NODE)), home.log_errors(1, NODE)
        lines = side.read_bytes().split(b"\n")[:-1] if side.exists() else []
        assert all(int(line.split()[4]) < size for line in lines)
    pair.finish()
    assert side.read_bytes() == host.log_errors(1, NODE).read_bytes() != b""


def test_a_bundle_is_what_a_host_needs(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path / "home")
    paths.root.mkdir()
    paths.attempts_dir.mkdir()
    take_attempt(paths, 1, "owner")
    for path, mode in ((paths.plan, 0o600), (paths.node_script, 0o700), (paths.record, 0o600)):
        files.write_whole(path, f"{path.name} \udcff", mode=mode)
    host = RunPaths(root=tmp_path / "host" / "runs" / "train" / "1")
    for _ in range(2):
        mirror.write_bundle(host.root, mirror.bundle(paths))
        assert set(copied(host.root)) == {"plan.json", "node.sh", "attempts/1/attempt.json"}
        assert host.plan.read_bytes() == paths.plan.read_bytes()
        assert os.access(host.node_script, os.X_OK)
        assert stat.S_IMODE(host.root.stat().st_mode) == 0o700
        assert read_attempt(host, 1) == read_attempt(paths, 1)
    assert os.listdir(host.root.parent) == ["1"]
