"""Whole files, reviewed like code; a missing golden file is a failure."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.rendering.golden_cases import GOLDEN, SCRIPTS, bundle_of, golden_files

FILES = dict(sorted(golden_files().items()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(GOLDEN)))
def test_the_file_is_as_it_was_reviewed(path: Path) -> None:
    assert FILES[path] == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path for path in GOLDEN.rglob("*") if path.is_file()} == set(FILES)


@pytest.mark.parametrize("case", SCRIPTS)
@pytest.mark.parametrize("name", ["job.sbatch", "node.sh", "env.sh"])
def test_bash_reads_the_script_without_a_word(case: str, name: str) -> None:
    text = bundle_of(case).files[name]
    done = subprocess.run(
        ["bash", "-n"],
        input=text,
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
