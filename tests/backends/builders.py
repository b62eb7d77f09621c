"""Plans, bundles and runs for the tests of backends, without rendering."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from clusterrun.config.choices import Device
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir import create
from clusterrun.rundir.paths import RunPaths, RunsDir
from tests.launch.samples import here, local_facts

SUBMIT_SUCCESSOR = """
import os, sys
from pathlib import Path
from clusterrun.backends.slurm.backend import submit_successor
from clusterrun.errors import ClusterrunError, describe
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
root, *nodes = sys.argv[1:]
try:
    plan = read_plan(RunPaths(root=Path(root)))
    print(submit_successor(Path(root), plan, nodes, os.environ))
except ClusterrunError as error:
    sys.exit(describe(error))
"""


def make_plan(root: Path, **changes: Any) -> Plan:
    """Make a plan for two nodes of one process on CPUs, changed as asked."""
    facts = local_facts(python=sys.executable, workdir=str(root), runs_dir=str(root / "runs"))
    plan = here(facts, name="demo", nodes=2, nproc_per_node=1, device=Device.CPU)
    usual = {"env": (), "setup": (), "rendezvous_timeout_s": 60, "log_spool_bytes": 1 << 30}
    return dataclasses.replace(plan, **{**usual, **changes})


def make_bundle(plan: Plan, node_sh: str = "exit 0\n", sbatch: str = "#!/bin/bash\n") -> Bundle:
    return Bundle(files={"job.sbatch": sbatch, "node.sh": node_sh, "plan.json": plan.to_json()})


def make_run(root: Path, plan: Plan, bundle: Bundle) -> RunPaths:
    run_id = create.new_run_id(datetime.now(), random.Random())
    return create.create_run(RunsDir(root=root / "runs"), plan.name, run_id, bundle)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill what a test left; some of it may be gone by now."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
