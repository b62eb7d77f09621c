"""What a user waits for at the prompt: the start of commands, and a submission."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.child import Command, Measured, measure
from benchmarks.report import Section, Value, median, spread
from benchmarks.start import peers
from benchmarks.start.place import Place, script, settle, wait_for_files
from benchmarks.start.turns import compared, in_turns, ratios
from clusterrun.cli.main import VERBS
from tests.cluster.cluster import Cluster

OURS = "clusterrun"
GROUP, TORCHX, SUBMITIT, SBATCH = "bare click group", "torchx", "submitit", "sbatch"
OWN_BUDGET_S = 0.15
TORCHX_RUN = (
    "run",
    "-s",
    "slurm",
    "-cfg",
    "partition=main",
    "dist.ddp",
    "-j",
    "1x1",
    "--script",
    "train.py",
)
TOOLS = ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "sacctmgr", "scancel", "sprio", "sshare")
# Times and counts the scheduler's commands; EPOCHREALTIME needs no process.
WRAPPER = """\
#!/bin/bash
begin=$EPOCHREALTIME
{program} "$@"
code=$?
printf '%s %s {name}\\n' "$begin" "$EPOCHREALTIME" >> {log}
exit $code
"""
SUBMITTER = """\
import time, submitit
executor = submitit.AutoExecutor(folder="submitit")
executor.update_parameters(nodes=1, tasks_per_node=1, cpus_per_task=1, timeout_min=5)
print(executor.submit(time.sleep, 1).job_id)
"""


def commands(place: Place) -> Iterator[Section]:
    """Yield the table of `--help`, and that of commands about a job."""
    own, torchx = peers.own(), peers.environment(peers.TORCHX)
    argvs = {OURS: [own.program("clusterrun"), "--help"]}
    argvs[GROUP] = [*peers.click_group(list(VERBS)), "--help"]
    if not torchx.missing:
        argvs[TORCHX] = [torchx.program("torchx"), "--help"]
    started = {n: partial(measure, Command(name=n, argv=argv)) for n, argv in argvs.items()}
    rows = _rows(in_turns(started, place.rounds), {GROUP: 1.8, TORCHX: 0.65})
    yield Section(
        title="Start of a command: --help",
        about="Whole processes, each from a plain installation in an environment of its own. "
        f"`{GROUP}`: a command group with {len(VERBS)} commands that do nothing (click "
        f"{peers.environment(peers.CLICK).version}). torchx {torchx.version}.",
        rows=rows,
    )
    yield _own_times(place, own)


def _rows(found: dict[str, list[Measured]], budgets: dict[str, float]) -> list[dict[str, Value]]:
    """Compare commands by their wall time; other load changes their processor time less."""
    rows = compared({n: [run.wall_s for run in runs] for n, runs in found.items()}, OURS, budgets)
    spent = {name: [run.cpu_s for run in runs] for name, runs in found.items()}
    for row in rows:
        of = spent[str(row["what"])]
        row |= {"cpu_s": median(of), "ours : it, cpu": median(ratios(spent[OURS], of))}
    return rows


def _own_times(place: Place, own: peers.Environment) -> Section:
    """Measure commands about a running job of the real Slurm, without the scheduler's part."""
    cluster, directory = place.cluster(2), place.fresh("front")
    (directory / "train.py").write_text("import time\nprint('a step')\ntime.sleep(3600)\n")
    alone = ("--nodes", "1", "--nproc-per-node", "1", "--device", "cpu", "--strategy", "none")
    job = place.submit(directory, "--cluster", "slurm", *alone, "train.py")
    log = directory / "runs" / "by-job" / job / "logs" / "a1" / f"{cluster.nodes[0]}.log"
    wait_for_files([log], job, cluster)
    program, large = own.program("clusterrun"), ("--nodes", "1024", "--nproc-per-node", "8")
    asked = {
        "status JOB": ("status", job),
        "list": ("list", "--all"),
        "logs JOB": ("logs", job),
        "render, 1 node": ("render", "--cluster", "slurm", *alone, "train.py"),
        "render, 1,024 nodes x 8": ("render", "--cluster", "slurm", *large, "train.py"),
    }
    calls = write_wrappers(directory / "wrapped", directory / "calls")
    measured = in_turns(
        {
            name: partial(
                _own_time, Command(name=name, argv=[program, *words], cwd=directory), calls
            )
            for name, words in asked.items()
        },
        place.rounds,
    )
    cluster.run(["scancel", job])
    settle(cluster, job)
    return Section(
        title="Own time of commands",
        about="Whole processes against the real Slurm, on a running job that sleeps. Own: without "
        "the scheduler's commands, each timed by a wrapper; the wrapper's start of about 2 ms "
        "counts as ours.",
        rows=[_own_row(name, turns) for name, turns in measured.items()],
    )


