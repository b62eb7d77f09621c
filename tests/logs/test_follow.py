"""Following files that grow, shrink, appear late and start again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logs.follow import REORDER_US, Entry, Joined, NewAttempt, Pause, follow
from clusterrun.logs.sources import OVERVIEW, Catalogue, find_files
from clusterrun.rundir.paths import RunPaths
from tests.logs.corpus import T0, everything, raw, texts, write_log


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(root=tmp_path)


def files_of(paths: RunPaths) -> Catalogue:
    return Catalogue(paths.attempts, lambda attempt: find_files(paths, attempt))


class Script:
    """Happens step by step, one at each pause of the follower; the job ends with the last."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.steps = list(steps)

    def sleep(self, _seconds: float) -> None:
        self.steps.pop(0)()

    def ended(self) -> bool:
        return not self.steps

    def follow(self, paths: RunPaths, **asked: Any) -> Iterator[Entry]:
        return follow(files_of(paths), ended=self.ended, sleep=self.sleep, **asked)


def followed(paths: RunPaths, script: Script, **asked: Any) -> list[str]:
    entries = script.follow(paths, is_chosen="attempt" in asked, **asked)
    return [_told(entry) for entry in entries if not isinstance(entry, Pause | Joined)]


def _told(entry: Entry) -> str:
    if isinstance(entry, NewAttempt):
        return f"== attempt {entry.attempt} =="
    assert isinstance(entry, LogLine)
    return ("- " if entry.stream is Stream.END else "") + entry.text.decode()


def test_what_is_there_comes_first_then_what_is_written(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0 + i, 0, "o", f"old {i}") for i in range(5)])
    script = Script(
        lambda: write_log(paths, 1, "n1", [raw(T0 + 10, 0, "o", "new")]),
        lambda: None,
        lambda: write_log(paths, 1, "n1", [raw(T0 + 11, 0, "o", "last")]),
    )
    assert followed(paths, script, tail=2) == ["old 3", "old 4", "new", "last"]


def test_a_line_is_given_when_it_is_whole(paths: RunPaths) -> None:
    whole = raw(T0, 0, "o", "one line")
    seen: list[list[str]] = []
    shown: list[str] = []
    script = Script(
        lambda: write_log(paths, 1, "n1", [whole[:9]]),
        lambda: (seen.append(list(shown)), write_log(paths, 1, "n1", [whole[9:20]])),
        lambda: (seen.append(list(shown)), write_log(paths, 1, "n1", [whole[20:]])),
        lambda: seen.append(list(shown)),
    )
    for entry in script.follow(paths):
        shown += texts([entry])
    assert seen == [[], [], ["one line"]]


def test_a_line_that_was_torn_when_following_began_is_given_once(paths: RunPaths) -> None:
    whole = raw(T0, 0, "o", "half and half")
    write_log(paths, 1, "n1", [raw(T0, 0, "o", "before"), whole[:24]])
    script = Script(lambda: write_log(paths, 1, "n1", [whole[24:]]))
    assert followed(paths, script, tail=10) == ["before", "half and half"]


def test_a_truncated_file_is_read_from_its_beginning_and_one_that_goes_away_ends_nothing(
    paths: RunPaths,
) -> None:
    path = write_log(paths, 1, "n1", [raw(T0, 0, "o", "before"), raw(T0, 0, "o", "before 2")])

    def truncate() -> None:
        os.truncate(path, 0)
        write_log(paths, 1, "n1", [raw(T0 + 1, 0, "o", "after")])

    script = Script(
        truncate,
        lambda: write_log(paths, 1, "n1", [raw(T0 + 2, 0, "o", "more")]),
        path.unlink,
        lambda: write_log(paths, 1, "n2", [raw(T0 + 3, 0, "o", "b")]),
    )
    assert followed(paths, script) == ["before", "before 2", "after", "more", "b"]


