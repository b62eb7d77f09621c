"""What a run really took, read from its events and its checkpoints."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clusterrun import checkpoints
from clusterrun.paths import RunPaths

SHORTEST_S = 0.5  # between two reports of steps; those of a last step come at once


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The median time of a step, steps and peaks; None for what the run has not told.

    `gpu_bytes` is the largest peak of the allocator of a rank, `host_bytes` the largest sum of
    the peaks of a node's ranks.
    """

    step_s: float | None
    steps: int | None
    gpu_bytes: int | None
    host_bytes: int | None
    checkpoint_bytes: int | None


def measure(paths: RunPaths) -> Measured:
    """Read what the ranks of a run have told."""
    spans: list[tuple[float, int]] = []
    steps: list[int] = []
    gpu: list[int] = []
    hosts: dict[tuple[str, int], int] = defaultdict(int)
    before: dict[int, tuple[float, int]] = {}
    for event in _events(paths):
        attempt = event["attempt"]
        if event["type"] == "step":
            now = (float(event["ts"]), int(event["step"]))
            if attempt in before and now[0] - before[attempt][0] >= SHORTEST_S:
                spans.append((now[0] - before[attempt][0], now[1] - before[attempt][1]))
            before[attempt] = now
            steps.append(now[1])
        else:
            hosts[str(event["node"]), attempt] += int(event["rss_bytes"])
            gpu.append(int(event.get("cuda_allocated_bytes", 0)))
    return Measured(
        step_s=statistics.median(s / n for s, n in spans if n > 0) if spans else None,
        steps=max(steps, default=None),
        gpu_bytes=max(gpu, default=0) or None,
        host_bytes=max(hosts.values(), default=None),
        checkpoint_bytes=_checkpoint_bytes(paths),
    )


def _events(paths: RunPaths) -> Iterator[dict[str, Any]]:
    """Yield the events that tell of steps and of peaks; a damaged line tells nothing."""
    for file in sorted(paths.events_dir.glob("*.jsonl")):
        with open(file, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"step"' not in line and '"peaks"' not in line:
                    continue
                event = _event(line)
                if event is not None:
                    yield event


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
        kind = event["type"]
        if kind == "step":
            int(event["step"]), float(event["ts"])
        elif kind == "peaks":
            str(event["node"]), int(event["rss_bytes"]), int(event.get("cuda_allocated_bytes", 0))
        return event if kind in ("step", "peaks") and isinstance(event["attempt"], int) else None
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _checkpoint_bytes(paths: RunPaths) -> int | None:
    newest, _ = checkpoints.newest(paths.checkpoints_dir, contents=False)
    if newest is None:
        return None
    try:
        return sum(file.stat().st_size for file in newest.path.rglob("*") if file.is_file())
    except OSError:  # it was one too many just now
        return None
