"""What a thousand nodes of eight ranks do to the files that all others read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.evidence import read_evidence
from clusterrun.rundir.paths import RunPaths
from tests.patience import patience

NODES = [f"gpu-h100-rack{number // 32:02}-{number:04}" for number in range(1000)]
STEPS = 10_000


def _event(kind: str, **fields: Any) -> str:
    return json.dumps({"ts": 1.0, "type": kind, "attempt": 1, "node": NODES[0], **fields}) + "\n"


@pytest.fixture(name="paths")
def _paths(tmp_path: Path) -> RunPaths:
    """Lay out a run whose first node has trained for hours."""
    paths = RunPaths(root=tmp_path)
    paths.attempt(1).mkdir(parents=True)
    paths.events_dir.mkdir()
    paths.world(1).write_text(json.dumps({"nodes": NODES, "procs_per_node": 8}))
    begin = [
        _event("started", node_rank=0, nodes=NODES, host=NODES[0]),
        *(_event("rank_start", rank=rank, host=NODES[0]) for rank in range(8)),
        _event("world_ready", world_size=8000, hosts=NODES),
    ]
    steps = [_event("step", ts=2.0 + n, rank=0, step=n, total=9999) for n in range(STEPS)]
    paths.events(NODES[0]).write_text("".join(begin + steps))
    for node in NODES[1:]:
        paths.events(node).write_text(_event("started", node=node, host=node))
    return paths


def test_the_proven_world_of_a_thousand_nodes_is_still_seen_after_many_steps(
    paths: RunPaths,
) -> None:
    begin = time.monotonic()
    seen = read_evidence(paths)
    assert (seen.world_size, len(seen.nodes)) == (8000, 1000)
    assert seen.progress.step == STEPS - 1
    assert time.monotonic() - begin < 5 * patience()
