"""What a run uses on its nodes, in words and as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared.times import timestamp
from clusterrun.rundir.usage import Sample, percent, share_text


def usage_lines(job: JobStatus) -> Iterator[tuple[str, str]]:
    """Yield the label and text of the fullest memories: now, or of an ended job the peaks."""
    hosts, gpus, is_over = [], [], job.state.is_terminal
    for node, each in job.usage.items():
        used = each.host_peak_bytes if is_over else each.host_bytes
        hosts.append((used, each.host_limit_bytes, node))
        for gpu in each.gpus:
            used = gpu.memory_peak_bytes if is_over else gpu.memory_bytes
            gpus.append((used, gpu.memory_total_bytes, f"GPU {gpu.index} of {node}"))
    found = [text for text in (_worst("host", hosts), _worst("GPU", gpus)) if text]
    if found:
        yield "memory", f"{'peaks: ' * is_over}{', '.join(found)}"


def _worst(what: str, rows: list[tuple[int | None, int | None, str]]) -> str:
    known = [row for row in rows if percent(*row[:2]) is not None]
    used, limit, where = max(known, key=lambda row: percent(*row[:2]) or 0, default=(0, 0, ""))
    return f"{what} {share_text(used, limit)}{f' ({where})' * (len(rows) > 1)}" * bool(known)


def usage_object(job: JobStatus) -> list[dict[str, Any]]:
    """Describe what is used on each node for JSON; null is unknown."""
    return [_node(node, sample, time.time()) for node, sample in job.usage.items()]


def _node(node: str, sample: Sample, now: float) -> dict[str, Any]:
    data = {name: value for name, value in vars(sample).items() if name not in ("at", "attempt")}
    return {
        "node": node,
        "sampled": timestamp(sample.at),
        "age_s": round(max(0.0, now - sample.at), 1),
        **data,
        "ranks": {str(rank): used for rank, used in sample.ranks},
        "gpus": [vars(gpu) for gpu in sample.gpus],
        "alerts": [
            {"kind": each.kind.value, "gpu": each.gpu, "since": timestamp(each.at)}
            for each in sample.alerts
        ],
    }
