"""The node-local directory: whose is cleared, and whose is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.node.spool import create_spool


@pytest.fixture(autouse=True)
def _base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def spool_of_a_process_that_ended(base: Path) -> Path:
    program = f"""
import tempfile; tempfile.tempdir = {str(base)!r}
from clusterrun.node.spool import create_spool; print(create_spool("4711", 1, 1).root)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return Path(done.stdout.strip())


def test_what_a_killed_agent_left_is_cleared(tmp_path: Path) -> None:
    left = spool_of_a_process_that_ended(tmp_path)
    assert left.is_dir()
    assert create_spool("4712", 1, 0).root.is_dir()
    assert not left.exists()


def test_what_an_agent_that_lives_uses_stays() -> None:
    first = create_spool("4711", 1, 0)
    create_spool("4711", 1, 1)
    assert first.root.is_dir()


def test_another_nodes_spool_stays_where_nodes_share_the_directory(tmp_path: Path) -> None:
    left = spool_of_a_process_that_ended(tmp_path)
    prefix, _, pid, rest = left.name.split("-", 3)
    elsewhere = left.rename(tmp_path / f"{prefix}-00000000-{pid}-{rest}")  # that pid lives there
    create_spool("4712", 1, 0)
    assert elsewhere.is_dir()
