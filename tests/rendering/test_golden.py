"""Whole files, reviewed like code; a missing golden file is a failure."""

from __future__ import annotations

import subprocess

import pytest

from tests.patience import patience
from tests.rendering.golden_cases import GOLDEN, SCRIPTS, bundle_of, golden_files


def test_the_files_are_as_they_were_reviewed() -> None:
    files = {path: path.read_text() for path in GOLDEN.rglob("*") if path.is_file()}
    assert golden_files() == files


@pytest.mark.parametrize("case", SCRIPTS)
@pytest.mark.parametrize("name", ["job.sbatch", "node.sh", "env.sh"])
def test_bash_reads_the_script_without_a_word(case: str, name: str) -> None:
    text = bundle_of(case).files[name]
    done = subprocess.run(
        ["bash", "-n"],
        input=text,
        capture_output=True,
        text=True,
        timeout=30 * patience(),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
