"""What hosts without Slurm get: their interpreter's home, and commands to type by hand."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

from clusterrun.rendering.bundle import render_bundle
from tests.patience import PATIENCE
from tests.rendering.golden_cases import RESOLVED, two_nodes_of_gpus


def test_each_host_expands_the_home_of_its_interpreter(tmp_path: Path) -> None:
    """Run node.sh up to the interpreter, which here only prints its name."""
    home, run = tmp_path / "a home", tmp_path / "run"
    python = home / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$0"\n')
    python.chmod(0o755)
    run.mkdir()
    plan = dataclasses.replace(
        two_nodes_of_gpus(), python="~/env/bin/python", workdir=str(tmp_path)
    )
    for name, text in render_bundle(plan, resolved_yaml=RESOLVED).files.items():
        (run / name).write_text(text)
    done = subprocess.run(
        ["bash", str(run / "node.sh"), str(run), "1"],
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{python}\n", "")
