"""init: write a starter clusterrun.yaml, whose lines can be used as they are."""

from __future__ import annotations

import os
from pathlib import Path

import click

from clusterrun.cli.shared import output
from clusterrun.config.resolved import yaml_text
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.shared import files

FILE_NAME = "clusterrun.yaml"
_SCRIPT_LINE = "#script: train.py"

# A settings line is commented out with a bare '#', a sentence with '# '.
STARTER = f"""\
# Read by every clusterrun command in this directory and below.
# Remove a '#' to set a value. The command line wins over this file, CLUSTERRUN_* variables do,
# too; 'clusterrun config show --origin' says where each value comes from.

{_SCRIPT_LINE}                # 'clusterrun submit' trains it
#args: [--epochs, "3"]
#name: my-model                  # of the job and of its runs
#cluster: auto                   # slurm, local (this machine), auto: Slurm where sbatch is found
#run_dir: runs                   # on Slurm: in a file system that the nodes share

slurm:
  #nodes: 2
  #gpus_per_node: 4              # one rank for each GPU
  #cpus_per_task: 32             # of each node
  #mem: 200G                     # of each node
  #time: 1-00:00:00              # days-hours:minutes:seconds
  #partition: gpu
  #account: my-account
  #qos: normal
  #constraint: a100
  #gpu_request: gpus-per-node    # or gres, where the site wants --gres=gpu:4
  #extra: ["--nice=100"]         # any other option of sbatch

launch:
  #strategy: ddp                 # none, ddp, fsdp, zero1, zero2, zero3, zero2-offload, ...
  #mixed_precision: auto         # no, fp16, bf16; auto asks the GPUs
  #timeout: 30m                  # of the process group
  #setup: ["modules: cuda/12.4", "conda: llm"]    # or "venv: DIR", "uv: DIR", a line of bash
  #python: python3              # of the nodes; default: that of conda, venv or uv, else this one

network:
  #preset: auto                  # ethernet, infiniband, efa
  #env: {{NCCL_DEBUG: WARN}}

env:
  #TOKENIZERS_PARALLELISM: "false"

# Tokens and keys are handed on by name from your shell, and never written down.
#pass_env: [WANDB_API_KEY, HF_TOKEN]

# Chosen with 'clusterrun submit --profile a100', or here with a line 'profile: a100'.
profiles:
  #a100: {{slurm: {{partition: gpu, constraint: a100}}, network: {{preset: infiniband}}}}
  #debug: {{slurm: {{partition: debug, time: "00:30:00", nodes: 1}}}}
"""


@click.command("init")
@click.argument("directory", metavar="[DIR]", default=".", type=click.Path())
@click.option("--script", metavar="FILE", type=click.Path(), help="the script that submit trains")
@click.option("--force", is_flag=True, help="replace a clusterrun.yaml that is there")
def command(directory: str, script: str | None, force: bool) -> None:
    """Write a starter clusterrun.yaml."""
    path = Path(directory) / FILE_NAME
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists", hint="clusterrun init --force replaces it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(path, starter_text(script), mode=files.BY_UMASK)
    except OSError as error:
        cause = error.strerror or str(error)
        raise ClusterrunError(f"cannot write {path}", cause=cause) from error
    if script is not None and not (path.parent / script).exists():
        output.warn(f"script '{script}' does not exist in {path.parent.resolve()}")
    output.answer(str(path))
    output.detail("check", "clusterrun config validate")
    output.detail("train", "clusterrun submit" + ("" if script else " train.py"))


def starter_text(script: str | None) -> str:
    """Fill in the script, if one was named."""
    if script is None:
        return STARTER
    start, _, rest = STARTER.partition(_SCRIPT_LINE)
    return f"{start}script: {yaml_text(script)}{rest}"
