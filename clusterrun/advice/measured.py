"""Read the measurements of a run from its events and its checkpoints."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

from clusterrun.rundir.events import EventType, read
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import checkpoint_files

SHORTEST_S = 0.5  # between two reports that are used; the last step is reported immediately


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The median time of a step, steps and peaks; None if the run has not reported it.

    `timed` is the number of steps behind the median. `gpu_bytes` is the largest allocator peak of a
    rank, `host_bytes` the largest sum of the peaks of a node's ranks.
    """

    step_s: float | None
    steps: int | None
    gpu_bytes: int | None
    host_bytes: int | None
    checkpoint_bytes: int | None
    timed: int = 0


def measure(paths: RunPaths, *, warm_up: float = 0.0) -> Measured:
    """Read what the ranks of a run reported; skip the first reports, a share `warm_up` of all."""
    spans: list[tuple[float, int]] = []
    steps: list[int] = []
    gpu: list[int] = []
    hosts: dict[tuple[str, int], int] = defaultdict(int)
    before: dict[int, tuple[float, int]] = {}
    files = sorted(paths.events_dir.glob("*.jsonl"))
    wanted = (EventType.STEP, EventType.PEAKS)
    for event in chain.from_iterable(read(file, wanted) for file in files):
        if event.type is EventType.PEAKS:
            hosts[event.node, event.attempt] += event.rss_bytes or 0
            gpu.append(event.cuda_allocated_bytes or 0)
        elif event.step is not None:
            at, step = before.get(event.attempt, (event.at, event.step))
            # A counter may repeat or restart, for example in each epoch.
            if event.at - at >= SHORTEST_S and event.step > step:
                spans.append((event.at - at, event.step - step))
            before[event.attempt] = (event.at, event.step)
            steps.append(event.step)
    spans = spans[int(warm_up * len(spans)) :]
    return Measured(
        step_s=statistics.median(span_s / count for span_s, count in spans) if spans else None,
        steps=max(steps, default=None),
        gpu_bytes=max(gpu, default=0) or None,
        host_bytes=max(hosts.values(), default=None),
        checkpoint_bytes=checkpoint_bytes(paths),
        timed=sum(count for _, count in spans),
    )


def checkpoint_bytes(paths: RunPaths) -> int | None:
    """Return the size of the newest complete checkpoint; None without one."""
    newest, _ = checkpoint_files.newest(paths.checkpoints_dir, contents=False)
    if newest is None:
        return None
    try:
        return sum(file.stat().st_size for file in newest.path.rglob("*") if file.is_file())
    except OSError:  # it was removed in the meantime
        return None
