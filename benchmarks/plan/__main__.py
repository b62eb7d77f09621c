"""`python -m benchmarks.plan`: measure an estimate and a dry run of submit, as whole processes."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import report
from benchmarks.child import Command, Measured, interleaved
from benchmarks.machine import machine
from benchmarks.report import Section, Value, median, spread

RESULTS = Path(__file__).resolve().parents[1] / "results" / "plan"
CLUSTERRUN = str(Path(sys.executable).with_name("clusterrun"))
FLOOR, PEER = "python, nothing", "DeepSpeed's ZeRO-3 estimator"
DRY_RUN = "submit --dry-run"
MODEL = ("--model", "llama-3.1-8b", "--seq-len", "4096", "--samples", "1200000")
NODES = ("--cluster", "slurm", "-N4", "--gpus-per-node", "8", "--gpu", "h100-80g")
QUESTION = ("plan", *MODEL, *NODES, "--host-mem", "2015GiB")
ESTIMATOR = (
    "from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as f;"
    "f(8_030_261_248, 525_336_576, num_gpus_per_node=8, num_nodes=4)"
)
SUBMITTED = ("submit", "--cluster", "local", "--dry-run", "-N2", "--gpus-per-node", "2")
COMMANDS = (
    Command(name=FLOOR, argv=[sys.executable, "-c", "pass"]),
    Command(name="--help", argv=[CLUSTERRUN, "--help"]),
    Command(name="plan", argv=[CLUSTERRUN, *QUESTION, "--strategy", "zero3"]),
    Command(name="plan --json", argv=[CLUSTERRUN, *QUESTION, "--strategy", "zero3", "--json"]),
    Command(
        name="plan --what-if strategy",
        argv=[CLUSTERRUN, *QUESTION, "--strategy", "zero3", "--what-if", "strategy"],
    ),
    Command(
        name="plan --recommend",
        argv=[CLUSTERRUN, *QUESTION, "--recommend", "--effective-batch", "256"],
    ),
    Command(name=DRY_RUN, argv=[CLUSTERRUN, *SUBMITTED, "train.py"]),
    Command(name=PEER, argv=[sys.executable, "-c", ESTIMATOR]),
)


def main() -> None:
    asked = _parser().parse_args()
    load = f"{os.getloadavg()[0]:.1f} at the start"
    with tempfile.TemporaryDirectory() as empty:  # no configuration is found here
        os.chdir(empty)
        Path("train.py").write_text("print('a step')\n")
        found = interleaved(COMMANDS, asked.runs + 1)
        os.chdir("/")
    section = Section(
        title="An estimate, and a dry run",
        about="Estimates of an 8 B model on 4 nodes x 8 GPUs. Whole processes, from start to end: "
        "medians and extremes of runs in turns, after a first run that is not counted. Over the "
        "floor: each time divided by that of a Python that does nothing, in the same turn. "
        f"{PEER} estimates only the model states of ZeRO-3. {DRY_RUN} renders and checks "
        "everything that a submission would send, for 2 local nodes.",
        rows=[_row(name, runs[1:], found[FLOOR][1:]) for name, runs in found.items()],
    )
    print("\n".join(report.table(section.rows)))
    report.write(asked.results, {**machine(Path.cwd()), "load": load}, [section], of="plan")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--runs", type=int, default=11, help="how often each command runs")
    parser.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=RESULTS,
        help="file name without suffix",
    )
    return parser


def _row(name: str, runs: list[Measured], floor: list[Measured]) -> dict[str, Value]:
    times = [run.wall_s for run in runs]
    ratios = [run.wall_s / least.wall_s for run, least in zip(runs, floor, strict=True)]
    return {
        "command": name,
        "wall_s": median(times),
        "wall s, extremes": spread(times),
        "over the floor": median(ratios),
        "cpu_s": median([run.cpu_s for run in runs]),
        "peak_MB": median([run.rss_bytes for run in runs]) / 1e6,
        "runs": len(runs),
    }


if __name__ == "__main__":
    main()
