"""A rank's thread that dumps the flight recorders when the agent asks; torch is a stand-in."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from clusterrun.node.forward.spool import Spool
from clusterrun.node.watch import hangs
from clusterrun.rank import emit
from tests.patience import patience

BINDINGS = "torch._C._distributed_c10d"


@pytest.fixture(name="spool")
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spool]:
    monkeypatch.setenv("CLUSTERRUN_SPOOL", str(tmp_path))
    monkeypatch.setenv("CLUSTERRUN_RANK", "3")
    monkeypatch.setattr(emit, "_started", [])
    yield Spool(root=tmp_path)
    emit._started.clear()


def recording(monkeypatch: pytest.MonkeyPatch, **recorders: object) -> None:
    """Let torch have these recorders."""
    monkeypatch.setitem(sys.modules, BINDINGS, SimpleNamespace(**recorders))  # type: ignore[arg-type]


def collected(spool: Spool, *ranks: int, within_s: float = 10) -> list[int]:
    return asyncio.run(hangs.dump(ranks, spool, within_s * patience()))


def test_a_rank_answers_each_time_from_one_thread_that_is_not_among_the_scripts(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, before = iter([b"first", b"second"]), threading.active_count()
    recording(monkeypatch, _dump_fr_trace=lambda: next(answers))
    emit.answer_asks()
    for answer in (b"first", b"second"):
        assert collected(spool, 3) == [3]
        assert spool.dump(3).read_bytes() == answer
    spool.pipe(3).unlink()
    emit.answer_asks()
    assert not spool.pipe(3).exists()
    assert threading.active_count() == before


def torn() -> bytes:
    raise RuntimeError("no recorder")


@pytest.mark.parametrize(
    ("nccl", "other", "main", "second"),
    [
        (b"nccl", b"gloo", b"nccl", b"gloo"),
        (b"nccl", None, b"nccl", None),
        (None, b"gloo", b"gloo", None),
        (torn, b"gloo", b"gloo", None),
        (None, None, b"", None),
    ],
)
def test_both_recorders_are_kept(
    spool: Spool,
    monkeypatch: pytest.MonkeyPatch,
    nccl: object,
    other: object,
    main: bytes,
    second: bytes | None,
) -> None:
    given = {"_dump_nccl_trace": nccl, "_dump_fr_trace": other}
    answers = {n: v if callable(v) else lambda v=v: v for n, v in given.items() if v is not None}
    recording(monkeypatch, **answers)
    emit.write_dumps(str(spool.root), 3)
    cpu = spool.root / "flight_cpu_rank_3"
    assert spool.dump(3).read_bytes() == main
    assert (cpu.read_bytes() if cpu.exists() else None) == second
    assert not list(spool.root.glob(".*")), "a dump appears whole"


def test_torchs_compiler_is_not_imported_for_a_dump(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, seen = ModuleType("torch"), []
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    recording(monkeypatch, _dump_fr_trace=lambda: seen.append(hasattr(torch, "_inductor")) or b"x")
    emit.write_dumps(str(spool.root), 3)
    assert seen == [True]
    assert not hasattr(torch, "_inductor")


def test_a_rank_that_does_not_answer_leaves_no_dump_of_an_earlier_time(spool: Spool) -> None:
    os.mkfifo(spool.pipe(1))
    spool.dump(1).write_bytes(b"old")
    reader = os.open(spool.pipe(1), os.O_RDWR | os.O_NONBLOCK)
    assert collected(spool, 1, within_s=0.1) == []
    assert os.read(reader, 64) == b"?"
    os.close(reader)
    assert collected(spool, 1, 2) == [], "no reader, or no pipe"
