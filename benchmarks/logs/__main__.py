"""`python -m benchmarks.logs read|cost|follow|all`: measure and store the results."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import report
from benchmarks.child import elsewhere
from benchmarks.logs import corpus, cost, finish, follow, peers, read
from benchmarks.machine import machine
from benchmarks.report import Section

FULL_BYTES = 10_000_000_000
RESULTS = Path(__file__).resolve().parents[1] / "results" / "logs"


def main() -> None:
    asked = _parser().parse_args()
    directory: Path = asked.dir.resolve()
    if asked.what == "clean":
        corpus.remove(directory)
        return
    directory.mkdir(parents=True, exist_ok=True)
    # A shell's background job ignores it, and so would the followers that are interrupted here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    facts, found = {**machine(directory), "scale": _scale(asked)}, []
    for section in _sections(asked, directory):
        found.append(section)
        print(f"\n## {section.title}\n\n{section.about}\n")
        print("\n".join(report.table(section.rows)), flush=True)
        report.write(asked.results, facts, found, of="the logs")
    print(f"\nwritten: {asked.results}.json, {asked.results}.md", file=sys.stderr)


def _scale(asked: argparse.Namespace) -> str:
    size = f"{FULL_BYTES * asked.scale / 1e6:,.0f} MB"
    return f"{asked.scale:g}" + (f" (10 GB scaled to {size})" if asked.scale != 1 else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logs", description=__doc__)
    parser.add_argument("what", choices=["read", "cost", "follow", "all", "clean"])
    parser.add_argument(
        "--dir", type=Path, required=True, help="directory for the corpus and the jobs"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="1: 10 GB and 1,000,000 lines")
    parser.add_argument("--nodes", type=int, default=1000, help="nodes of the corpus")
    parser.add_argument("--runs", type=int, default=7, help="measurements of each command")
    parser.add_argument(
        "--only", choices=list(read.SECTIONS), action="append", help="tables of `read`"
    )
    parser.add_argument("--torchx", metavar="PYTHON", help="a Python that can import torchx")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file name without suffix")
    return parser


def _sections(asked: argparse.Namespace, directory: Path) -> Iterator[Section]:
    if asked.what in ("read", "all"):
        peers.allow_many_files()
        setup = _setup(asked, directory)
        for name in asked.only or read.SECTIONS:
            yield read.SECTIONS[name](setup)
    if asked.what in ("cost", "all"):
        with TemporaryDirectory(dir=directory, prefix=corpus.JOBS) as jobs:
            yield cost.cost(Path(jobs), runs=asked.runs, scale=min(asked.scale, 1))
            yield finish.finish(Path(jobs), runs=asked.runs, scale=min(asked.scale, 1))
    if asked.what in ("follow", "all"):
        with TemporaryDirectory(dir=directory, prefix=corpus.JOBS) as jobs:
            yield from follow.follow(Path(jobs), runs=asked.runs, scale=min(asked.scale, 1))


def _setup(asked: argparse.Namespace, directory: Path) -> read.Setup:
    size = int(FULL_BYTES * asked.scale)
    big, small = (
        elsewhere(corpus.find_or_make, directory, name, nodes=asked.nodes, size_bytes=bytes_)
        for name, bytes_ in (("big", size), ("small", size // read.SMALLER))
    )
    return read.Setup(
        directory=directory, big=big, small=small, runs=asked.runs, torchx=asked.torchx
    )


if __name__ == "__main__":
    main()
