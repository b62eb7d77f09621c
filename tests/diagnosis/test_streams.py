"""A log of any size and shape takes a bounded memory."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterable

import pytest

from clusterrun.diagnosis.table import built_in
from clusterrun.verbs.diagnose import STDIN, diagnose_logs

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
    built_in()  # they stay in memory
    block = (filler * MIB)[:MIB]
    blocks = [*[block] * 16, b"\n", OOM + b"\n", *[block] * 4]
    tracemalloc.start()
    try:
        found = diagnose_logs([STDIN], stdin=io.BufferedReader(Blocks(blocks)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.verdict is not None
    assert found.verdict.cause.id == "cuda_oom"
    assert peak < 4 * MIB
