"""`python -m benchmarks.chaos one|random|all`: inject faults into a training, measure recovery."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report
from benchmarks.chaos.figures import row
from benchmarks.chaos.long import endure
from benchmarks.machine import machine
from benchmarks.report import Section, Value
from tests.chaos.checks import Reference, problems
from tests.chaos.faults import FAULTS, UNDISTURBED, Fault, TooLateError
from tests.chaos.training import SAVE_EVERY, STEPS, submit
from tests.chaos.undergo import Undergone, stage, undergo, wait_until_over
from tests.cluster.cluster import Cluster
from tests.cluster.newer import VERSION, NewerSlurm
from tests.cluster.shape import Shape, default_state_dir
from tests.namespaces import ClusterError

RESULTS = Path(__file__).resolve().parents[1] / "results" / "chaos"
NODES = 8  # lost nodes are excluded afterwards
SLURMD_TIMEOUT_S = 300  # Slurm's default

TITLE = "One fault at a time"
ABOUT = (
    "The example, byte-level GPT, DDP over gloo on 2 nodes x 1 rank, `--exact`, "
    f"{STEPS} steps of about 25 ms, a checkpoint every {SAVE_EVERY}. Medians of the runs; "
    f"`SlurmdTimeout` is {SLURMD_TIMEOUT_S} s. "
    "noticed: from the fault until the agents detected it; new step: from the fault to the first "
    "step of the next attempt; restart: the part of it after `noticed`; cold start: from the start "
    "of the agents to the first step, without a fault; queued: from the last rank's end until "
    "Slurm had the next job; running: from then to the start of its agents; lost: repeated steps. "
    "wrong: differences from an undisturbed run in state, weights, optimizer, random numbers, "
    "losses, files, processes."
)


def main() -> None:
    asked = _parser().parse_args()
    if asked.newer_slurm:
        asked.dir /= NewerSlurm.name  # the figures of one Slurm are not mixed with the other's
    asked.dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave no cluster
    cluster = Cluster(
        shape=Shape(
            state_dir=default_state_dir(asked.slot),
            slot=asked.slot,
            nodes=NODES,
            slurmd_timeout_s=SLURMD_TIMEOUT_S,
            newer_slurm=asked.newer_slurm,
        )
    )
    cluster.up()
    os.environ |= {**cluster.env, "PATH": cluster.shape.path(os.environ["PATH"])}
    try:
        load = f"{os.getloadavg()[0]:.0f} at the start"
        facts, found = {**machine(asked.dir), "load": load}, []
        for section in _sections(asked, cluster):
            if asked.newer_slurm:
                section.title += f", Slurm {VERSION}"
            found.append(section)
            print(f"\n## {section.title}\n\n{section.about}\n")
            print("\n".join(report.table(section.rows)), flush=True)
            report.write(asked.results, facts, found, of="recovery")
    finally:
        cluster.down()
    print(f"\nwritten: {asked.results}.json, {asked.results}.md", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("what", choices=["one", "random", "all"])
    parser.add_argument("--dir", type=Path, required=True, help="directory for the runs")
    parser.add_argument(
        "--class",
        dest="classes",
        choices=list(FAULTS),
        action="append",
        help="for `one`: the fault",
    )
    parser.add_argument("--runs", type=int, default=3, help="for `one`: runs per fault")
    parser.add_argument("--faults", type=int, default=50, help="for `random`: number of faults")
    parser.add_argument("--seed", type=int, default=0, help="for `random`: seed")
    newer = NewerSlurm.default().prefix
    about = f"Slurm {VERSION} instead of the system's"
    parser.add_argument("--newer-slurm", action="store_const", const=newer, help=about)
    parser.add_argument("--slot", type=int, default=4, help="slot of the test cluster")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file name without suffix")
    return parser


def _sections(asked: argparse.Namespace, cluster: Cluster) -> Iterator[Section]:
    if asked.what in ("one", "all"):
        yield from _one_by_one(asked, cluster)
    if asked.what in ("random", "all"):
        yield endure(asked.dir, cluster, faults=asked.faults, seed=asked.seed)


def _one_by_one(asked: argparse.Namespace, cluster: Cluster) -> Iterator[Section]:
    """Yield the table after each fault; rows of an earlier run stay in it."""
    kept = asked.dir / "figures.json"
    known: dict[str, dict[str, Value]] = json.loads(kept.read_text()) if kept.exists() else {}
    references: dict[int, Reference] = {}
    for name in asked.classes or FAULTS:
        fault = FAULTS[name]
        for steps in {fault.steps, STEPS} - references.keys():
            references[steps] = _undisturbed(asked.dir / "undisturbed", cluster, steps)
        rows = [
            _suffer(fault, asked.dir / "faults" / f"{name}-{run}", cluster, references)
            for run in range(asked.runs)
        ]
        known[name] = {"fault": name, **_middle(rows)}
        kept.write_text(json.dumps(known))
        yield Section(title=TITLE, about=ABOUT, rows=[known[of] for of in FAULTS if of in known])


def _undisturbed(directory: Path, cluster: Cluster, steps: int) -> Reference:
    with stage(directory / str(steps), cluster) as here:
        training = submit(here, steps=steps)
        wait_until_over(training, cluster)
        return Reference.of(training)


def _suffer(
    fault: Fault, directory: Path, cluster: Cluster, references: dict[int, Reference]
) -> dict[str, Value]:
    """Measure one fault; a run that does not recover gets a row, and the benchmark continues."""
    try:
        with stage(directory, cluster) as here:
            undergone = undergo(fault, here, cluster)
            wrong = _wrong(undergone, fault, references)
            cluster.wait_no_processes(60)
            return {**row(undergone), "wrong": "; ".join(wrong) or None}
    except TooLateError:
        return {"ends": "the fault came too late"}
    except (AssertionError, ClusterError) as error:
        return {"wrong": str(error)}
    finally:
        cluster.heal()


def _wrong(undergone: Undergone, fault: Fault, references: dict[int, Reference]) -> list[str]:
    training = undergone.training
    wrong = problems(training, references[fault.steps], fault, undergone.state)
    for neighbour in training.neighbours:
        state = str(neighbour.status()["state"])
        wrong += problems(neighbour, references[neighbour.steps], UNDISTURBED, state)
    return wrong


def _middle(rows: list[dict[str, Value]]) -> dict[str, Value]:
    """Return the median of each figure, and all texts of the others."""
    middle: dict[str, Value] = {}
    for name in dict.fromkeys(key for found in rows for key in found):
        values = [value for value in (found.get(name) for found in rows) if value is not None]
        numbers = [value for value in values if not isinstance(value, str)]
        texts = ", ".join(sorted({value for value in values if isinstance(value, str)}))
        middle[name] = report.median(numbers) if numbers else texts or None
    return {**middle, "runs": len(rows)}


if __name__ == "__main__":
    main()
