"""A project of its own for each test, and a PATH on which only the programs are that it wants."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from clusterrun.backends import interpreters
from clusterrun.cli.main import main

INSTALLED = {
    **{"clusterrun": "1.0", "torch": "2.13.0", "accelerate": "1.15.0"},
    "deepspeed": "0.19.8",
}
TOOLS = ("bash", "sh", "cat", "cp", "env", "mkdir", "mv", "rm", "sleep", "true")


@dataclass(frozen=True, kw_only=True)
class Said:
    """How a command line ended and what it wrote."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A directory that clusterrun runs in, and the programs on its PATH."""

    path: Path
    bin: Path
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *args: str) -> Said:
        """Run one command line, in this process: fast, and constants can be replaced."""
        self.capsys.readouterr()
        code = main(args)
        captured = self.capsys.readouterr()
        return Said(code=int(code), out=captured.out, err=captured.err)

    def program(self, name: str, text: str) -> Path:
        """Put a program on PATH; it leaves its arguments in `<name>.argv`, one a line."""
        path = self.bin / name
        record = f'printf "%s\\n" "$@" >> "{self.bin}/{name}.argv"'
        path.write_text(f"#!/bin/bash\n{record}\n{text}\n")
        path.chmod(0o755)
        return path

    def asked(self, name: str) -> list[str]:
        """Return the arguments that a program was given, over all its calls."""
        path = self.bin / f"{name}.argv"
        return path.read_text().splitlines() if path.exists() else []

    def slurm(self, sbatch: str = "echo 4711") -> None:
        """Pretend to be a login node; `sbatch` is what that program does."""
        self.program("sbatch", sbatch)
        for name in ("srun", "squeue", "sacct", "scontrol", "scancel", "sinfo"):
            self.program(name, "exit 0")

    def files(self) -> list[str]:
        """List all files and directories of the project."""
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*"))


@cache
def _tools() -> list[tuple[str, str]]:
    places = [(name, shutil.which(name)) for name in TOOLS]
    missing = [name for name, place in places if not place]
    assert not missing, f"this machine has no {missing}"
    return [(name, place) for name, place in places if place]


@pytest.fixture(name="here")
def _here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    project, programs = tmp_path / "project", tmp_path / "bin"
    project.mkdir()
    programs.mkdir()
    for name, place in _tools():
        (programs / name).symlink_to(place)
    for name in list(os.environ):
        if name.startswith(("CLUSTERRUN_", "SLURM", "SBATCH", "XDG_", "FORCE_COLOR", "CUDA")):
            monkeypatch.delenv(name)
    for name in ("STATE", "CONFIG", "CACHE", "RUNTIME"):
        suffix = "DIR" if name == "RUNTIME" else "HOME"
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setenv(f"XDG_{name}_{suffix}", str(tmp_path / name.lower()))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("CLUSTERRUN_SITE_CONFIG", "/dev/null")
    monkeypatch.delenv("PWD", raising=False)
    monkeypatch.chdir(project)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    # As if the job's packages were installed: these tests also run without them.
    monkeypatch.setattr(interpreters, "own_version", INSTALLED.__getitem__)
    (project / "train.py").write_text("print('hello')\n")
    return CommandLine(path=project, bin=programs, capsys=capsys)