def test_the_next_attempt_is_announced_and_followed(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0, 0, "o", "first")])

    def again() -> None:
        write_log(paths, 1, "n1", [raw(T0 + 1, 0, "o", "end of the first")])
        write_log(paths, 2, "n3", [raw(T0 + 2, 0, "o", "second")])

    script = Script(
        again,
        lambda: write_log(paths, 2, "n3", [raw(T0 + 3, 0, "o", "goes on")]),
        lambda: write_log(paths, 4, "n4", [raw(T0 + 4, 0, "o", "fourth")]),
    )
    assert followed(paths, script) == [
        *("first", "end of the first", "== attempt 2 ==", "second", "goes on"),
        *("== attempt 4 ==", "fourth"),
    ]


def test_a_chosen_attempt_is_followed_until_the_next_one_starts(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0, 0, "o", "first")])
    script = Script(
        lambda: write_log(paths, 1, "n1", [raw(T0, 0, "o", "more")]),
        lambda: write_log(paths, 2, "n1", [raw(T0, 0, "o", "second")]),
        lambda: pytest.fail("attempt 1 cannot go on"),
    )
    assert followed(paths, script, attempt=1) == ["first", "more"]


def test_a_pending_job_is_waited_for(paths: RunPaths) -> None:
    script = Script(lambda: None, lambda: write_log(paths, 1, "n1", [raw(T0, 0, "o", "started")]))
    assert followed(paths, script, tail=5) == ["== attempt 1 ==", "started"]


def test_an_overview_reads_the_errors_of_others_from_their_side_files(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0, 0, "o", "0"), raw(T0, 1, "o", "1")])

    def fail() -> None:
        write_log(paths, 1, "n1", [raw(T0 + 1, 0, "o", "00"), raw(T0 + 2, 1, "e", "OSError: x")])
        write_log(paths, 1, "n2", [raw(T0 + 1, 2, "o", "2"), raw(T0 + 3, 2, "e", "OSError: y")])

    shown = followed(paths, Script(fail, lambda: None), query=OVERVIEW, tail=9)
    assert shown == ["0", "00", "OSError: x", "OSError: y"]


def test_the_end_of_a_nodes_log_is_told(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0, 0, "o", "a"), raw(T0 + 1, None, "z", "3 rank 0 failed")])
    assert followed(paths, Script()) == ["a", "- 3 rank 0 failed"]
    assert followed(paths, Script(), tail=1) == ["a"]  # it was over when following began


def test_a_line_that_comes_a_moment_late_is_put_in_its_place(paths: RunPaths) -> None:
    write_log(paths, 1, "n1", [raw(T0, 0, "o", "a")])
    write_log(paths, 1, "n2", [raw(T0, 1, "o", "b")])
    soon = T0 + REORDER_US * 10
    script = Script(
        lambda: write_log(paths, 1, "n1", [raw(soon + 9, 0, "o", "later")]),
        lambda: write_log(paths, 1, "n2", [raw(soon, 1, "o", "earlier")]),
        lambda: None,
    )
    assert followed(paths, script) == ["a", "b", "earlier", "later"]


def test_a_busy_writer_loses_no_line_and_gets_none_twice(paths: RunPaths) -> None:
    count, over = 4_000, threading.Event()

    def write(node: str) -> None:
        path = write_log(paths, 1, node, [])
        for i in range(count):
            content = raw(T0 + i, 0, "o", f"{node} {i}")
            with path.open("ab", buffering=0) as file:
                file.write(content[:7])  # a reader may see any half
                file.write(content[7:])

    writers = [threading.Thread(target=write, args=(f"n{n}",)) for n in range(2)]
    for writer in writers:
        writer.start()

    def ended() -> bool:
        if not any(writer.is_alive() for writer in writers):
            over.set()
        return over.is_set()

    got = texts(follow(files_of(paths), ended=ended, sleep=lambda _: time.sleep(0.001)))
    for node in ("n0", "n1"):
        assert [g for g in got if g.startswith(node)] == [f"{node} {i}" for i in range(count)]
    assert sorted(texts(everything(paths))) == sorted(got)
