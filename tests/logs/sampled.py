"""A run whose log has lines of every kind."""

from __future__ import annotations

import json

import pytest

from tests.logs.corpus import T0, raw, write_side_file
from tests.logs.runs import LogsCommand

SECOND = 1_000_000


@pytest.fixture
def run(here: LogsCommand) -> LogsCommand:
    """Return a run of 2 nodes x 8 ranks that has ended, with side files and world."""
    here.start()
    here.write(
        "n1",
        raw(T0, None, "a", "8 ranks start"),
        raw(T0 + 1 * SECOND, 0, "o", "step 1 loss 2.5"),
        raw(T0 + 1 * SECOND, 3, "o", "three"),
        raw(T0 + 2 * SECOND, 0, "e", "UserWarning: slow"),
        raw(T0 + 3 * SECOND, 0, "o", "step 2 loss 2.25"),
        raw(T0 + 6 * SECOND, None, "l", "launcher says"),
        raw(T0 + 7 * SECOND, None, "z", "1 rank 9 failed"),
    )
    write_side_file(
        here.paths,
        1,
        "n1",
        [
            raw(T0, None, "a", "- 0 8 ranks start"),
            raw(T0 + 6 * SECOND, None, "l", "- 203 launcher says"),
        ],
    )
    trouble = [
        raw(T0 + 4 * SECOND, 9, "o", "about to fail"),
        raw(T0 + 5 * SECOND, 9, "e", "ValueError: bad"),
        raw(T0 + 5 * SECOND, 8, "o", "eight"),
        raw(T0 + 5 * SECOND, 9, "o", "after"),
    ]
    here.write("n2", *trouble)
    offset = len(trouble[0])
    write_side_file(
        here.paths, 1, "n2", [raw(T0 + 5 * SECOND, 9, "e", f"exception {offset} ValueError: bad")]
    )
    world = {"schema": "clusterrun.world/1", "nodes": ["n1", "n2"], "procs_per_node": 8}
    here.paths.world(1).write_text(json.dumps(world))
    here.end("FAILED", 1)
    return here
