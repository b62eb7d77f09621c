"""`python -m benchmarks.preflight`: measure the start of agents with and without the preflight."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.machine import machine
from benchmarks.report import Section, Value, median, spread
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import parse_object

RESULTS = Path(__file__).resolve().parents[1] / "results" / "preflight"
CLUSTERRUN = str(Path(sys.executable).with_name("clusterrun"))
WAYS = ("off", "warn")
LIMIT_S = 300.0


def main() -> None:
    asked = _parser().parse_args()
    load = f"{os.getloadavg()[0]:.1f} at the start"
    rows = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        Path(place, "train.py").write_text("import time; time.sleep(600)\n")
        for nodes in asked.nodes:
            turns = [[_start_s(way, nodes, place) for way in WAYS] for _ in range(asked.runs)]
            rows.append(_row(nodes, turns))
            print(rows[-1], flush=True)
    section = Section(
        title="A start with and without the preflight",
        about="Simulated nodes of one machine, each with an agent: from the first agent's start to "
        "the decision how to launch, which needs the reports of all nodes. Medians and extremes of "
        "starts in turns, and the median difference of a turn. All agents share the machine's "
        "cores, so CPU time grows with their number; on a cluster each node has its own.",
        rows=rows,
    )
    print("\n".join(report.table(section.rows)))
    report.write(asked.results, {**machine(Path.cwd()), "load": load}, [section], of="preflight")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preflight", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--runs", type=int, default=5, help="how many pairs of starts")
    parser.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=RESULTS,
        help="file name without suffix",
    )
    return parser


def _start_s(way: str, nodes: int, place: str) -> float:
    """Start a job, cancel it once its launch is decided, and return how long that took."""
    words = ("submit", "--cluster", "local", "--device", "cpu", "--nproc-per-node", "1", "--yes")
    more = ("--nodes", str(nodes), "--set", f"launch.preflight={way}", "--parsable", "train.py")
    argv = [CLUSTERRUN, *words, *more]
    done = subprocess.run(argv, cwd=place, check=True, capture_output=True, text=True)
    job = done.stdout.split()[0].partition(";")[0]
    try:
        return _decided_s(RunPaths(root=Path(place, "runs", "by-job", job).resolve()), nodes)
    finally:
        subprocess.run([CLUSTERRUN, "cancel", "--yes", job], cwd=place, capture_output=True)
        time.sleep(1 + nodes / 20)  # for its processes to end


def _decided_s(paths: RunPaths, nodes: int) -> float:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = [_times(paths.events(f"local{rank}")) for rank in range(nodes)]
        if "rendezvous" in found[0] and all("started" in each for each in found):
            return found[0]["rendezvous"] - min(each["started"] for each in found)
        time.sleep(0.5)
    raise TimeoutError(f"{paths.root}: no launch within {LIMIT_S:.0f} s")


def _times(events: Path) -> dict[str, float]:
    """Return when the first event of each type was, in epoch seconds."""
    lines = events.read_text().splitlines() if events.exists() else []
    found = [parse_object(line) or {} for line in reversed(lines)]
    return {str(each.get("type")): float(each.get("ts", 0.0)) for each in found}


def _row(nodes: int, turns: list[list[float]]) -> dict[str, Value]:
    off, warn = zip(*turns, strict=True)
    added = [with_it - without for without, with_it in turns]
    return {
        "nodes": nodes,
        "off_s": median(off),
        "off s, extremes": spread(off),
        "warn_s": median(warn),
        "warn s, extremes": spread(warn),
        "added_s": statistics.median(added),
        "runs": len(turns),
    }


if __name__ == "__main__":
    main()
