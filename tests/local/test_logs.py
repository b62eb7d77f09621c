"""What `logs` gives of ranks on simulated nodes is what they wrote."""

from __future__ import annotations

import pytest

from tests.patience import wait_for
from tests.road import LIGHT, Project
from tests.scripts import chatter

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

TWO = ("--cluster", "local", "--nodes", "2", *LIGHT)


def test_a_burst_of_many_lines_is_followed_whole_and_in_order(here: Project) -> None:
    amount = 100_000
    job_id = here.submit(*TWO, "--gpus-per-node", "1", "chatter.py", "burst", str(amount))
    watcher = here.start("logs", job_id, "-f", "-a", "-n", "all", "-o", "raw")
    try:
        wait_for(lambda: len(here.events_of(job_id, "rank_start")) == 2, "both ranks")
        (here.path / "go").touch()
        for rank in range(2):
            wait_for((here.path / "said" / f"1-{rank}.done").exists, f"the burst of rank {rank}")
        (here.path / "leave").touch()
        assert watcher.end(120) == 0, watcher.err
    finally:
        watcher.process.kill()
        here.cli("cancel", job_id)
    assert "COMPLETED" in watcher.err
    for rank in range(2):
        mine = [text for text in watcher.out.splitlines(keepends=True) if chatter.is_of(text, rank)]
        expected = b"".join(chatter.burst(rank, amount))
        assert chatter.difference(b"".join(mine), expected) == "", rank


@pytest.mark.long
def test_a_cap_on_lines_counts_what_it_leaves_out(here: Project) -> None:
    cap = ("--set", "logs.max_lines_per_s=50")
    argv = (*TWO, "--nodes", "1", "--gpus-per-node", "1", *cap, "chatter.py", "lines", "1000")
    done = here.cli("submit", "--wait", *argv)
    assert done.returncode == 0, done.stderr
    told = here.json_lines("logs", "L1", "--rank", "0", "-n", "all")
    texts = [entry["text"] for entry in told if entry["type"] == "line"]
    lost = sum(entry["bytes"] for entry in told if entry["type"] == "gap")
    assert 50 <= len(texts) < 2000
    kept = here.raw_logs("L1", "--rank", "0")
    written = [text for stream in ("out", "err") for text in chatter.lines(0, stream, 1000)]
    assert len(kept) + lost == sum(map(len, written))
