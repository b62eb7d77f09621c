"""What is read for a query: which files, of which time, and which lines of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.errors import ClusterrunError
from clusterrun.logformat.lines import SIDE_TEXT_BYTES, STAMPED
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.sources import (
    EVERYTHING,
    OVERVIEW,
    FileKind,
    LogFile,
    OpenFiles,
    Query,
    find_files,
    seek_time,
    sources_of,
)
from clusterrun.node.forward.logfile import NodeLog as AgentLog
from clusterrun.node.forward.spool import Piece
from clusterrun.rundir.attempt import amend_attempt
from clusterrun.rundir.paths import RunPaths
from tests.logs.corpus import T0, choose_sources, raw, texts, write_log
from tests.logs.reading import blocks_of, contents, newest, write

ERRORS = Query(errors=True)


@dataclass
class LoggedRun:
    """Two nodes with two ranks each, whose agents wrote side files."""

    paths: RunPaths
    logs: dict[str, list[bytes]] = field(default_factory=lambda: {"n1": [], "n2": []})
    sides: dict[str, list[bytes]] = field(default_factory=lambda: {"n1": [], "n2": []})

    def say(
        self, node: str, time_us: int, rank: int | None, stream: str, text: str, kind: str = ""
    ) -> None:
        """Write a line as an agent would, into the side file where it belongs there."""
        place = len(b"".join(self.logs[node]))
        self.logs[node].append(raw(T0 + time_us, rank, stream, text))
        if kind or rank is None or stream in "gz":
            entry = f"{kind or '-'} {place} {text}"
            self.sides[node].append(raw(T0 + time_us, rank, stream, entry))

    def write(self, *, world: bool = True) -> RunPaths:
        for node, lines in self.logs.items():
            write_log(self.paths, 1, node, lines)
            self.paths.log_errors(1, node).write_bytes(b"".join(self.sides[node]))
            self.paths.log(1, node).with_suffix(".idx").write_bytes(b"of an older release")
        if world:
            amend_attempt(self.paths, 1, nodes=("n1", "n2"), procs_per_node=2)
        return self.paths

    def read(self, query: Query) -> list[str]:
        chosen = choose_sources(self.paths, 1, query)
        found = texts(merge_sources(chosen))
        assert texts(newest(chosen, 1000)) == found
        return found

    def opened(self, query: Query) -> list[str]:
        return [source.file.path.name for source in choose_sources(self.paths, 1, query)]


@pytest.fixture
def run(tmp_path: Path) -> LoggedRun:
    run = LoggedRun(paths=RunPaths(root=tmp_path))
    run.say("n1", 1, None, "a", "agent")
    run.say("n1", 2, 0, "o", "step 1")
    run.say("n2", 3, 2, "o", "step 1 of rank 2")
    run.say("n1", 4, 1, "e", "a warning")
    run.say("n2", 5, 3, "e", "ValueError: no", "error")
    run.say("n1", 6, 0, "e", "KeyError: 7", "error")
    run.say("n2", 7, 2, "g", "o 4096 spool full")
    run.say("n2", 8, None, "l", "launcher of n2")
    run.say("n1", 9, None, "z", "0 complete")
    return run


ALL = ["agent", "step 1", "step 1 of rank 2", "a warning", "ValueError: no", "KeyError: 7"]
ALL += ["o 4096 spool full", "launcher of n2"]
NOTED = ["agent", "step 1", "ValueError: no", "KeyError: 7", "o 4096 spool full", "launcher of n2"]


def test_everything_is_every_line_but_the_ends_of_logs(run: LoggedRun) -> None:
    run.write()
    assert run.read(EVERYTHING) == ALL
    with_ends = sources_of(find_files(run.paths, 1), EVERYTHING, live=True)
    assert texts(merge_sources(with_ends)) == [*ALL, "0 complete"]
    assert run.opened(EVERYTHING) == ["n1.log", "n2.log"]


def test_an_overview_reads_the_log_of_rank_0_and_what_the_side_files_hold(run: LoggedRun) -> None:
    run.write()
    assert run.read(OVERVIEW) == NOTED
    assert run.opened(OVERVIEW) == ["n1.log", "n1.err", "n2.err"]


def test_a_search_shows_lost_bytes_and_looks_for_them_where_a_side_file_has_them(
    run: LoggedRun,
) -> None:
    query = Query(include=(re.compile(b"Error"),))
    run.write()
    assert run.read(query) == ["ValueError: no", "KeyError: 7", "o 4096 spool full"]
    assert [source.literals for source in choose_sources(run.paths, 1, query)] == [
        (b"Error",),
        (b"Error", b" g "),
    ]
    run.paths.log_errors(1, "n2").unlink()
    assert run.read(query) == ["ValueError: no", "KeyError: 7", "o 4096 spool full"]


@pytest.mark.parametrize(("query", "shown"), [(OVERVIEW, ["step 1", "KeyError: 7"]), (ERRORS, [])])
def test_a_missing_side_file_counts_as_empty(
    run: LoggedRun, query: Query, shown: list[str]
) -> None:
    run.write()
    for node in ("n1", "n2"):
        run.paths.log_errors(1, node).unlink()
    assert run.read(query) == shown


def test_of_a_rank_only_the_log_of_its_node_is_opened(run: LoggedRun) -> None:
    run.write()
    query = Query(ranks=frozenset({3}))
    assert run.read(query) == ["ValueError: no"]
    assert run.opened(query) == ["n2.log"]
    assert run.opened(Query(ranks=frozenset({3}), errors=True)) == ["n2.err"]


@pytest.mark.parametrize("world", ["", "{}", "[]", '{"nodes": 3, "procs_per_node": 1}', "\0"])
def test_without_a_world_all_files_are_read_for_a_rank(run: LoggedRun, world: str) -> None:
    run.write(world=False)
    if world:
        run.paths.attempt_record(1).write_text(world)
    assert run.read(Query(ranks=frozenset({2}))) == ["step 1 of rank 2", "o 4096 spool full"]
    assert run.read(OVERVIEW) == NOTED


def _cut_lines() -> list[bytes]:
    """Write what a rank prints in two steps: `loading a` and, later, `done a`."""
    texts = [("O", "loading a "), ("o", "done a"), ("O", "loading b "), ("o", "done b")]
    return [raw(T0 + i, 1, stream, text) for i, (stream, text) in enumerate(texts)]


def _shown(query: Query, paths: RunPaths) -> list[tuple[str, bool]]:
    found = list(merge_sources(choose_sources(paths, 1, query)))
    assert list(newest(choose_sources(paths, 1, query), 9)) == found
    return [(line.text.decode(), line.partial) for line in found]


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        (
            Query(include=(re.compile(b"loading"),)),
            [("loading a …", False), ("loading b …", False)],
        ),
        (Query(exclude=(re.compile(b"loading"),)), [("done a", False), ("done b", False)]),
    ],
)
def test_pieces_of_cut_lines_that_are_chosen_by_their_text_are_lines_of_their_own(
    tmp_path: Path, query: Query, shown: list[tuple[str, bool]]
) -> None:
    paths = RunPaths(root=tmp_path)
    write_log(paths, 1, "n1", _cut_lines())
    assert _shown(query, paths) == shown


LONG = "ValueError: " + "x" * 6000 + " because of y"


@pytest.fixture
def long_error(run: LoggedRun) -> LoggedRun:
    """A line that is longer in the log than what the side file has of it."""
    run.say("n2", 9, 3, "e", LONG, "exception")
    place = len(b"".join(run.logs["n2"][:-1]))
    run.sides["n2"][-1] = raw(T0 + 9, 3, "e", f"exception+ {place} {LONG[:SIDE_TEXT_BYTES]}")
    return run


@pytest.mark.parametrize("query", [ERRORS, OVERVIEW])
def test_a_long_error_line_is_given_whole(long_error: LoggedRun, query: Query) -> None:
    long_error.write()
    assert long_error.read(query)[-1] == LONG


@pytest.mark.parametrize("content", [b"", b"damaged\n" * 2000])
def test_a_long_error_line_that_the_log_lacks_ends_with_a_mark(
    long_error: LoggedRun, content: bytes
) -> None:
    long_error.write().log(1, "n2").write_bytes(content)
    assert long_error.read(ERRORS)[-1] == LONG[:SIDE_TEXT_BYTES] + "…"


@pytest.mark.parametrize("query", [ERRORS, OVERVIEW])
def test_long_error_lines_are_read_as_the_agent_wrote_them(tmp_path: Path, query: Query) -> None:
    paths = RunPaths(root=tmp_path)
    paths.attempt(1).mkdir(parents=True)
    file = AgentLog(log=paths.log(1, "n1"), errors=paths.log_errors(1, "n1"))
    texts = [LONG + "\n", "KeyError: " + "y" * 3000, "y" * 3000 + "\n", "OSError: z\n"]
    for i, text in enumerate(texts):
        file.add(Piece(text.encode(), is_cut=not text.endswith("\n")), T0 + i, "1", "e")
    file.flush()
    assert _shown(query, paths) == [(LONG, False), (texts[1] + "…", False), ("OSError: z", False)]


def test_output_that_nobody_stamped_is_searched_too(tmp_path: Path) -> None:
    path = tmp_path / "slurm-1.out"
    path.write_bytes(b"step 1\nValueError: no\n")
    file = LogFile(node="n1", path=path, kind=FileKind.PLAIN)

    def read(query: Query) -> list[str]:
        return texts(merge_sources(sources_of([file], query)))

    assert read(EVERYTHING) == ["step 1", "ValueError: no"]
    assert read(Query(include=(re.compile(rb"Err"),))) == ["ValueError: no"]
    assert read(Query(ranks=frozenset({3}))) == []


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


# Finding log files and reading stretches of them


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(root=tmp_path)
    for node in ("n10", "n2", "n\udcff"):
        write_log(paths, 1, node, [b"x\n"])
    for node in ("n10", "n\udcff"):
        paths.log_errors(1, node).unlink()
    paths.nccl_log(1, "n2").parent.mkdir()
    return paths


def test_logs_are_found_in_the_order_people_count_in(paths: RunPaths) -> None:
    assert [file.node for file in find_files(paths, 1)] == ["n2", "n10", "n\udcff", "n2"]
    assert [file.node for file in find_files(paths, 1, frozenset({"n10", "n7"}))] == ["n10"]
    assert find_files(paths, 2) == []


def test_each_file_says_what_it_holds(paths: RunPaths) -> None:
    amend_attempt(paths, 1, nodes=("n2", "n10"), procs_per_node=4)
    _, log, unknown, side = find_files(paths, 1)
    assert (log.kind, log.ranks) == (FileKind.LOG, range(4, 8))
    assert (side.kind, side.ranks, side.path) == (
        FileKind.ERRORS,
        range(4),
        paths.log_errors(1, "n2"),
    )
    assert unknown.ranks is None


def test_a_directory_that_cannot_be_read_is_named(paths: RunPaths) -> None:
    paths.logs_dir.joinpath("a2").write_bytes(b"")
    with pytest.raises(ClusterrunError) as caught:
        find_files(paths, 2)
    assert caught.value.message == f"cannot read {paths.logs_dir / 'a2'}"


def test_descriptors_are_kept_and_given_back(paths: RunPaths) -> None:
    path = paths.log(1, "n2")
    before = len(os.listdir("/proc/self/fd"))
    with OpenFiles() as files:
        assert files.read(path, 0, 9) == b"x\n"
        path.unlink()
        assert files.read(path, 1, 9) == b"\n"
        assert files.read(path, 2, 9) == b""
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
