"""Every command of the README runs as it stands, from a fresh copy of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.config.load import load_spec
from tests.checkout import EXAMPLES, copy_listed
from tests.patience import patience
from tests.readme import ROOT, blocks, run, tour

START = "docs/getting-started.md"


@pytest.mark.torch
def test_the_tour_on_this_machine(tmp_path: Path) -> None:
    out = run(tour("local"), tmp_path)
    assert "Submitted batch job L1" in out
    assert "held-out loss" in out
    assert "COMPLETED" in out
    assert "llama-3.1-8b" in out


@pytest.mark.torch
@pytest.mark.parametrize("steps", [5, pytest.param(150, marks=pytest.mark.long)])
def test_the_demo_trains_on_a_machine_without_slurm(tmp_path: Path, steps: int) -> None:
    """`make demo`, shorter first, with the environment of the tests instead of a new one."""
    copy_listed(EXAMPLES, tmp_path / "examples")
    recipes = (ROOT / "Makefile").read_text()
    assert "--max-steps 150" in recipes
    (tmp_path / "Makefile").write_text(recipes.replace("--max-steps 150", f"--max-steps {steps}"))
    venv = Path(sys.executable).parents[1]
    done = subprocess.run(
        ["make", "-o", f"{venv}/.train", f"VENV={venv}", "demo"],
        cwd=tmp_path, env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=200 * patience(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"step {steps}/{steps}" in done.stdout
    assert "held-out loss" in done.stdout
    assert "rank 0/4 on local0" in done.stdout


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    (text,) = blocks("config")
    (tmp_path / "clusterrun.yaml").write_text(text)
    resolved = load_spec({}, environ={}, cwd=tmp_path)
    assert resolved.spec.partition == "gpu"
    assert resolved.spec.time_minutes == 24 * 60
    assert resolved.notes == ()


def test_the_python_lines_run_outside_a_run() -> None:
    for kind, start in (("runtime", "None\n"), ("api", "#!/bin/bash\n")):
        (text,) = blocks(kind, START)
        argv = [sys.executable, "-c", text]
        done = subprocess.run(argv, cwd=ROOT / "examples", capture_output=True, text=True)
        assert (done.returncode, done.stdout[: len(start)]) == (0, start), done.stderr


def test_the_lines_about_a_handle_run(tmp_path: Path) -> None:
    (text,) = blocks("handle", START)
    (tmp_path / "clusterrun.yaml").write_text("script: train_lm.py\n")
    (tmp_path / "train_lm.py").write_text("")
    (tmp_path / "templates").mkdir()
    write = 'mkdir -p "$1/logs/a1"; echo "1700000000000100 0 o trained" > "$1/logs/a1/n0.log"'
    (tmp_path / "templates/node.sh.j2").write_text(f"#!/bin/bash\n{write}\n")
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    argv = [sys.executable, "-c", text]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "L1 COMPLETED 0\ntrained\n"
