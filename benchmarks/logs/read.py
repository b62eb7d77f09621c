"""Measure how fast the logs of a run of 1,000 nodes are read, by clusterrun and by other tools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.child import Command, Measured, elsewhere, interleaved, measure
from benchmarks.logs import peers
from benchmarks.logs.corpus import Corpus, find_or_make_replicas
from benchmarks.report import Section, Value, median, spread

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SMALLER = 10  # how many times smaller the smaller corpus is
TAIL = ("-a", "-n", "200")
SEARCH = ("-a", "-n", "all", "-g", peers.NEEDLE)
MERGE = ("-a", "-n", "all")
RAW = (*MERGE, "-o", "raw")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What to read, and how often; `torchx` is a Python that can import torchx."""

    directory: Path
    big: Corpus
    small: Corpus
    runs: int
    torchx: str | None


def _since(corpus: Corpus) -> tuple[str, ...]:
    """Ask for the last five minutes of the job, by date: it ended when the corpus was made."""
    at = datetime.fromtimestamp(corpus.end - 300, tz=timezone.utc)
    return ("-a", "-n", "all", "--since", f"{at:%Y-%m-%dT%H:%M:%S}")


def about(corpus: Corpus) -> str:
    """Describe the size of a corpus that is in memory."""
    return (
        f"{corpus.nodes:,} nodes x 8 ranks, {corpus.size_bytes / 1e6:,.0f} MB, "
        f"{corpus.lines:,} lines, {(corpus.end - corpus.begin) / 60:,.0f} min of a job"
    )


def first_output(setup: Setup) -> Section:
    commands = [
        peers.ours(setup.big, "clusterrun logs"),
        peers.ours(setup.big, "clusterrun logs --errors", "--errors"),
        peers.ours(setup.big, "clusterrun logs -a -n 200", *TAIL),
        peers.ours(setup.big, "clusterrun logs -a --since 5m", *_since(setup.big)),
        peers.tails(setup.big),
        peers.cat(setup.big),
    ]
    found = _warm(commands, setup.runs)
    return Section(
        title="First output",
        about=f"Warm cache; {about(setup.big)}. Budget: first byte of the default view in 1 s, "
        "200 MB. A default view needs the last lines of all files: the nearest by hand is `tail`.",
        rows=[_row(c, found[c.name], to=found["clusterrun logs"]) for c in commands],
    )


def size_independence(setup: Setup) -> Section:
    rows: list[dict[str, Value]] = []
    asked: dict[str, Callable[[Corpus], tuple[str, ...]]] = {
        "": lambda _: (),
        "-a -n 200": lambda _: TAIL,
        "-a --since 5m": _since,
    }
    for name, options in asked.items():
        pair = [
            peers.ours(setup.small, f"{name}, smaller", *options(setup.small)),
            peers.ours(setup.big, f"{name}, {SMALLER}x", *options(setup.big)),
        ]
        found = _warm(pair, setup.runs)
        small, big = (found[command.name][1:] for command in pair)
        ratios = [b.wall_s / s.wall_s for s, b in zip(small, big, strict=True)]
        rows.append(
            {
                "command": f"clusterrun logs {name}".strip(),
                "smaller_s": median([m.wall_s for m in small]),
                f"{SMALLER}x_s": median([m.wall_s for m in big]),
                "ratio": median(ratios),
                "ratios": spread(ratios),
                "output_smaller_bytes": small[0].out_bytes,
                f"output_{SMALLER}x_bytes": big[0].out_bytes,
            }
        )
    return Section(
        title="Independence of the size of the files",
        about=f"Warm cache, to the end of the output. Smaller: {about(setup.small)}. "
        f"{SMALLER}x: {about(setup.big)}. Budget: a ratio near 1.",
        rows=rows,
    )


# The merge without selection and output.
ALONE = """
import sys
from pathlib import Path
from clusterrun.logs.merge import merge_sources
from clusterrun.logs.sources import EVERYTHING, find_files
from clusterrun.logs.sources import sources_of
from clusterrun.rundir.paths import RunPaths
for line in merge_sources(sources_of(find_files(RunPaths(root=Path(sys.argv[1])), 1), EVERYTHING)):
    pass
"""


def merge(setup: Setup) -> Section:
    corpus = setup.small
    commands = [
        peers.ours(
            corpus,
            "clusterrun logs -a -n all -o raw > /dev/null",
            *RAW,
            to_null=True,
        ),
        peers.ours(corpus, "clusterrun logs -a -n all -o raw | …", *RAW),
        peers.ours(corpus, "clusterrun logs -a -n all > /dev/null", *MERGE, to_null=True),
        peers.ours(corpus, "clusterrun logs -a -n all | …", *MERGE),
        Command(
            name="logs.merge in Python, no output",
            argv=[sys.executable, "-c", ALONE, str(corpus.run_dir)],
            to_null=True,
        ),
        peers.sort_merge(corpus),
        peers.cat_sort(corpus),
        peers.cat(corpus),
    ]
    found = _warm(commands, setup.runs)
    rows = []
    for command in commands:
        row = _row(command, found[command.name], to=found[commands[0].name])
        row["lines_per_s"] = round(corpus.lines / float(row["wall_s"] or 1))
        rows.append(row)
    return Section(
        title="All lines of all ranks, merged by time",
        about=f"Warm cache; {about(corpus)}. Budget: 500,000 lines/s, 200 MB.",
        rows=rows,
    )


