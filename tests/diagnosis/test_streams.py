"""A log of any size and shape takes a bounded memory."""

from __future__ import annotations

import io
import random
import tracemalloc
from collections.abc import Iterable

import pytest

from clusterrun.diagnosis import scan
from clusterrun.diagnosis.lines import MOST_LETTERS, PrintedLine, read_line
from clusterrun.verbs.causes import known_causes
from clusterrun.verbs.diagnose import STDIN, cut_lines, diagnose_logs

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
MIB = 1 << 20


class Blocks(io.RawIOBase):
    """A file whose blocks come one by one, as from a pipe."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks, self._rest = iter(blocks), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._rest = self._rest or next(self._blocks, b"")
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


@pytest.mark.parametrize("filler", [b"x", b"10%\r", b"\r", b"\x1b[1m"])
def test_a_line_of_any_length_takes_little_memory(filler: bytes) -> None:
    known_causes()  # they stay in memory
    block = (filler * MIB)[:MIB]
    blocks = [*[block] * 16, b"\n", OOM + b"\n", *[block] * 4]
    tracemalloc.start()
    try:
        found = diagnose_logs([STDIN], stdin=io.BufferedReader(Blocks(blocks)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.verdict is not None
    assert (found.verdict.cause.id, found.lines) == ("cuda_oom", 3)
    assert peak < 4 * MIB


def test_a_cut_line_reads_as_the_whole_one() -> None:
    chance = random.Random(5)
    sizes = (1, 3, MOST_LETTERS, 70_000)
    for _ in range(100):
        parts = (
            chance.choice([b"a", b"\xc3\xa9", b"\r", b"b\r"]) * chance.choice(sizes)
            for _ in range(chance.randint(1, 4))
        )
        line = b"".join(parts) + chance.choice([b"", b"\n", b"\r\n"])
        (cut,) = cut_lines(io.BytesIO(line))
        texts = (each.decode("utf-8", "replace") for each in (line, cut))
        whole, short = (read_line(text, number=1, file="") for text in texts)
        assert short == whole


def test_many_processes_take_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_MOST_BYTES", MIB // 2)
    scanner = scan.Scanner(table=known_causes())
    tracemalloc.start()
    try:
        for number in range(1000):
            text = f"{number:06} WARNING NCCL " + "x" * 4000
            scanner.feed(PrintedLine(number, text, source=str(number % 100)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIB
    scanner.feed(PrintedLine(1000, OOM.decode(), source="1"))
    assert {each.cause.id for each in scanner.causal()} == {"cuda_oom"}
