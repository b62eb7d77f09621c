"""What the node's forwarder writes is what the reader reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import LINE_BYTES, LogLine, Stream
from clusterrun.node.forward.spool import HELD_S
from clusterrun.node.forward.stamp import split_pieces, stamp
from clusterrun.rundir.paths import RunPaths
from tests.logs.corpus import everything, write_log

_chunks = st.lists(
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b"\n", b"\r", b"a\nb\n", "é漢🙂".encode()]),
        st.integers(-3, 3).map(lambda n: b"x" * (LINE_BYTES + n)),
    ),
    max_size=8,
)


class _Stamper:
    """What the forwarder does with the bytes of one stream."""

    def __init__(self, rank: str, stream: str) -> None:
        self._rank, self._stream, self._held = rank, stream, b""

    def feed(self, data: bytes, now: float, *, with_rest: bool = False) -> bytes:
        self._held += data
        pieces = split_pieces(self._held, with_rest=with_rest)
        self._held = self._held[sum(len(piece.text) for piece in pieces) :]
        time_us = int(now * 1_000_000)
        return b"".join(stamp(piece, time_us, self._rank, self._stream) for piece in pieces)


def _as_written(lines: list[LogLine]) -> bytes:
    return b"".join(line.text if line.partial else line.text + b"\n" for line in lines)


@given(st.lists(st.tuples(st.sampled_from("oe"), _chunks, st.floats(0, 2 * HELD_S)), max_size=4))
def test_bytes_of_each_stream_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory,
    rounds: list[tuple[str, list[bytes], float]],
) -> None:
    paths = RunPaths(root=tmp_path_factory.mktemp("run"))
    stampers = {stream: _Stamper("3", stream) for stream in "oe"}
    sources = dict.fromkeys("oe", b"")
    now = 1_700_000_000.0
    for stream, chunks, wait_s in rounds:
        for chunk in chunks:
            sources[stream] += chunk
            write_log(paths, 1, "n1", [stampers[stream].feed(chunk, now)])
        now += wait_s
        is_long = wait_s >= HELD_S
        write_log(paths, 1, "n1", [s.feed(b"", now, with_rest=is_long) for s in stampers.values()])
    write_log(paths, 1, "n1", [s.feed(b"\n", now) for s in stampers.values()])
    lines = everything(paths)
    for stream, source in sources.items():
        mine = [line for line in lines if line.stream is Stream(stream)]
        assert _as_written(mine) == source + b"\n"
        assert {line.rank for line in mine} <= {3}
