"""A run whose ranks hang, with the flight recorders of all of them."""

from __future__ import annotations

import io
import pickle
import tarfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.logs.corpus import RANKS, Corpus, find_or_make, node_name
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import Outcome, write_outcome
from clusterrun.rundir.paths import RunPaths

NODES: Final = 64
CALLS: Final = 2_000  # what torch keeps
LATE: Final = 137  # the rank that does not come
_NODE_BYTES: Final = 100_000


def make(directory: Path) -> Corpus:
    """Return a run of 64 x 8 ranks, in which one rank did not enter the last collective."""
    size = NODES * _NODE_BYTES
    corpus = find_or_make(directory, f"hang{NODES}", nodes=NODES, size_bytes=size)
    paths = RunPaths(root=Path(corpus.run_dir))
    if not paths.outcome(1).exists():
        _replace_logs(paths)
        others, late = _dump(CALLS + 1, is_done=False), _dump(CALLS, is_done=True)
        for node in range(NODES):
            _write(paths.flight_dumps(1, node_name(node)), node, others, late)
        write_outcome(paths, _outcome(corpus))
    return corpus


def _replace_logs(paths: RunPaths) -> None:
    """Leave out how this corpus fails otherwise."""
    for node in range(NODES):
        log = paths.log(1, node_name(node))
        log.write_bytes(b"")
        log.with_suffix(".err").write_bytes(b"")


def _write(path: Path, node: int, others: bytes, late: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for rank in range(RANKS * node, RANKS * (node + 1)):
            data = late if rank == LATE else others
            member = tarfile.TarInfo(f"rank_{rank}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def _dump(last: int, *, is_done: bool) -> bytes:
    calls = [_call(number, retired=number < last or is_done) for number in range(2, last + 1)]
    members = str(list(range(RANKS * NODES)))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": members}}
    return pickle.dumps({"version": "2.10", "entries": calls, "pg_config": config})


def _call(number: int, *, retired: bool) -> dict[str, Any]:
    """Return a collective as torch 2.13 records it, with a stack of 20 frames."""
    inner = [
        {"name": f"f{n}", "filename": "/env/site-packages/torch/nn/modules/module.py", "line": n}
        for n in range(19)
    ]
    return {
        "frames": [*inner, {"name": "step", "filename": "/home/me/train.py", "line": 88}],
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": int(time.time() * 1e9),
        "input_sizes": [[4096, 4096]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 4096]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if retired else "started",
        "retired": retired,
        "is_p2p": False,
    }


def _outcome(corpus: Corpus) -> Outcome:
    return Outcome(
        attempt=1,
        job_id="L1",
        started_at=corpus.begin,
        ended_at=corpus.end,
        nodes=tuple(node_name(node) for node in range(NODES)),
        code=126,
        cause=Cause.HUNG,
        reason="no step ended within the hang timeout",
    )
