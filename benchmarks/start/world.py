"""From the start of a job to the first collective of all its ranks."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.report import Section
from benchmarks.start.place import (
    CLUSTERRUN,
    SCRIPTS,
    Place,
    launched_at,
    sbatch,
    script,
    settle,
    wait_for_files,
)
from benchmarks.start.turns import compared, in_turns, parts
from tests.cluster.cluster import Cluster

OURS, FLOOR, BY_HAND = "clusterrun", "srun python, no launcher", "srun accelerate launch"
PORT = 29511
ON_CPU = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "DS_ACCELERATOR": "cpu",
}
Times = dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class World:
    """The nodes, ranks for each node and strategy; `budgets` are ratios to the contenders."""

    nodes: int
    procs: int
    strategy: str
    budgets: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.procs}, {self.strategy}"

    @property
    def size(self) -> int:
        return self.nodes * self.procs

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of sbatch for one task on each node."""
        return (f"-N{self.nodes}", f"--ntasks={self.nodes}", "-c8", "-t10")


WORLDS = tuple(
    World(nodes=nodes, procs=procs, strategy=strategy, budgets=budgets)
    for nodes, procs, budgets in (
        (2, 1, ((FLOOR, 1.0), (BY_HAND, 0.5))),
        (1, 8, ((FLOOR, 0.35),)),
    )
    for strategy in ("ddp", "zero2")
)


def first_collective(place: Place) -> Iterator[Section]:
    """Yield a table for each world."""
    for world in (each for each in WORLDS if place.only in each.name):
        cluster = place.cluster(2)
        config = accelerate_config(place.fresh("config"), world)
        contenders: dict[str, Callable[[], Times]] = {
            BY_HAND: partial(_by_hand, place, cluster, world, config),
            FLOOR: partial(_floor, place, cluster, world),
            **{
                name: partial(_ours, place, cluster, world, options)
                for name, options in place.ways(OURS).items()
            },
        }
        yield _section(world, in_turns(contenders, place.rounds))


def _section(world: World, found: dict[str, list[Times]]) -> Section:
    totals = {name: [known(each["start_s"]) for each in turns] for name, turns in found.items()}
    rows = compared(totals, OURS, dict(world.budgets))
    for row in rows:
        row |= {k: v for k, v in parts(found[str(row["what"])]).items() if k != "start_s"}
    return Section(
        title=f"From the start to the first collective: {world.name}",
        about="The same script for all, which joins the world over gloo, adds up the ranks and "
        "takes one step. The time is from slurmd's start of the batch script, by its log, to the "
        "end of the first all-reduce on the last rank. Parts, medians: from sbatch's return to "
        "the same end; from slurmd's start to the first rank's process, to the last rank's first "
        "line and to its imports; from there to the collective; to the first optimizer step. "
        f"`{FLOOR}` sets RANK and the like from Slurm's variables, and the variables that "
        "accelerate sets in the ranks from a file.",
        rows=rows,
    )


def known(value: float | None) -> float:
    """Return a time that every turn has."""
    assert value is not None
    return value


def _ours(place: Place, cluster: Cluster, world: World, options: tuple[str, ...]) -> Times:
    directory = place.fresh("ours")
    words = (
        *(*options, "--cluster", "slurm", "--nodes", str(world.nodes)),
        *("--nproc-per-node", str(world.procs), "--cpus-per-task", "8"),
        *("--device", "cpu", "--strategy", world.strategy, "--set", "launch.threads_per_process=1"),
        *("--time", "10", str(SCRIPTS / "probe.py"), str(directory)),
    )
    job = place.submit(directory, *words)
    return _seen(cluster, directory, world, job, time.time())


def _floor(place: Place, cluster: Cluster, world: World) -> Times:
    """Run the script as Slurm's tasks, with fresh interpreters and nothing else."""
    directory = place.fresh("floor")
    given = json.loads((place.directory / "accelerate.json").read_text())
    body = rank_step(given, world, str(SCRIPTS / "probe.py"), str(directory))
    return _run(cluster, directory, world, body)


def rank_step(given: dict[str, str], world: World, *words: str) -> str:
    """Return the lines of a batch script that start a rank in each task."""
    variables = {**given, **ON_CPU, "WORLD_SIZE": str(world.size), "MASTER_PORT": str(PORT)}
    variables |= {"LOCAL_WORLD_SIZE": str(world.procs)}
    task = 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$0" "$@"'
    step = ("srun", f"--ntasks={world.size}", f"--ntasks-per-node={world.procs}", "--cpus-per-task")
    argv = (*step, "1", "bash", "-c", task, sys.executable, *words)
    return f"{_exports(variables)}export MASTER_ADDR=$SLURMD_NODENAME\n{shlex.join(argv)}\n"


def _by_hand(place: Place, cluster: Cluster, world: World, config: Path) -> Times:
    """Run `accelerate launch` on each node, as its documentation shows, with our configuration."""
    directory = place.fresh("by-hand")
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    options = (
        *("--config_file", str(config), "--num_machines", str(world.nodes)),
        *("--num_processes", str(world.size), "--main_process_port", str(PORT)),
        *("--rdzv_backend", "static", "--max_restarts", "0"),
    )
    task = 'exec "$0" launch --machine_rank $SLURM_NODEID --main_process_ip $MASTER "$@"'
    step = ("srun", f"--ntasks={world.nodes}", "--ntasks-per-node=1", "--cpus-per-task", "8")
    probe = (str(SCRIPTS / "probe.py"), str(directory))
    argv = (*step, "bash", "-c", task, accelerate, *options, *probe)
    body = f"{_exports(ON_CPU)}export MASTER=$SLURMD_NODENAME\n{shlex.join(argv)}\n"
    times = _run(cluster, directory, world, body)
    (directory / "environ.json").replace(place.directory / "accelerate.json")
    return times


def _exports(variables: dict[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(text)}\n" for name, text in variables.items())


def accelerate_config(directory: Path, world: World) -> Path:
    """Render the configuration of accelerate that clusterrun uses."""
    words = (
        *("--cluster", "slurm", "--nodes", str(world.nodes), "--device", "cpu"),
        *("--nproc-per-node", str(world.procs), "--strategy", world.strategy),
    )
    argv = [CLUSTERRUN, "render", *words, "-O", "bundle", str(SCRIPTS / "probe.py")]
    subprocess.run(argv, cwd=directory, check=True, capture_output=True)
    return directory / "bundle" / "accelerate.yaml"


def _run(cluster: Cluster, directory: Path, world: World, body: str) -> Times:
    job = sbatch(script(directory, body, *world.options))
    return _seen(cluster, directory, world, job, time.time())


def _seen(cluster: Cluster, directory: Path, world: World, job: str, submitted_at: float) -> Times:
    files = [directory / f"{rank}.json" for rank in range(world.size)]
    wait_for_files(files, job, cluster)
    settle(cluster, job)
    return times_of(
        [json.loads(file.read_text()) for file in files], launched_at(cluster, job), submitted_at
    )


def times_of(ranks: list[dict[str, float]], launched_at: float, submitted_at: float) -> Times:
    """Return the times of a start from what its ranks wrote."""
    last = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return {
        "start_s": last["collective"] - launched_at,
        "from sbatch_s": last["collective"] - submitted_at,
        "first process_s": min(rank["process"] for rank in ranks) - launched_at,
        "last script_s": last["script"] - launched_at,
        "imported_s": last["imported"] - launched_at,
        "joined_s": last["collective"] - last["imported"],
        "first step_s": last["step"] - launched_at,
        "process to collective_s": max(r["collective"] - r["process"] for r in ranks),
    }
