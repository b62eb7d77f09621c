"""A directory in which the worker of one rank runs a script, or those of a world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from clusterrun.shared.own_modules import module_argv
from tests.patience import finished, patience
from tests.rank.parent import TORCH, WORKER, Forked, fork

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tests" / "node" / "stub"
REAL = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PRELOADED = {f"{STUB}:{ROOT}": WORKER, str(ROOT): TORCH}
ONE = {"CLUSTERRUN_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
JOIN = "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('joined')"


class Place:
    """A working directory with a spool, and Python to run in it as rank 3."""

    number = 3

    def __init__(self, path: Path) -> None:
        self.path, self.spool = path, path / "spool"

    def write(self, name: str, source: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(textwrap.dedent(source))

    def python(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        base = {name: text for name, text in os.environ.items() if not name.startswith("RANK")}
        return finished(
            [sys.executable, *argv], cwd=self.path, env={**base, "PYTHONPATH": str(ROOT), **env}
        )

    def worker(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.python(*module_argv("", "clusterrun.rank.worker", *argv)[1:], **env)

    def rank(self, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run as rank 3 of a job, with a spool."""
        self.spool.mkdir(exist_ok=True)
        return self.worker(*argv, **{"CLUSTERRUN_SPOOL": str(self.spool), "RANK": "3", **env})

    def events(self, kind: str = "", rank: int | None = None) -> list[dict[str, Any]]:
        path = self.spool / f"rank_{self.number if rank is None else rank}.events"
        events = map(json.loads, path.read_text().splitlines())
        return [event for event in events if kind in ("", event["type"])]

    def last_word(self) -> dict[str, Any]:
        (event,) = self.events("rank_exit")
        return event


class World(Place):
    """Ranks of one job, run one after the other unless they must meet."""

    number = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.env = {
            "CLUSTERRUN_WORLD_SIZE": "2",
            "CLUSTERRUN_LOCAL_WORLD_SIZE": "1",
            "CLUSTERRUN_WORLD_CONTRACT": "1",
            "CLUSTERRUN_TIMEOUT_S": "0",
            "CLUSTERRUN_NODE": "n0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "STUB_STORE": str(path),
        }

    def start(
        self, rank: int, script: str, **changes: str | None
    ) -> Forked | subprocess.Popen[bytes]:
        """Have a parent fork a rank with the stand-ins or the real torch, else start a Python."""
        self.write("s.py", script)
        self.spool.mkdir(exist_ok=True)
        given = {**os.environ, "PYTHONPATH": f"{STUB}:{ROOT}", **self.env, "RANK": str(rank)}
        changes = {**changes, "CLUSTERRUN_SPOOL": str(self.spool)}
        env = {name: text for name, text in {**given, **changes}.items() if text is not None}
        argv = ["-m", "clusterrun.rank.worker", "s.py"]
        if modules := PRELOADED.get(env["PYTHONPATH"] or ""):
            return fork(argv, cwd=self.path, env=env, modules=modules)
        return subprocess.Popen([sys.executable, *argv], cwd=self.path, env=env)

    def run(self, script: str, rank: int = 1, **changes: str | None) -> int:
        return self.start(rank, script, **changes).wait(60 * patience())

    def both(self, script: str, **changes: str) -> list[int]:
        """Run both ranks with the real torch, and return how they ended."""
        ranks = [
            self.start(rank, script, CLUSTERRUN_NODE=f"n{rank}", **REAL, **changes)
            for rank in range(2)
        ]
        return [rank.wait(100 * patience()) for rank in ranks]

    def out(self, rank: int = 1) -> str:
        return (self.spool / f"rank_{rank}.out").read_text()

    def err(self, rank: int = 1) -> str:
        return (self.spool / f"rank_{rank}.err").read_text()
