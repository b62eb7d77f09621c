"""Log lines: byte for byte what the ranks wrote, stamped, whatever and wherever."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterrun.node.base.identity import Attempt
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.member import Clock
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import on_slurm
from tests.node.jobs import who
from tests.patience import wait_for

LINE = re.compile(rb"(\d{16}) (\d+|-) ([oeaOElLgz]) (.*)", re.DOTALL)


def log_path(root: Path) -> Path:
    return root / "logs" / "a1" / "n1.log"


PLAN = on_slurm(gpus_per_node=1)


def forwarder(root: Path, **limits: int) -> Forwarder:
    (root / "spool").mkdir(exist_ok=True)
    plan = dataclasses.replace(PLAN, **limits)
    attempt = Attempt(plan=plan, paths=RunPaths(root=root), number=1, who=who(0, "n1"))
    return Forwarder(attempt, Spool(root=root / "spool"), Clock())


def read_log(root: Path) -> Iterator[tuple[int, str, str, bytes]]:
    """Yield time, rank, stream and text of each line; a torn one fails."""
    data = log_path(root).read_bytes()
    assert data.endswith(b"\n") or not data
    for line in data.split(b"\n")[:-1]:
        found = LINE.fullmatch(line)
        assert found, line[:200]
        yield int(found[1]), found[2].decode(), found[3].decode(), found[4]


def restored(root: Path) -> dict[str, list[bytes | int]]:
    """Put each stream together again: its bytes, and how many were lost between them."""
    streams: dict[str, list[bytes | int]] = defaultdict(list)
    for _, rank, stream, text in read_log(root):
        if stream == "g":
            name, size, _ = text.split(b" ", 2)
            streams[f"{rank}{name.decode()}"].append(int(size))
        else:
            streams[rank + stream.lower()].append(text + (b"\n" if stream.islower() else b""))
    return streams


def whole(parts: list[bytes | int]) -> bytes:
    assert not [part for part in parts if isinstance(part, int)]
    return b"".join(part for part in parts if isinstance(part, bytes))


def make_full(root: Path) -> Path:
    log = log_path(root)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.symlink_to("/dev/full")
    return log


def test_all_files_of_the_spool_are_forwarded_to_the_end(tmp_path: Path) -> None:
    thread = forwarder(tmp_path)
    thread.start()
    spool = tmp_path / "spool"
    (spool / "rank_0.out").write_bytes(b"a\nb")
    (spool / "rank_10.err").write_bytes(b"x" * 3_000_000 + b"\n")
    (spool / "launcher.out").write_bytes(b"torch says\n")
    (spool / "whole").write_text("{}")
    (spool / "whole").rename(spool / "rank_0.error.json")
    (spool / "something else").write_text("no")
    thread.say("two\nlines")
    thread.event("started")
    assert thread.finish(20)
    lines = (tmp_path / "logs" / "a1" / "n1.log").read_bytes().split(b"\n")[:-1]
    parts = [tuple(line.split(b" ", 3)[1:]) for line in lines]
    assert {(b"0", b"o", b"a"), (b"0", b"O", b"b"), (b"-", b"l", b"torch says")} <= set(parts)
    assert {(b"-", b"a", b"two"), (b"-", b"a", b"lines")} <= set(parts)
    assert sum(len(text) for rank, _, text in parts if rank == b"10") == 3_000_000
    event = json.loads((tmp_path / "events" / "n1.jsonl").read_text())
    assert (event["type"], event["node"], event["attempt"]) == ("started", "n1", 1)


def test_what_ranks_leave_beside_their_output_comes_home_as_a_file_a_node(tmp_path: Path) -> None:
    paths, thread = RunPaths(root=tmp_path), forwarder(tmp_path)
    thread.start()
    spool = tmp_path / "spool"
    for rank in (0, 1):
        (spool / f"rank_{rank}.error.json").write_text(f'{{"rank": {rank}}}\n')
        (spool / f"flight_rank_{rank}").write_bytes(b"dump %d" % rank)
        (spool / f"nccl.n1.{rank}").write_text(f"n1:{rank} NCCL WARN one\nn1:{rank} NCCL")
    (spool / "nccl.n1.2").touch()
    wait_for(paths.nccl_log(1, "n1").exists)
    (spool / "nccl.n1.0").write_text("n1:0 NCCL WARN one\nn1:0 NCCL WARN two\n")
    assert thread.finish(20)
    assert paths.rank_errors(1, "n1").read_text() == '{"rank": 0}\n{"rank": 1}\n'
    assert sorted(paths.nccl_log(1, "n1").read_text().splitlines()) == [
        *("n1:0 NCCL WARN one", "n1:0 NCCL WARN two", "n1:1 NCCL", "n1:1 NCCL WARN one")
    ]
    with tarfile.open(paths.flight_dumps(1, "n1")) as archive:
        assert archive.getnames() == ["rank_0", "rank_1"]
    brought = [path for path in tmp_path.rglob("*") if path.is_file() and spool not in path.parents]
    homes = (paths.rank_errors(1, "n1"), paths.nccl_log(1, "n1"), paths.flight_dumps(1, "n1"))
    logs = (paths.log(1, "n1"), paths.log_errors(1, "n1"))
    assert {*brought} <= {*homes, *logs, paths.events("n1")}


@contextlib.contextmanager
def full_stderr() -> Iterator[None]:
    """Let the agent's own output be on a full disk, too: it is a file in the run directory."""
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closing it fails
    with contextlib.suppress(OSError), full, contextlib.redirect_stderr(full):
        yield


