"""A request to show where the ranks are, and its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.cli.diagnose import _look_lines
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.request import answer_path, requests
from clusterrun.shared.files import read_json
from clusterrun.verbs import hangs


def test_an_answer_is_not_looked_up_before_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS would remember for a minute that it is missing."""
    pauses = []

    def read(path: Path) -> object:
        assert path.exists()
        return read_json(path)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        (request,) = requests(tmp_path)
        if len(pauses) == 3:
            answer_path(request).write_text('{"silent": ["n2"]}')

    monkeypatch.setattr(hangs, "read_json", read)
    monkeypatch.setattr(hangs.time, "sleep", sleep)
    assert hangs._ask(tmp_path, with_dumps=True) == {"silent": ["n2"]}
    assert not list(tmp_path.iterdir())


def test_without_dumps_nothing_is_known_of_waits() -> None:
    nothing, one = (hangs.Hang(nodes={0: "n1", 1: "n2"}, dumped=number) for number in (0, 1))
    missing = "left no dump: torch records none, or hangs"
    assert list(_look_lines(nothing)) == [f"FR      2 ranks {missing}"]
    assert list(_look_lines(one)) == [
        "FR      no rank has waited in a collective for 10 s",
        f"        1 rank {missing}",
    ]


def test_agents_that_do_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "ANSWER_S", 0.05)
    with pytest.raises(ClusterrunError, match="did not answer"):
        hangs._ask(tmp_path, with_dumps=False)
    assert not list(tmp_path.iterdir())
