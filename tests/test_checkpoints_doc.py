"""The scripts of docs/checkpoints.md run as they stand, and a second time go on from the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.shared import checkpoint_files
from tests.patience import patience
from tests.readme import BLOCK

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    name: text for name, _, text in BLOCK.findall((ROOT / "docs/checkpoints.md").read_text())
}


def test_every_script_has_a_name() -> None:
    assert (ROOT / "docs/checkpoints.md").read_text().count("```python") == len(SCRIPTS) == 3


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "trainer" else ())
        for name in SCRIPTS  # tests/rank/test_hf.py has the Trainer too
    ],
)
def test_a_script_saves_and_goes_on_from_what_it_saved(tmp_path: Path, name: str) -> None:
    own = tmp_path / "own"
    run(SCRIPTS[name], tmp_path, own)
    assert [step for step, _ in checkpoint_files.listed(own)] == [40, 20]
    newest, older = (checkpoint_files.read(path).path for _, path in checkpoint_files.listed(own))
    (newest / ".complete").unlink()
    marked = (older / ".complete").read_bytes()
    said = run(SCRIPTS[name], tmp_path, own)
    assert f"checkpoint {newest.name} is incomplete and was skipped" in said
    assert (newest / ".complete").exists()
    assert (older / ".complete").read_bytes() == marked, "it began anew"


def run(script: str, cwd: Path, own: Path) -> str:
    environ = {**os.environ, "CLUSTERRUN_CHECKPOINT_DIR": str(own), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200 * patience(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
