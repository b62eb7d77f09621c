"""Whole files, reviewed like code; a missing golden file is a failure."""

from __future__ import annotations

import json
import os
import shutil
import sys
from itertools import product
from pathlib import Path

from tests.checkout import ROOT
from tests.patience import finished
from tests.rendering.golden_cases import GOLDEN, SCRIPTS, bundle_of, golden_files

# Not one of ours: ZeRO-1 with the optimizer's states in the host's memory.
NEW_STRATEGY = """{# strategy
order: 11
engine: deepspeed
shards: optimizer
offloads: optimizer
#}
{% extends "_zero.yaml.j2" %}
{% block zero %}
  zero_stage: 1
  offload_optimizer_device: cpu
{% endblock %}
"""


def test_the_files_are_as_they_were_reviewed() -> None:
    files = {path: path.read_text() for path in GOLDEN.rglob("*") if path.is_file()}
    assert golden_files() == files


def test_bash_reads_the_scripts_without_a_word() -> None:
    for case, name in product(SCRIPTS, ("job.sbatch", "node.sh", "env.sh")):
        done = finished(["bash", "-n"], input=bundle_of(case).files[name])
        assert (done.returncode, done.stderr) == (0, ""), (case, name)


def test_one_file_adds_a_strategy(tmp_path: Path) -> None:
    for name in ("clusterrun", "templates", "accelerate_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with byte code
    (tmp_path / "accelerate_configs" / "zero1-offload.yaml.j2").write_text(NEW_STRATEGY)
    (tmp_path / "train.py").write_text("")

    def answer(*argv: str) -> str:
        done = finished(
            [sys.executable, *argv], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    world = ("-N1", "--gpus-per-node", "4")
    asked = (*world, "--strategy", "zero1-offload")
    script = answer("-m", "clusterrun", "render", "--cluster", "slurm", *asked, "train.py")
    assert "strategy zero1-offload." in script
    assert "offload_optimizer_device: cpu" in script
    plan = ("-m", "clusterrun", "plan", "--json", "--model", "llama-2-7b", "--seq-len", "1024")
    gpu = ("--gpu", "h100-80g", "--host-mem", "1TiB")
    answered = json.loads(answer(*plan, *gpu, *asked))
    assert answered["inputs"]["strategy"] == "zero1-offload"
    on_gpu = {term["name"] for term in answered["gpu_memory"]["terms"]}
    assert "weights" in on_gpu
    assert "optimizer" not in on_gpu
    found = json.loads(answer(*plan, *gpu, *world, "--recommend", "--effective-batch", "64"))
    assert "zero1-offload" in [choice["strategy"] for choice in found["recommended"]]
    answer(str(ROOT / "docs" / "reference" / "generate.py"), str(tmp_path))
    assert "zero1, zero1-offload, zero2," in (tmp_path / "commands.md").read_text()
