"""Run the cells of the matrix: real processes, on each kind of cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.local.test_styles import need
from tests.matrix.cells import ALL, AXES, KINDS, Cell, Refused, Senseless, outcome, proofs
from tests.matrix.pairs import pairwise
from tests.road import SCRIPTS, Project

# DeepSpeed's optimizer is compiled once on a machine, for a minute or more.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
Run = Callable[..., subprocess.CompletedProcess[str]]

# `make test` runs these; the others are long.
FIXED = [
    Cell("torch", "ddp", "forge", "local", "2x2"),
    Cell("accelerate", "zero2", "forge", "local", "1x1"),
    Cell("srun", "ddp", "direct", "slurm", "2x1"),
    Cell("module", "none", "accelerate", "ssh", "1x1"),
    Cell("trainer", "fsdp", "forge", "local", "1x2"),
]
OF_ONE_RANK = [
    *(c for c in ALL if c.world == "1x1" and not isinstance(outcome(c), Senseless)),
    Cell("accelerate", "zero3-offload", "forge", "local", "1x1"),
]
CHOSEN = dict.fromkeys([*FIXED, *pairwise(), *OF_ONE_RANK])
MARKS = {"local": [], "slurm": [pytest.mark.slurm], "ssh": [pytest.mark.ssh]}
assert list(MARKS) == AXES["cluster"]


def _param(cell: Cell) -> Any:
    marks = [*MARKS[cell.cluster], *([] if cell in FIXED else [pytest.mark.long])]
    return pytest.param(cell, id=str(cell), marks=marks)


def _run(cell: Cell, request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Copy the scripts to where the cell is submitted; return what runs a command there."""
    scripts = SCRIPTS / "styles"
    if cell.cluster == "ssh":
        laptop = request.getfixturevalue("hosts").laptop
        laptop.run(["cp", "-r", str(scripts), "project"], cwd="/home/ann", check=True)
        copy = 'cp -a "$0" /shared/builds && rm -f /shared/builds/*/lock'  # of a cell that runs
        laptop.run(["sh", "-c", copy, os.environ["TORCH_EXTENSIONS_DIR"]])
        here = {"cwd": "/home/ann/project", "timeout_s": 500}
        return lambda *words: laptop.run(["clusterrun", *words], **here)
    if cell.cluster == "slurm":
        request.getfixturevalue("cluster")  # before the project copies its variables
    shutil.copytree(scripts, tmp_path / "project")
    home = {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    project = Project(path=tmp_path / "project", environ={**os.environ, **home})
    return lambda *words: project.cli(*words, timeout_s=500)


def _argv(cell: Cell) -> list[str]:
    nodes, ranks = cell.size
    # With another ninja than the one that built them, extensions are built anew.
    builds = f"--env TORCH_EXTENSIONS_DIR=/shared/builds --setup PATH={Path(sys.prefix)}/bin:$PATH"
    hosts = f"--hosts {('h1', 'h1,h2')[nodes - 1]} {builds}"
    where = {"local": f"-N {nodes}", "slurm": f"-N {nodes} -c {ranks}", "ssh": hosts}
    how = f"--cluster {cell.cluster} {where[cell.cluster]} --nproc-per-node {ranks} --device cpu"
    how += f" --strategy {cell.strategy} --set launch.launcher={cell.launcher} --max-restarts 0"
    how += " --env STEPS=3 --env HF_HUB_OFFLINE=1 "
    return (how + KINDS[cell.kind].argv.format(nodes=nodes, ranks=ranks)).split()


@pytest.mark.parametrize("cell", [_param(cell) for cell in CHOSEN])
def test_a_cell_of_the_matrix(cell: Cell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    need(KINDS[cell.kind].needs)
    run = _run(cell, request, tmp_path)
    done = run("submit", "--wait", *_argv(cell))
    expected = outcome(cell)
    said = done.stdout + done.stderr
    lines: list[str] = []
    if "Submitted" in done.stdout:
        lines = run("logs", "-a", "-n", "all", "--no-dedup", "--prefix", "none").stdout.splitlines()
        said += "\n".join([run("status").stdout, *lines])
    if isinstance(expected, Refused):
        assert (done.returncode, bool(lines)) == (expected.code, expected.code != 2), said
        assert expected.message in said
        assert expected.hint in said
    else:
        assert done.returncode == 0, said
        assert sorted(line for line in lines if line.startswith("PROOF")) == proofs(cell), said
        assert "not as forks" not in said or cell.kind == "env-file"
