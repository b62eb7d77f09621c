"""Show the launch line of the first node and the environment of rank 0, before anything runs.

What only a node or the scheduler knows is a placeholder: `<run dir>`, `<address of node 0>`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterrun.errors import ClusterrunError
from clusterrun.launch import accelerate_argv as line
from clusterrun.launch.plan import LOOPBACK, EnvVar, Plan, Precision
from clusterrun.node.agent.environment import NodeFacts, rank_environment
from clusterrun.node.base.identity import Attempt, Identity, local_node
from clusterrun.node.base.report import LaunchParameters
from clusterrun.rendering.bundle import Bundle
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import shell
from clusterrun.shared.given import OWN_RANK, STORE_PORT, of_task
from clusterrun.shared.installed import installed_version
from clusterrun.shared.own_modules import module_argv

SPOOL = "<spool>"
_PREVIEW = "clusterrun.node.forge.launcher_variables"
_READ = ("ACCELERATE_", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "PET_")
_OF_HOST = {
    "CLUSTERRUN_LOCAL_JOB_ID": "<job id>",
    "CLUSTERRUN_BATCH_PID": "<pid>",
    "CLUSTERRUN_LOCAL_NODE_RANK": "0",
}
_IMPORT_S = 120.0  # torch from a slow file system


@dataclass(frozen=True, kw_only=True)
class RankView:
    """The launch line of the first node, and the variables of rank 0; `note`: what is missing."""

    command: tuple[str, ...]
    env: tuple[EnvVar, ...]
    note: str = ""


def view(plan: Plan, bundle: Bundle, *, python: str) -> RankView:
    """Return the launch line and the environment of rank 0; `python` has the launcher."""
    named = {variable.name: variable.why for variable in plan.env}
    found = {variable.name: variable for variable in plan.env}
    of_node = _of_node(plan)
    for name, value in of_node.items():
        found[name] = EnvVar(name=name, value=value, why=named.get(name, "set on the node"))
    launched, note = _of_launcher(plan, bundle, python, of_node)
    is_slurm = plan.cluster.scheduler.reads_sbatch
    task = of_task({**of_node, **launched}) if is_slurm else {}
    for source, values in (
        ("set by the launcher", launched),
        ("set in the rank, for scripts that read it", task),
    ):
        for name, value in values.items():
            if name not in found or found[name].value != value:
                found[name] = EnvVar(name=name, value=value, why=source)
    return RankView(
        command=line.shown_command(plan, 0),
        env=tuple(found.values()),
        note=note,
    )


def _of_node(plan: Plan) -> dict[str, str]:
    """Return what the agent sets, by its own function."""
    is_local = bool(plan.cluster.scheduler.is_this_machine)
    names = tuple(local_node(n) if is_local else f"<node {n}>" for n in range(plan.nodes))
    who = Identity(
        job_id="<job id>",
        node=names[0],
        node_rank=0,
        nodes=names,
        head_host=names[0],
        is_local=is_local,
    )
    attempt = Attempt(plan=plan, paths=RunPaths(root=Path(line.RUN_DIR)), number=1, who=who)
    address = line.shown(plan, 0).address
    interface = "lo" if address == LOOPBACK else "<interface>"
    met = LaunchParameters(address=address, port=0, interface=interface, precision="")
    known = NodeFacts(
        cpus=1,
        torch=installed_version("torch") or "<torch>",
        deepspeed=installed_version("deepspeed") or "<deepspeed>",
        cache_home=Path("<cache>/clusterrun"),
    )
    base = {variable.name: variable.value for variable in plan.env}
    env = rank_environment(base, attempt, met, Path(SPOOL), known)
    if "OMP_NUM_THREADS" not in base:
        env["OMP_NUM_THREADS"] = "<CPUs of the node / its ranks>"
    port = str(plan.main_process_port or line.PORT)
    return {
        **env,
        **({"MASTER_PORT": port} if plan.world_size == 1 else {}),
        STORE_PORT: port,
        OWN_RANK: "0",
        "CLUSTERRUN_AGENT_PID": "<pid>",
        "CLUSTERRUN_LAUNCHER_PID": "<pid>",
        "CLUSTERRUN_GIVEN": "<names of the variables that the job was given>",
        "CLUSTERRUN_STARTED": "<checksums of the variables above>",
        **(_OF_HOST if is_local else {}),
    }


def _of_launcher(
    plan: Plan, bundle: Bundle, python: str, env: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """Ask the installed accelerate and torch; return their variables, and a note if they differ."""
    fixed = {line.ADDRESS: LOOPBACK, line.PORT: "1", line.PRECISION: "bf16"}
    argv = line.launch_argv(plan, line.shown(plan, 0), python=plan.python)
    with tempfile.TemporaryDirectory() as directory:
        for name, text in bundle.files.items():
            Path(directory, name).write_text(text)
        words = [fixed.get(w, w).replace(line.RUN_DIR, directory) for w in argv]
        try:
            done = shell.run(
                module_argv(python, _PREVIEW, "0", "--log_dir", directory, *words),
                env=_environment(env),
                cwd=Path(plan.workdir) if os.path.isdir(plan.workdir) else None,
                timeout_s=_IMPORT_S,
                tries=1,
            )
            new: Mapping[str, str] = json.loads(done.stdout.splitlines()[-1])
        except (ClusterrunError, ValueError, IndexError):
            why = f"accelerate does not run with {python} here"
            return {}, f"{why}; the variables that it and torch set are missing"
    found = {name: value.replace(directory, line.RUN_DIR) for name, value in new.items()}
    unknown = {
        "MASTER_ADDR": line.shown(plan, 0).address,
        "MASTER_PORT": str(plan.main_process_port or line.PORT),
        "TORCHELASTIC_ERROR_FILE": f"{SPOOL}/<error file>",
    }
    if plan.precision is Precision.HEAD:
        unknown["ACCELERATE_MIXED_PRECISION"] = line.PRECISION
    found |= {name: value for name, value in unknown.items() if name in found}
    found.pop("OMP_NUM_THREADS", None)  # the agent sets it
    note = f"the variables set by the launcher are those of {python}, not of {plan.python}"
    return found, "" if plan.python == python or python != sys.executable else note


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without what other launchers left, with what the launcher reads.

    No other variable of the job: with PYTHONPATH or LD_PRELOAD a project's code would run here.
    """
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {**kept, **{name: env[name] for name in env if name.startswith(_READ)}}
