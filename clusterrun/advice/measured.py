"""Read the measurements of a run from its events and its checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from clusterrun.config.settings import Resolved
from clusterrun.errors import ClusterrunError
from clusterrun.estimates.speed import Scaling
from clusterrun.rundir.events import EventType, read
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared import checkpoint_files, files
from clusterrun.shared.typed import of_schema

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
    from statistics import median  # slow to import, and plan often measures nothing

    spans = spans[int(warm_up * len(spans)) :]
    return Measured(
        step_s=median(span_s / count for span_s, count in spans) if spans else None,
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


SCHEMA: Final = "clusterrun.scaling/1"


def to_object(scaling: Scaling) -> dict[str, Any]:
    """Return a result as JSON values, each point with its gain over the first."""
    points = [{**dataclasses.asdict(x), **scaling.gain(x)._asdict()} for x in scaling.points]
    return {"schema": SCHEMA, **dataclasses.asdict(scaling), "points": points}


def store(path: Path, scaling: Scaling) -> None:
    """Write scaling.json whole, readable by its owner only. Raises ClusterrunError."""
    try:
        files.write_whole(path, json.dumps(to_object(scaling), indent=2) + "\n")
    except OSError as error:
        raise ClusterrunError(f"cannot write {path}", cause=str(error)) from error


def stored_scaling(resolved: Resolved) -> tuple[Scaling, ...]:
    """Return the results for a configuration's script, the newest first."""
    spec = resolved.spec
    if spec.script is None and spec.module is None:
        return ()
    runs_dir = RunsDir(root=Path(os.path.normpath(resolved.cwd / spec.run_dir)))
    found = [_read(path) for path in runs_dir.root.glob(f"*/{runs_dir.scaling('').name}")]
    own = [x for x in found if x is not None and x.script == script_of(resolved)]
    return tuple(sorted(own, key=lambda x: x.measured_at, reverse=True))


def script_of(resolved: Resolved) -> str:
    """Name what a configuration runs: the script's path, or `-m MODULE`."""
    spec = resolved.spec
    if spec.module is not None:
        return f"-m {spec.module}"
    return os.path.normpath(resolved.cwd / (spec.script or ""))


def _read(path: Path) -> Scaling | None:
    try:
        found = of_schema(Scaling, files.read_json(path), SCHEMA)
    except ValueError:
        return None
    return found if found.points else None
