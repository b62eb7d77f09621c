"""Looking at a project of somebody else runs none of its code on the login node."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine

LOOKS = ("render", "submit --dry-run", "config validate")
PROJECTS = (  # the configuration, and options
    ("launch: {python: ./evilenv/bin/python}", ""),
    ("launch: {setup: [{conda: ./evilenv}]}", ""),
    ("launch: {setup: [{conda: ./evilenv}]}", "--setup export --python python"),
    ("env: {PYTHONPATH: HERE/lib}", ""),
    ("env: {PYTHONPATH: HERE/lib}", "--python ./mine"),
)


@pytest.fixture(name="ran")
def _ran(here: CommandLine) -> Path:
    """Make a project whose interpreter and modules write the file that is returned."""
    marker = here.path.parent / "ran"
    python = here.path / "evilenv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho python >> {marker}\n")
    python.chmod(0o755)
    (here.path / "evilenv/lib/python3.99/site-packages").mkdir(parents=True)
    (here.path / "evilenv/conda-meta").mkdir()
    for name in ("json", "sitecustomize", "lib/sitecustomize", "lib/json"):
        (here.path / "lib").mkdir(exist_ok=True)
        text = f"open({str(marker)!r}, 'a').write({name!r})\n"
        (here.path / f"{name}.py").write_text(text)
    here.slurm()
    return marker


def test_no_code_of_the_project_runs(here: CommandLine, ran: Path) -> None:
    (here.path / "mine").symlink_to(sys.executable)
    for command, (config, options) in itertools.product(LOOKS, PROJECTS):
        text = f"script: train.py\n{config.replace('HERE', str(here.path))}\n"
        (here.path / "clusterrun.yaml").write_text(text)
        words = options.split() if not command.startswith("config") else []
        assert "Traceback" not in here(*command.split(), *words).err
        assert not ran.exists(), (command, config, options, ran.read_text())


def test_the_users_own_choice_runs(here: CommandLine, ran: Path) -> None:
    here("render", "--python", "./evilenv/bin/python", "train.py")
    assert ran.read_text().startswith("python")
    ran.unlink()
    subprocess.run([sys.executable, "-c", "import json"], cwd=here.path, check=True)
    assert ran.read_text() == "json"


def test_submit_refuses_no_environment_whose_own_code_may_add_packages(
    here: CommandLine, ran: Path
) -> None:
    text = "script: train.py\nlaunch: {setup: [{conda: ./evilenv}]}\n"
    (here.path / "clusterrun.yaml").write_text(text)
    said = here("submit", "--dry-run")
    assert (said.code, "has no clusterrun, torch or accelerate" in said.err) == (2, True), said
    pth = here.path / "evilenv/lib/python3.99/site-packages/shared.pth"
    pth.write_text("import site; site.addsitedir('/shared/pkgs')\n")
    said = here("submit", "--dry-run")
    assert said.code != 2
    assert "has no clusterrun" not in said.err
    assert "note: the nodes run python from the environment that setup activates" in said.err
    assert not ran.exists()
