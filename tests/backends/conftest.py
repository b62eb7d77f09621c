"""Executables of our own on PATH, for states that a real Slurm can't be brought into."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clusterrun.shared import shell


class Stubs:
    """Programs that write down how they were called and then do what the test says.

    PATH holds nothing else: a body may use bash's builtins only.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "calls"

    def add(self, name: str, body: str = "") -> None:
        file = self.directory / name
        file.write_text(f"{RECORDER.format(log=self.log)}{body}\n")
        file.chmod(0o755)

    def calls(self, name: str | None = None) -> list[list[str]]:
        """Return the argv of every call, of one program or of all."""
        return [argv for argv, _ in self._rows() if name in (None, argv[0])]

    def environ(self, name: str) -> dict[str, str]:
        """Return the environment of the last call of a program."""
        last = [pairs for argv, pairs in self._rows() if argv[0] == name][-1]
        return dict(pair.split("=", 1) for pair in last)

    def _rows(self) -> list[tuple[list[str], list[str]]]:
        if not self.log.exists():
            return []
        rows = [row.split("\x1d") for row in self.log.read_text().split("\x1e")[:-1]]
        return [(argv.split("\x1f")[:-1], pairs.split("\x1f")[:-1]) for argv, pairs in rows]


# Words and variables end with a unit separator, both lists with separators above it.
RECORDER = r"""#!/bin/bash
{{
  printf '%s\037' "${{0##*/}}" "$@"
  printf '\035'
  while read -r name; do printf '%s=%s\037' "$name" "${{!name}}"; done < <(compgen -e)
  printf '\036'
}} >> '{log}'
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "SQUEUE"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(shell, "PAUSES_S", (0.01, 0.01))
    return Stubs(directory)


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is remembered between commands out of the user's home."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
