"""`python -m benchmarks.reader --dir DIR`: measure the reader's memory and store the results."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.child import Command, Measured, interleaved
from benchmarks.machine import machine
from benchmarks.reader import EXAMPLE, WAYS
from benchmarks.report import Section, Value, median, spread

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reader"
SENTENCES = 16  # of a response: rows of about 680 bytes
FILES = 10
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A parquet set: the bytes of its text in Python, and of its files on disk."""

    directory: Path
    rows: int
    text_bytes: int
    file_bytes: int


def main() -> None:
    asked = _parser().parse_args()
    load = f"{os.getloadavg()[0]:.1f} at the start"
    facts, found = {**machine(asked.dir), "load": load}, []
    for title, is_one_group in (("Row groups of 1,000 rows", False), ("One row group", True)):
        found.append(measure(asked, title, is_one_group=is_one_group))
        print("\n".join([f"\n## {title}\n", *report.table(found[-1].rows)]), flush=True)
        report.write(asked.results, facts, found, of="the parquet reader")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reader", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="directory for the data")
    parser.add_argument("--rows", type=int, default=15_000, help="rows of the smallest set")
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--runs", type=int, default=3, help="measurements of each method")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file name without suffix")
    return parser


def measure(asked: argparse.Namespace, title: str, *, is_one_group: bool) -> Section:
    """Make sets of growing size, read each with all methods in turns, and remove them."""
    found: dict[int, dict[str, list[Measured]]] = {}
    sets = {}
    for factor in asked.factors:
        data = make(asked.dir / f"set-{factor}", asked.rows * factor, is_one_group=is_one_group)
        found[factor] = interleaved([_command(way, data) for way in WAYS], asked.runs)
        sets[factor] = data
        shutil.rmtree(data.directory)
    sizes = ", ".join(
        f"{factor}x is {data.rows:,} rows, {data.text_bytes / MB:,.0f} MB of text in "
        f"{data.file_bytes / MB:,.0f} MB of parquet"
        for factor, data in sets.items()
    )
    layout = "one file with one row group" if is_one_group else f"{FILES} files"
    return Section(
        title=title,
        about=f"{sizes}; {layout}. Peak resident memory of a process that reads every row as "
        "Python texts once; growth: the largest set's peak over the smallest's, in each run; data: "
        "the memory beyond `nothing` (pyarrow imported) on the largest set, over its text.",
        rows=[_row(way, found, sets[asked.factors[-1]]) for way in WAYS],
    )


def make(directory: Path, rows: int, *, is_one_group: bool) -> DataSet:
    """Make a set with the example's own script."""
    file_rows = rows if is_one_group else -(-rows // FILES)
    options = {
        "--rows": rows,
        "--file-rows": file_rows,
        "--group-rows": rows if is_one_group else 1000,
        "--sentences": SENTENCES,
    }
    words = [str(word) for option in options.items() for word in option]
    script = str(EXAMPLE / "make_data.py")
    subprocess.run([sys.executable, script, str(directory), *words], check=True)
    train = directory / "train"
    argv = [sys.executable, "-m", "benchmarks.reader.way", "iter_batches", str(train)]
    seen = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return DataSet(
        directory=directory,
        rows=rows,
        text_bytes=int(seen),
        file_bytes=sum(path.stat().st_size for path in train.iterdir()),
    )


def _command(way: str, data: DataSet) -> Command:
    words = [way, str(data.directory / "train"), str(data.text_bytes)]
    return Command(name=way, argv=[sys.executable, "-m", "benchmarks.reader.way", *words])


def _row(
    way: str, found: dict[int, dict[str, list[Measured]]], largest: DataSet
) -> dict[str, Value]:
    peaks = {factor: [run.rss_bytes for run in by_way[way]] for factor, by_way in found.items()}
    last = found[max(found)]
    growth = [high / low for low, high in zip(peaks[min(peaks)], peaks[max(peaks)], strict=True)]
    beyond = [
        (run.rss_bytes - base.rss_bytes) / largest.text_bytes
        for run, base in zip(last[way], last["nothing"], strict=True)
    ]
    return {
        "way": way,
        **{f"{factor}x peak_MB": median(values) / MB for factor, values in peaks.items()},
        "growth": median(growth),
        "growths": spread(growth),
        "data": median(beyond),
        f"{max(found)}x wall_s": median([run.wall_s for run in last[way]]),
        "runs": len(growth),
    }


if __name__ == "__main__":
    main()
