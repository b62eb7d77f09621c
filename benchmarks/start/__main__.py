"""`python -m benchmarks.start PART…|all`: measure starts and restarts, and store the results."""

from __future__ import annotations

import argparse
import compileall
import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import clusterrun
from benchmarks import report
from benchmarks.machine import machine
from benchmarks.report import Section
from benchmarks.start import back, front, scale, steady, world
from benchmarks.start.place import Place
from clusterrun.health.machine import versions
from tests.road import STUB

RESULTS = Path(__file__).resolve().parents[1] / "results" / "start"
PARTS: dict[str, Callable[[Place], Iterator[Section]]] = {
    "commands": front.commands,
    "submit": front.submit,
    "first-collective": world.first_collective,
    "restart": back.restart,
    "steady": steady.steady,
    "light": scale.light,
    "store": scale.store,
}


def main() -> None:
    asked = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave no cluster
    directory: Path = asked.dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    place = Place(
        directory=directory,
        rounds=asked.rounds,
        slot=asked.slot,
        seconds=asked.seconds,
        large=asked.nodes,
        options=tuple(word for each in asked.set for word in ("--set", each)),
        launchers=tuple(asked.launcher),
        only=asked.only,
    )
    _compile()
    facts, found = _facts(place), []
    try:
        for part in PARTS if asked.part == "all" else [asked.part]:
            for section in PARTS[part](place):
                found.append(section)
                print(f"\n## {section.title}\n\n{section.about}\n")
                print("\n".join(report.table(section.rows)), flush=True)
                report.write(asked.results, facts, found, of="starts")
    finally:
        place.down()
    print(f"\nwritten: {asked.results}.json, {asked.results}.md", file=sys.stderr)


def _compile() -> None:
    """Compile the package, as an installer does: Python may be told to write no bytecode."""
    for package in (Path(clusterrun.__file__).parent, STUB):
        compileall.compile_dir(package, quiet=1)


def _facts(place: Place) -> dict[str, str]:
    slurm = subprocess.run(["slurmd", "-V"], check=True, capture_output=True, text=True)
    libraries = {name: text for name, text in versions().items() if text}
    return {
        **machine(place.directory),
        "date": datetime.date.today().isoformat(),
        "load": f"{os.getloadavg()[0]:.1f} at the start",
        "Slurm": slurm.stdout.split()[-1],
        **libraries,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--dir", type=Path, required=True, help="directory for the jobs")
    parser.add_argument("--rounds", type=int, default=7, help="turns, after one that warms up")
    parser.add_argument("--slot", type=int, default=4, help="slot of the test cluster")
    parser.add_argument("--nodes", type=int, default=64, help="nodes for `light` and `store`")
    parser.add_argument("--seconds", type=float, default=60, help="a window of `steady`")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our jobs"
    )
    parser.add_argument(
        "--launcher", action="append", default=[], help="also measure ours with this launcher"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="worlds of `first-collective` with this in the name",
    )
    parser.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=RESULTS,
        help="file name without suffix",
    )
    return parser


if __name__ == "__main__":
    main()
