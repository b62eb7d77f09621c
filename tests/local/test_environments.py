"""A real virtual environment that `setup` names: its Python runs the agents and the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.road import LIGHT, ROOT, project

pytestmark = pytest.mark.agents


def test_the_nodes_run_in_the_virtual_environment_that_setup_names(tmp_path: Path) -> None:
    here = project(tmp_path / "project", tmp_path / "state")
    venv = tmp_path / "my venv"
    submit = ("submit", "--cluster", "local", "--nodes", "2", "--wait", *LIGHT)
    (here.path / "where.py").write_text("import os, sys\nprint(sys.prefix, os.environ['EXTRA'])\n")
    argv = ("--setup", f"venv: {venv}", "--setup", "export EXTRA=1", "where.py", "--data", "/no/x")
    refused = here.cli(*submit, *argv)
    assert refused.returncode == 2
    assert f"{venv} is not a virtual environment: it has no bin/activate" in refused.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python3*/site-packages")
    ours = [ROOT, *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    done = here.cli(*submit, *argv)
    assert done.returncode == 0, done.stderr
    assert "has no clusterrun" not in done.stderr  # it was asked
    assert "note: --data: /no/x does not exist here" in done.stderr
    assert here.logs(here.json("status")["job_id"]).count(f"{venv} 1") == 2