def test_a_round_that_fails_is_tried_again_with_a_full_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, failures = forwarder(tmp_path), [ValueError("one"), ValueError("two")]
    forward = thread._forward
    monkeypatch.setattr(thread, "_forward", lambda: _raise(failures) or forward())
    (tmp_path / "spool" / "rank_0.out").write_bytes(b"important\n")
    with full_stderr():
        thread.start()
        assert thread.finish(20)
    assert whole(restored(tmp_path)["0o"]) == b"important\n"


def _raise(failures: list[ValueError]) -> None:
    if failures:
        raise failures.pop()


# The time of a line


def now_us() -> int:
    return time.time_ns() // 1000


def write_at(path: Path, data: bytes, time_us: int) -> None:
    path.write_bytes(data)
    os.utime(path, ns=(time_us * 1000, time_us * 1000))


def test_a_line_carries_the_time_at_which_it_was_written(tmp_path: Path) -> None:
    thread, at_us = forwarder(tmp_path), now_us() - 50_000
    write_at(tmp_path / "spool" / "rank_0.out", b"x\n", at_us)
    thread.start()
    assert thread.finish(20)
    assert list(read_log(tmp_path)) == [(at_us, "0", "o", b"x")]


@pytest.mark.parametrize("off_us", [-3600 * 10**6, 3600 * 10**6])
def test_a_time_that_cannot_be_is_not_believed(tmp_path: Path, off_us: int) -> None:
    thread, since_us = forwarder(tmp_path), now_us()
    write_at(tmp_path / "spool" / "rank_0.out", b"x\n", since_us + off_us)
    thread.start()
    assert thread.finish(20)
    assert since_us <= next(read_log(tmp_path))[0] <= now_us()


def test_lines_stand_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    thread, at_us = forwarder(tmp_path), now_us()
    for i, name in enumerate(("rank_2.out", "rank_0.err", "rank_1.out")):
        write_at(tmp_path / "spool" / name, b"x\n", at_us - 500_000 + 1000 * i)
    thread.say("said now")
    thread.start()
    assert thread.finish(20)
    lines = list(read_log(tmp_path))
    assert [line[1] for line in lines] == ["2", "0", "1", "-"]
    assert [line[0] for line in lines] == sorted(line[0] for line in lines)


# The end


def test_half_a_character_waits_for_its_other_half(tmp_path: Path) -> None:
    thread = forwarder(tmp_path)
    path = tmp_path / "spool" / "rank_0.out"
    path.write_bytes("50 % é".encode()[:-1])
    thread.start()
    wait_for(lambda: log_path(tmp_path).exists() and log_path(tmp_path).stat().st_size > 0)
    with path.open("ab") as file:
        file.write("é".encode()[-1:] + b"\n")
    assert thread.finish(20)
    assert [line[2:] for line in read_log(tmp_path)] == [("O", b"50 % "), ("o", "é".encode())]