def _own_time(command: Command, log: Path) -> tuple[Measured, float, int]:
    """Return the process's cost, the scheduler's part of its time, and the number of its calls.

    Answers of the scheduler are cached for some seconds, so each run has a cache of its own.
    """
    log.write_text("")
    wrapped = f"PATH={log.parent / 'wrapped'}:{os.environ['PATH']}"
    cache = f"XDG_STATE_HOME={tempfile.mkdtemp(dir=log.parent)}"
    argv = ["/usr/bin/env", wrapped, cache, *command.argv]
    measured = measure(Command(name=command.name, argv=argv, cwd=command.cwd))
    spent = [scheduler_s(line) for line in log.read_text().splitlines()]
    return measured, sum(spent), len(spent)


def scheduler_s(line: str) -> float:
    """Return the time of a call in the wrappers' log.

    >>> scheduler_s("10.5 10.75 squeue")
    0.25
    """
    begin, end, _ = line.split(" ", 2)
    return float(end) - float(begin)


def _own_row(name: str, turns: list[tuple[Measured, float, int]]) -> dict[str, Value]:
    own = [measured.wall_s - scheduler for measured, scheduler, _ in turns]
    return {
        "command": name,
        "own_s": median(own),
        "own s, extremes": spread(own),
        "budget_s": OWN_BUDGET_S,
        "wall_s": median([measured.wall_s for measured, _, _ in turns]),
        "cpu_s": median([measured.cpu_s for measured, _, _ in turns]),
        "scheduler_s": median([scheduler for _, scheduler, _ in turns]),
        "calls": max(calls for _, _, calls in turns),
        "turns": len(turns),
    }


def write_wrappers(directory: Path, log: Path) -> Path:
    """Write a wrapper of each of Slurm's commands that is installed; return its log."""
    directory.mkdir()
    for name in TOOLS:
        if program := shutil.which(name):
            path = directory / name
            path.write_text(WRAPPER.format(program=program, name=name, log=log))
            path.chmod(0o755)
    return log


def submit(place: Place) -> Iterator[Section]:
    """Yield the table of submissions of a job that does nothing."""
    cluster, directory = place.cluster(2), place.fresh("submit")
    (directory / "train.py").write_text("print('a step')\n")
    own, torchx, submitit = peers.own(), *map(peers.environment, (peers.TORCHX, peers.SUBMITIT))
    argvs = {OURS: _our_submission(own.program("clusterrun"))}
    if not torchx.missing:
        argvs[TORCHX] = [torchx.program("torchx"), *TORCHX_RUN]
    if not submitit.missing:
        (directory / "submitter.py").write_text(SUBMITTER)
        argvs[SUBMITIT] = [submitit.python, "submitter.py"]
    argvs[SBATCH] = script(directory, "exit 0\n", "-t5")
    with _nothing_starts(cluster):
        contenders = {
            name: partial(_submitted, cluster, Command(name=name, argv=argv, cwd=directory))
            for name, argv in argvs.items()
        }
        rows = _rows(in_turns(contenders, place.rounds), {TORCHX: 0.75, SUBMITIT: 1.9})
        log = write_wrappers(directory / "wrapped", directory / "calls")
        for row in rows:
            name = str(row["what"])
            command = Command(name=name, argv=argvs[name], cwd=directory)
            row["scheduler's commands"] = _calls(command, log)
            cluster.run(["scancel", "--me"])
    yield Section(
        title="Submission",
        about="Whole processes that submit a job of one task, each from a plain installation in "
        "an environment of its own, to the real Slurm. The partition is down, so that no job "
        "starts on the cores of the next submission; the jobs are cancelled after each. "
        f"torchx {torchx.version}: `torchx run -s slurm dist.ddp`; submitit {submitit.version}: "
        "a script that submits a function, once.",
        rows=rows,
    )


def _our_submission(program: str) -> list[str]:
    alone = ("--nodes", "1", "--nproc-per-node", "1", "--device", "cpu", "--strategy", "none")
    return [program, "submit", "--parsable", "--cluster", "slurm", *alone, "train.py"]


def _submitted(cluster: Cluster, command: Command) -> Measured:
    measured = measure(command)
    cluster.run(["scancel", "--me"])
    return measured


def _calls(command: Command, log: Path) -> str:
    """Return which of the scheduler's commands a command runs, in their order."""
    _own_time(command, log)
    return ", ".join(line.split(" ")[2] for line in log.read_text().splitlines())


@contextmanager
def _nothing_starts(cluster: Cluster) -> Iterator[None]:
    """Keep Slurm from starting jobs; it accepts them."""
    update = ["scontrol", "update", "PartitionName=main"]
    cluster.run([*update, "State=DOWN"])
    try:
        yield
    finally:
        cluster.run(["scancel", "--me"])
        cluster.run([*update, "State=UP"])
