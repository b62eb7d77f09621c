"""Hydra's launcher: one run for each combination of a multirun, on simulated nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun import find_job
from tests.patience import finished
from tests.readme import ROOT, blocks
from tests.road import STUB, Project, a_project  # noqa: F401

pytestmark = [pytest.mark.agents, pytest.mark.timeout(240)]

PAGE = "docs/reference/python.md"
MULTIRUN = "python train.py -m hydra/launcher=clusterrun"
SCRIPT = """
import pathlib, time, hydra
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    job = hydra.core.hydra_config.HydraConfig.get()
    print(cfg.lr, job.job.num, job.runtime.output_dir, flush=True)
    if cfg.lr > 1:
        raise ValueError("lr is too high")
    return cfg.lr * 2
main()
"""
LIGHT = "{cluster: local, launch: {device: cpu, world_contract: false}, env: {PYTHONPATH: 'PATHS'}}"


@pytest.fixture(name="project")
def _project(here: Project) -> Project:
    for name in ("conf", "bin"):
        (here.path / name).mkdir()
    (here.path / "train.py").write_text(SCRIPT)
    (here.path / "clusterrun.yaml").write_text(LIGHT.replace("PATHS", f"{STUB}:{ROOT}"))
    (here.path / "conf/config.yaml").write_text("lr: 1\n")
    here.extra["PATH"] = f"{here.path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return here


def bash(here: Project, command: str) -> subprocess.CompletedProcess[str]:
    return finished(["bash", "-c", command], 240, **here.here)


def test_the_launcher_returns_before_its_runs_end_or_waits(project: Project) -> None:
    at_once, waiting = blocks("hydra", PAGE)[0].splitlines()
    done = bash(project, at_once)
    assert "job L1, train-0\n" in done.stdout
    (project.path / "go").touch()  # before, no rank can end
    for number, lr in enumerate(("0.1", "0.01")):
        project.ok("status", f"L{number + 1}", "--wait", "--exit-status")
        (place,) = project.path.glob(f"multirun/*/*/{number}")
        assert (place / ".hydra/overrides.yaml").read_text() == f"- lr={lr}\n"
        assert f"{lr} {number} {place}\n" in project.logs(f"L{number + 1}")
    assert bash(project, waiting).returncode == 0
    assert project.json("status", "L4")["state"] == "COMPLETED"
    assert len(project.events_of("L4", "hydra_returned")) == 1  # rank 0 of two


def test_a_launcher_that_waits_gets_numbers_and_errors(project: Project) -> None:
    from hydra_plugins.clusterrun_launcher import _returned

    (project.path / "go").touch()
    (project.path / "conf/config.yaml").write_text(blocks("hydraconfig", PAGE)[0])
    words = "hydra.sweep.dir=out hydra.launcher.wait=true hydra.job.env_copy=[HUE] lr=0.2,2 nodes=2"
    subdir = r"""hydra.sweep.subdir="'"'${hydra:job.override_dirname}, a'"'" """
    done = bash(project, f"HUE=red python train.py -m {subdir} {words}")
    error = "['lr=2', 'nodes=2']\njob L2 is FAILED: ValueError: lr is too high\nhint: read its logs"
    assert done.stderr.startswith(f"Error executing job with overrides: {error}")
    assert (project.path / "out/lr=0.2,nodes=2, a/.hydra").is_dir()
    job = find_job(str(project.run_dir("L1")))
    assert (job.record.nodes, _returned((), job, True).return_value) == (2, 0.4)
    assert "HUE" in (job.run_dir / "plan.json").read_text()


def test_a_wrong_setting_and_a_refused_job_are_a_line_with_hints(project: Project) -> None:
    done = bash(project, f"{MULTIRUN} lr=1,2 hydra.launcher.settings.slurm.nodez=2")
    assert done.stderr.startswith("unknown key 'slurm.nodez'\nhint: use 'slurm.nodes'\n")
    assert not (project.path / "runs").exists()
    refuse = "[ -e once ] && echo 'sbatch: error: no' >&2 && exit 1; touch once; echo 7"
    for name, text in {"sbatch": refuse, "srun": "", "sinfo": ""}.items():
        (project.path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (project.path / "bin" / name).chmod(0o755)
    done = bash(project, f"{MULTIRUN} lr=1,2 hydra.launcher.settings.cluster=slurm")
    assert "hint: end the jobs that are submitted: clusterrun cancel 7\n" in done.stderr
    assert "Traceback" not in done.stderr
