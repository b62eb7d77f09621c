"""The node-local directory: whose is cleared, and whose is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterrun.node.forward.spool import KEPT_S, EventReader, Spool, create_spool


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def spool_of_a_process_that_ended(base: Path) -> Path:
    program = f"""
import tempfile; tempfile.tempdir = {str(base)!r}
from clusterrun.node.forward.spool import create_spool; print(create_spool("4711", 1, 1).root)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return Path(done.stdout.strip())


def test_what_a_killed_agent_left_is_cleared(tmp_path: Path) -> None:
    left = spool_of_a_process_that_ended(tmp_path)
    assert left.is_dir()
    first = create_spool("4712", 1, 0).root
    create_spool("4712", 1, 1)
    assert not left.exists()
    assert first.is_dir()


def test_another_nodes_spool_stays_where_nodes_share_the_directory(tmp_path: Path) -> None:
    left = spool_of_a_process_that_ended(tmp_path)
    prefix, _, pid, rest = left.name.split("-", 3)
    elsewhere = left.rename(tmp_path / f"{prefix}-00000000-{pid}-{rest}")  # that pid lives there
    create_spool("4712", 1, 0)
    assert elsewhere.is_dir()


def test_what_was_kept_stays_for_a_week(tmp_path: Path) -> None:
    kept = Spool(root=spool_of_a_process_that_ended(tmp_path)).keep()
    (kept / "rank_0.out").write_text("not written")
    create_spool("4712", 1, 0)
    assert (kept / "rank_0.out").read_text() == "not written"
    week_ago = time.time() - KEPT_S - 60
    os.utime(kept, (week_ago, week_ago))
    create_spool("4713", 1, 0)
    assert not kept.exists()


@pytest.mark.parametrize("ts", ["soon", None, [1], float("nan"), 10**400, True])
def test_every_event_has_a_time_and_a_type(tmp_path: Path, ts: object) -> None:
    path = tmp_path / "rank_0.events"
    path.write_text(json.dumps({"ts": ts, "type": ["odd"]}) + "\n[1]\n" + "[" * 100_000 + "\n")
    [event] = EventReader(path).read()
    assert isinstance(event["ts"], float)
    assert event["type"] == "['odd']"
