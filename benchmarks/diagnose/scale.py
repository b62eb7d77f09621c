"""Measure `diagnose` on generated runs of many ranks: its time and its memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from benchmarks import report
from benchmarks.child import Command, Measured, interleaved
from benchmarks.diagnose import hang
from benchmarks.logs.corpus import Corpus, find_or_make
from benchmarks.machine import machine
from benchmarks.report import Section, Value, median, spread

RESULTS: Final = Path(__file__).resolve().parents[1] / "results" / "diagnose"
CLUSTERRUN: Final = str(Path(sys.executable).with_name("clusterrun"))
_DIAGNOSE: Final = (CLUSTERRUN, "diagnose")
FLOOR: Final = "--help"
NODES: Final = (64, 1000)
NODE_BYTES: Final = 3_000_000


def run(directory: Path, *, runs: int, results: Path) -> None:
    """Measure runs of 64 and of 1,000 nodes in which one rank failed, and one in which it hung."""
    load = f"{os.getloadavg()[0]:.1f} at the start"
    corpora = [
        find_or_make(directory, f"diagnose{nodes}", nodes=nodes, size_bytes=nodes * NODE_BYTES)
        for nodes in NODES
    ]
    commands = [Command(name=FLOOR, argv=[CLUSTERRUN, "--help"]), *map(_command, corpora)]
    hung = hang.make(directory)
    name = f"{hung.nodes} nodes, {hung.nodes * 8} flight recorders of {hang.CALLS:,} calls"
    commands.append(Command(name=name, argv=[*_DIAGNOSE, hung.run_dir], accepts=(3,)))
    found = interleaved(commands, runs + 1)
    section = Section(
        title="One rank of many",
        about="One rank of N x 8 runs out of memory, all others lose their connection to it; "
        "in the last row, one rank does not enter the collective in which the others wait. "
        "Whole processes, from start to end, in turns, after a first run that is not counted. "
        f"Over the floor: each time divided by that of {FLOOR}, the start of the command itself, "
        "in the same turn.",
        rows=[_row(name, measured[1:], found[FLOOR][1:]) for name, measured in found.items()],
    )
    print("\n".join(report.table(section.rows)))
    report.write(results, {**machine(directory), "load": load}, [section], of="diagnose")


def _command(corpus: Corpus) -> Command:
    name = f"{corpus.nodes} nodes, {corpus.size_bytes / 1e6:,.0f} MB of logs"
    return Command(name=name, argv=[*_DIAGNOSE, corpus.run_dir], accepts=(3,))


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
