"""What stands around a job: modules of the project, and the job that a rank was started by."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.patience import finished
from tests.road import Project

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

CLUSTERRUN = Path(sys.executable).with_name("clusterrun")  # `python -m` would look around first
LOCAL = (
    *("submit", "--wait", "--cluster", "local", "--device", "cpu"),
    *("--set", "launch.world_contract=false"),
)
TWO_NODES = (*LOCAL, "--nodes", "2", "--gpus-per-node", "1")
SHOW = """
import json, os, sys
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(dict(os.environ), file)
"""
NEXT_STAGE = """
import os, subprocess, sys
os.environ["OWN_CHOICE"] = "7"
os.environ["TRITON_CACHE_DIR"] = "/the/scripts/own"
subprocess.run(sys.argv[1:], check=True)
"""
# Of the job, the process or the place on the network: different in any two jobs.
OWN = {
    *("CLUSTERRUN_LAUNCHER_PID", "CLUSTERRUN_LOCAL_JOB_ID"),
    "CLUSTERRUN_STORE_PORT",
    *("CLUSTERRUN_JOB_ID", "CLUSTERRUN_RUN_DIR", "CLUSTERRUN_CHECKPOINT_DIR", "CLUSTERRUN_SPOOL"),
    *("CLUSTERRUN_STARTED", "CLUSTERRUN_GIVEN", "MASTER_PORT", "NCCL_DEBUG_FILE", "PET_RDZV_ID"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHINDUCTOR_CACHE_DIR", "TORCH_FR_DUMP_TEMP_FILE"),
    *("TRITON_CACHE_DIR", "TORCHELASTIC_RUN_ID"),
}


def run(here: Project, *argv: str) -> None:
    done = finished([CLUSTERRUN, *argv], timeout_s=240, cwd=here.path, env=here.environ)
    assert done.returncode == 0, done.stderr + done.stdout


def shown(here: Project, name: str) -> dict[str, str]:
    return dict(json.loads((here.path / name).read_text()))


def test_a_job_submitted_from_inside_a_rank_starts_as_from_a_fresh_shell(here: Project) -> None:
    (here.path / "show.py").write_text(SHOW)
    (here.path / "next_stage.py").write_text(NEXT_STAGE)
    run(here, *TWO_NODES, "show.py", "fresh.json")
    changes = (
        *("--env", "NCCL_NET=Socket", "--env", "PYTHONHASHSEED=1"),
        *("--set", "launch.threads_per_process=1"),
    )
    setup = ("--set", 'launch.setup=["export PATH=/nowhere:$PATH MODULES=cuda"]')
    child = (str(CLUSTERRUN), *TWO_NODES, "show.py", "inner.json")
    run(here, *LOCAL, "--gpus-per-node", "1", *changes, *setup, "next_stage.py", *child)
    fresh, inner = shown(here, "fresh.json"), shown(here, "inner.json")
    assert inner.pop("OWN_CHOICE") == "7"
    assert inner["TRITON_CACHE_DIR"] == "/the/scripts/own"
    assert inner.keys() == fresh.keys()
    differing = {name for name in fresh if fresh[name] != inner[name]}
    assert differing <= OWN
    assert not [name for name, value in inner.items() if str(here.run_dir("L2")) in value]


def test_modules_of_the_project_do_not_replace_the_standard_librarys(here: Project) -> None:
    (here.path / "src").mkdir()
    (here.path / "src" / "train.py").write_text("import logging, secrets; print(secrets.token_hex)")
    for name in ("secrets", "platform", "statistics", "types", "typing_extensions"):
        (here.path / f"{name}.py").write_text(f"raise ImportError('the project has {name}.py')")
    (here.path / "logging").mkdir()
    (here.path / "logging" / "__init__.py").touch()
    run(here, *TWO_NODES, "src/train.py")
