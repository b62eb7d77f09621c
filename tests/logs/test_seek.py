"""A moment's place in a file: what a look at each line would give."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.lines import STAMPED
from clusterrun.logs.files import FileKind, OpenFiles
from clusterrun.logs.sources import has_left_out, seek_time
from tests.logs.corpus import T0, raw
from tests.logs.reading import blocks_of, write
from tests.logs.strategies import contents


def linear(content: bytes, epoch_us: int, end: int) -> int:
    offset = 0
    for part in content.split(b"\n"):
        if offset >= end:
            break
        if STAMPED.match(part) and int(part[:16]) >= epoch_us:
            return offset
        offset += len(part) + 1
    return end


@given(contents(), st.integers(-2, 400), st.integers(1, 100), st.data())
def test_a_moment_is_found_where_a_look_at_each_line_finds_it(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    time_us: int,
    block: int,
    data: st.DataObject,
) -> None:
    file = write(tmp_path_factory.mktemp("logs"), "n1", content)
    places = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10), len(content)]
    end = data.draw(st.sampled_from(places))
    with blocks_of(block):
        assert seek_time(file, T0 + time_us, end) == linear(content, T0 + time_us, end)


def test_a_moment_is_found_by_a_few_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"".join(raw(T0 + i * 1000, 0, "o", "x" * 50) for i in range(50_000))
    file = write(tmp_path, "n1", content)
    sizes: list[int] = []
    original = OpenFiles.read

    def counted(self: OpenFiles, path: Path, offset: int, size: int) -> bytes:
        sizes.append(size)
        return original(self, path, offset, size)

    monkeypatch.setattr(OpenFiles, "read", counted)
    place = seek_time(file, T0 + 31_234_567, len(content))
    assert content[place : place + 16] == b"%d" % (T0 + 31_235_000)
    assert sum(sizes) < len(content) / 50


def test_a_side_file_that_had_no_room_for_all_says_so(tmp_path: Path) -> None:
    line = raw(T0, 3, "e", "error 100 says - g - 7 x 9")
    full = write(tmp_path, "n1", line * 3 + raw(T0, None, "g", "- 400 x 12 full"), FileKind.ERRORS)
    gap = write(tmp_path, "n2", line + raw(T0, 3, "g", "- 400 o 12 full"), FileKind.ERRORS)
    assert has_left_out(full)
    assert not has_left_out(gap)
