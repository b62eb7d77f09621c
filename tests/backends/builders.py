"""Plans, bundles and runs for the tests of backends, made by hand: no planning, no rendering."""

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

from clusterrun.config.spec import Cluster, Device, Network, OnInterrupt, Strategy
from clusterrun.launch.plan import Plan, Precision
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir import create
from clusterrun.rundir.paths import RunPaths, RunsDir


def make_plan(root: Path, **changes: Any) -> Plan:
    """Make a plan for two nodes of one process on CPUs, changed as asked."""
    values: dict[str, Any] = {
        "name": "demo",
        "cluster": Cluster.LOCAL,
        "nodes": 2,
        "procs_per_node": 1,
        "gpus_per_node": 0,
        "device": Device.CPU,
        "gpu_ids": (),
        "strategy": Strategy.DDP,
        "precision": Precision.NO,
        "entry": ("train.py",),
        "workdir": str(root),
        "runs_dir": str(root / "runs"),
        "python": sys.executable,
        "network": Network.AUTO,
        "network_interface": "",
        "accelerate_config": "ddp.yaml",
        "accelerate": {},
        "deepspeed": "",
        "threads_per_process": 1,
        "timeout_s": 0,
        "rendezvous_timeout_s": 60,
        "main_process_port": 0,
        "time_minutes": 0,
        "world_contract": True,
        "log_spool_bytes": 1 << 30,
        "log_lines_per_s": 0,
        "spare_nodes": 0,
        "max_restarts": None,
        "on_interrupt": OnInterrupt.REQUEUE,
        "warning_s": 120,
        "hang_timeout_s": 0,
        "silence_timeout_s": 0,
    }
    for field in Plan.__dataclass_fields__.values():
        if field.type.startswith("tuple[") and field.default is dataclasses.MISSING:
            values.setdefault(field.name, ())
    return Plan(**{**values, **changes})


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
