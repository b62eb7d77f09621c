"""Show the launch line of a node and the environment of a rank, before anything runs.

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

from clusterrun.errors import ClusterrunError, UsageError
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
_IMPORT_S = 120.0  # torch from a slow file system


@dataclass(frozen=True, kw_only=True)
class RankView:
    """The launch line of a node, and the variables of one of its ranks; `note`: what is missing."""

    node: int
    rank: int
    command: tuple[str, ...]
    env: tuple[EnvVar, ...]
    note: str = ""


def choose_rank(plan: Plan, *, node: int | None, rank: int | None) -> tuple[int, int]:
    """Return node and rank; by default the first rank. Raises UsageError if they don't exist."""
    if rank is None:
        rank = (node or 0) * plan.procs_per_node
    if not 0 <= rank < plan.world_size:
        raise UsageError(
            f"the job has no such {'node' if node else 'rank'}",
            hint=f"nodes are 0-{plan.nodes - 1}, ranks 0-{plan.world_size - 1}",
        )
    home = rank // plan.procs_per_node
    if node is not None and node != home:
        raise UsageError(f"rank {rank} is on node {home}, not {node}", hint="drop --of-node")
    return home, rank


def view(plan: Plan, bundle: Bundle, *, python: str, node: int, rank: int) -> RankView:
    """Return the launch line and the environment of a rank; `python` has the launcher."""
    named = {variable.name: variable.why for variable in plan.env}
    found = {variable.name: variable for variable in plan.env}
    of_node = _of_node(plan, node, rank)
    for name, value in of_node.items():
        found[name] = EnvVar(name=name, value=value, why=named.get(name, "set on the node"))
    launched, note = _of_launcher(plan, bundle, python, of_node, rank)
    for source, values in (
        ("set by the launcher", launched),
        ("set in the rank, for scripts that read it", _of_task(plan, {**of_node, **launched})),
    ):
        for name, value in values.items():
            if name not in found or found[name].value != value:
                found[name] = EnvVar(name=name, value=value, why=source)
    return RankView(
        node=node,
        rank=rank,
        command=line.shown_command(plan, node),
        env=tuple(found.values()),
        note=note,
    )


def _of_node(plan: Plan, node: int, rank: int) -> dict[str, str]:
    """Return what the agent sets, by its own function."""
    is_local = bool(plan.cluster.scheduler.is_this_machine)
    names = tuple(local_node(n) if is_local else f"<node {n}>" for n in range(plan.nodes))
    who = Identity(
        job_id="<job id>",
        node=names[node],
        node_rank=node,
        nodes=names,
        head_host=names[0],
        is_local=is_local,
    )
    attempt = Attempt(plan=plan, paths=RunPaths(root=Path(line.RUN_DIR)), number=1, who=who)
    address = line.shown(plan, node)["address"]
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
        OWN_RANK: str(rank),
        "CLUSTERRUN_AGENT_PID": "<pid>",
        "CLUSTERRUN_LAUNCHER_PID": "<pid>",
        "CLUSTERRUN_GIVEN": "<names of the variables that the job was given>",
        "CLUSTERRUN_STARTED": "<checksums of the variables above>",
        **(_of_host(node) if is_local else {}),
    }


def _of_host(node: int) -> dict[str, str]:
    job = {"CLUSTERRUN_LOCAL_JOB_ID": "<job id>", "CLUSTERRUN_BATCH_PID": "<pid>"}
    return {**job, "CLUSTERRUN_LOCAL_NODE_RANK": str(node)}


def _of_task(plan: Plan, launched: Mapping[str, str]) -> dict[str, str]:
    return of_task(launched) if plan.cluster.scheduler.reads_sbatch else {}


def _of_launcher(
    plan: Plan, bundle: Bundle, python: str, env: Mapping[str, str], rank: int
) -> tuple[dict[str, str], str]:
    """Ask the installed accelerate and torch; return their variables, and a note if they differ."""
    fixed = {line.ADDRESS: LOOPBACK, line.PORT: "1", line.PRECISION: "bf16"}
    node, local_rank = divmod(rank, plan.procs_per_node)
    argv = line.launch_argv(
        plan, python=plan.python, worker_argv=plan.entry, **line.shown(plan, node)
    )
    with tempfile.TemporaryDirectory() as directory:
        for name, text in bundle.files.items():
            Path(directory, name).write_text(text)
        words = [fixed.get(w, w).replace(line.RUN_DIR, directory) for w in argv]
        try:
            done = shell.run(
                module_argv(python, _PREVIEW, str(local_rank), "--log_dir", directory, *words),
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
        "MASTER_ADDR": line.shown(plan, node)["address"],
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
