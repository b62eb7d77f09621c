"""A directory in which the worker of one rank runs a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.shared.own_modules import module_argv
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Place:
    """A working directory with a spool, and Python to run in it."""

    path: Path

    @property
    def spool(self) -> Path:
        return self.path / "spool"

    def write(self, name: str, source: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(textwrap.dedent(source))

    def python(
        self, *argv: str, before: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        base = {name: text for name, text in os.environ.items() if not name.startswith("RANK")}
        return subprocess.run(
            [*before, sys.executable, *argv],
            cwd=self.path,
            env={**base, "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=60 * patience(),
            check=False,
        )

    def worker(
        self, *argv: str, before: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        return self.python(
            *module_argv("", "clusterrun.rank.worker", *argv)[1:], before=before, **env
        )

    def rank(
        self, *argv: str, before: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run as rank 3 of a job, with a spool; `before` precedes the command."""
        self.spool.mkdir(exist_ok=True)
        env = {"CLUSTERRUN_SPOOL": str(self.spool), "RANK": "3", **env}
        return self.worker(*argv, before=before, **env)

    def events(self) -> list[dict[str, Any]]:
        lines = (self.spool / "rank_3.events").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def last_word(self) -> dict[str, Any]:
        (event,) = [event for event in self.events() if event["type"] == "rank_exit"]
        return event