# Space


def test_space_is_given_back_while_the_rank_goes_on(tmp_path: Path) -> None:
    thread, path = forwarder(tmp_path), tmp_path / "spool" / "rank_0.out"
    with path.open("ab", buffering=0) as file:
        file.write(b"x" * 99 + b"\n")
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        for _ in range(160):
            file.write((b"x" * 99 + b"\n") * 1000)
        before = path.stat().st_blocks
        thread.start()
        log = log_path(tmp_path)
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") >= 160_001)
        assert thread.is_alive()
        file.write(b"last\n")
        assert thread.finish(20)
    if path.stat().st_blocks == before:
        pytest.skip("the file system of the temporary directory cannot punch holes")
    assert path.stat().st_blocks * 512 < 6_000_000
    assert whole(restored(tmp_path)["0o"]) == (b"x" * 99 + b"\n") * 160_001 + b"last\n"


def test_more_than_may_wait_is_dropped_from_the_largest_and_counted(tmp_path: Path) -> None:
    thread = forwarder(tmp_path, log_spool_bytes=80_000)
    large, small = (b"x" * 99 + b"\n") * 1000, b"y" * 99 + b"\n"
    (tmp_path / "spool" / "rank_0.out").write_bytes(large)
    (tmp_path / "spool" / "rank_1.out").write_bytes(small)
    thread.start()
    assert thread.finish(20)
    streams = restored(tmp_path)
    assert whole(streams["1o"]) == small
    lost, *rest = streams["0o"]
    assert isinstance(lost, int)
    assert lost % 100 == 0
    assert whole(rest) == large[lost:]
    assert 60_000 < len(large) - lost <= 70_000


def test_the_reason_of_a_gap_is_that_of_the_disk(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    thread, log = forwarder(tmp_path, log_spool_bytes=10_000), make_full(tmp_path)
    thread.say("hello")
    thread.start()
    wait_for(lambda: "No space left on device" in capfd.readouterr().err)
    (tmp_path / "spool" / "rank_0.out").write_bytes(b"x\n" * 10_000)
    time.sleep(1.5)  # a few rounds, each of which may drop
    log.unlink()
    assert thread.finish(20)
    gaps = [text for _, _, stream, text in read_log(tmp_path) if stream == "g"]
    assert [gap.split(b" ", 2)[2] for gap in gaps] == [b"No space left on device"]


_writes = st.lists(
    st.tuples(
        st.sampled_from(["rank_0.out", "rank_0.err", "rank_1.out", "launcher.out"]),
        st.binary(max_size=300)
        | st.sampled_from([b"\n", "漢🙂".encode() * 50])
        | st.integers(1, 90_000).map(lambda n: b"z" * n),
    ),
    max_size=12,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(writes=_writes, limit=st.sampled_from([3_000, 100_000]), is_capped=st.booleans())
def test_what_is_given_and_what_is_lost_add_up_on_a_disk_that_was_full(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[str, bytes]],
    limit: int,
    is_capped: bool,
) -> None:
    root = tmp_path_factory.mktemp("node")
    limits = {"log_spool_bytes": limit, "log_lines_per_s": 50 if is_capped else 0}
    thread, log = forwarder(root, **limits), make_full(root)
    written: dict[str, bytes] = defaultdict(bytes)
    thread.start()
    for i, (name, data) in enumerate(writes):
        with (root / "spool" / name).open("ab") as file:
            file.write(data)
        key = {"rank_0.out": "0o", "rank_0.err": "0e", "rank_1.out": "1o"}.get(name, "-l")
        written[key] += data
        if i == len(writes) // 2:
            time.sleep(0.15)
            log.unlink()
    if log.is_symlink():
        log.unlink()
    assert thread.finish(30)
    streams = restored(root) if log.exists() else {}
    for key, data in written.items():
        position = 0
        for part in streams.get(key, []):
            if isinstance(part, bytes):
                assert data[position:].startswith(part)
            position += part if isinstance(part, int) else len(part)
        assert position == len(data)
