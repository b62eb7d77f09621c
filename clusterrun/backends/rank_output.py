"""Read the progress of a training that reports no steps from the end of rank 0's output."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from clusterrun.backends.evidence import Evidence, ProgressSource, TrainingProgress
from clusterrun.logformat.bars import Text, find_bar
from clusterrun.logformat.lines import LINE_BYTES, LogLine, Stream, parse_line
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import end_of

LAST_BYTES = 2 * LINE_BYTES  # always contains the start of a line


def with_output(paths: RunPaths, evidence: Evidence) -> TrainingProgress:
    """Add when the ranks on the head's node last wrote, and printed steps if none were reported."""
    own = evidence.progress
    lines = list(_lines(paths, evidence))
    if not lines:
        return own
    own = replace(own, output_at=lines[-1].epoch_us / 1e6)
    rank_0 = [line for line in lines if line.rank == 0]
    return own if own.step is not None else _printed(rank_0, own)


def _lines(paths: RunPaths, evidence: Evidence) -> Iterator[LogLine]:
    if not evidence.nodes:
        return
    node = evidence.nodes[0]
    for text in end_of(paths.log(evidence.attempt, node), LAST_BYTES).split(b"\n")[:-1]:
        line = parse_line(text, node=node, offset=0, near_us=0)
        if line.rank is not None and line.stream in (Stream.OUT, Stream.ERR):
            yield line


def _printed(lines: Sequence[LogLine], own: TrainingProgress) -> TrainingProgress:
    """Take the steps of the progress bar, or of the lines that count them, in both streams."""
    texts = (_texts(lines, stream) for stream in (Stream.ERR, Stream.OUT))
    bar = find_bar(heapq.merge(*texts))
    if bar is None:
        return own
    return replace(
        own,
        step=bar.count,
        total=bar.total,
        rate_per_s=bar.rate_per_s,
        reported_at=bar.moved_at,
        source=ProgressSource.OUTPUT,
        bar=bar.description,
        unit=bar.unit,
    )


def _texts(lines: Sequence[LogLine], stream: Stream) -> list[Text]:
    """Join the pieces of cut lines: a progress bar may begin in one and end in the next."""
    texts: list[Text] = []
    begun = ""
    for line in lines:
        if line.stream is stream:
            text = begun + line.text.decode("utf-8", "replace")
            texts.append(Text(line.epoch_us / 1e6, text))
            begun = text.rpartition("\r")[2] if line.partial else ""
    return texts