def search(setup: Setup) -> Section:
    corpus = setup.big
    commands = [peers.ours(corpus, "clusterrun logs -a -n all -g TEXT", *SEARCH)]
    commands += [*peers.greps(corpus), peers.cat(corpus)]
    _check_search(corpus)
    found = _warm(commands, setup.runs)
    rows = []
    for command in commands:
        row = _row(command, found[command.name], to=found[commands[0].name])
        row["GB_per_s"] = corpus.size_bytes / 1e9 / float(row["wall_s"] or 1)
        row["GB_per_cpu_s"] = corpus.size_bytes / 1e9 / float(row["cpu_s"] or 1)
        rows.append(row)
    return Section(
        title="Search for a text",
        about=f"Warm cache; {about(corpus)}; the text is {peers.NEEDLE!r}, which one rank prints. "
        "Budget: 0.5 GB a second and core, 200 MB.",
        rows=rows,
    )


def _check_search(corpus: Corpus) -> None:
    """Check that clusterrun finds what grep finds, before its speed is measured.

    Raises RuntimeError.
    """
    ours, theirs = (
        subprocess.run(command.argv, stdout=subprocess.PIPE, check=False).stdout.splitlines()
        for command in (peers.ours(corpus, "", *SEARCH, "-o", "raw"), peers.greps(corpus)[0])
    )
    if not theirs or ours != [line.split(b" ", 3)[3] for line in theirs]:
        raise RuntimeError(f"grep finds {len(theirs)} lines, clusterrun {len(ours)}, not the same")


def replicas(setup: Setup) -> Section:
    """Measure torchx, which can search, but not show last lines, order by time, or errors."""
    section = Section(
        title="The same search by torchx",
        about=f"Warm cache; {about(setup.small)}; for torchx the same text is in one file "
        "per rank, as its Slurm scheduler would write it (without stamps, hence smaller). "
        "It reads each file in a separate thread, and has no option for the last lines, "
        "a start time (`since` is ignored on Slurm) or an order by time.",
    )
    if setup.torchx is None:
        section.about += " Not measured: no --torchx PYTHON was named."
        return section
    files = elsewhere(find_or_make_replicas, setup.directory, setup.small)
    commands = [
        peers.ours(setup.small, "clusterrun logs -a -n all -g TEXT", *SEARCH),
        peers.torchx(setup.torchx, setup.small, files),
        peers.grep_replicas(files),
    ]
    found = _warm(commands, setup.runs)
    section.rows = [_row(c, found[c.name], to=found[commands[0].name]) for c in commands]
    return section


def cold(setup: Setup) -> Section:
    """Read once with a cold cache; needs root."""
    section = Section(
        title="Cold cache",
        about=f"Each once, after the page cache was dropped; {about(setup.big)}.",
    )
    commands = [
        peers.ours(setup.big, "clusterrun logs"),
        peers.ours(setup.big, "clusterrun logs -a -n 200", *TAIL),
        peers.tails(setup.big),
        peers.ours(setup.big, "clusterrun logs -a -n all -g TEXT", *SEARCH),
        *peers.greps(setup.big),
        peers.cat(setup.big),
    ]
    try:
        for command in commands:
            os.sync()
            DROP_CACHES.write_text("1")
            once = measure(command)
            section.rows.append(
                {
                    "command": command.name,
                    "first_byte_s": once.first_byte_s,
                    "wall_s": once.wall_s,
                    "cpu_s": once.cpu_s,
                }
            )
    except PermissionError:
        section.about += " Not measured: only root may drop the cache."
    return section


def _warm(commands: Sequence[Command], runs: int) -> dict[str, list[Measured]]:
    """Run each once to measure its memory and fill the cache, then in turns."""
    watched = {command.name: measure(command, watch_memory=True) for command in commands}
    found = interleaved(commands, runs)
    return {name: [watched[name], *found[name]] for name in found}


def _row(
    command: Command, found: Sequence[Measured], *, to: Sequence[Measured]
) -> dict[str, Value]:
    """Return the row of some runs; the first is the one with the memory."""
    watched, *timed = found
    first = [m.first_byte_s for m in timed if m.first_byte_s is not None]
    walls = [m.wall_s for m in timed]
    return {
        "command": command.name,
        "first_byte_s": median(first) if first else None,
        "wall_s": median(walls),
        "walls_s": spread(walls),
        "cpu_s": median([m.cpu_s for m in timed]),
        "wall_ratio": median([m.wall_s / t.wall_s for m, t in zip(timed, to[1:], strict=True)]),
        "largest_RSS_MB": watched.rss_bytes / 1e6,
        "sum_of_RSS_MB": watched.rss_sum_bytes / 1e6,
        "output_bytes": watched.out_bytes or None,
        "runs": len(walls),
    }


SECTIONS: dict[str, Callable[[Setup], Section]] = {
    "first": first_output,
    "size": size_independence,
    "merge": merge,
    "search": search,
    "torchx": replicas,
    "cold": cold,
}
