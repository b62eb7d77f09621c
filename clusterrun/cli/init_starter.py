"""The text of a starter clusterrun.yaml, with the facts of this site filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_WIDTH: Final = 34  # where the comments begin
_SETTING: Final = re.compile(r"( *)#?(\w+):(?: .*)?")
_SECTION: Final = re.compile(r"(\w+):$")

# A settings line is commented out with a bare '#', a sentence with '# '.
STARTER: Final = """\
# Every clusterrun command in this directory and below reads this file.
# Remove a '#' to set a value. The command line and CLUSTERRUN_* variables override this file.
# To see the source of each value, run: clusterrun config show --origin

#script: train.py                 # the script that 'clusterrun submit' trains
#args: [--epochs, "3"]            # its arguments
#name: my-model                   # of the job and of its runs
#cluster: auto                    # slurm, local (this machine) or auto: Slurm if sbatch is found
#run_dir: runs                    # logs and records; on Slurm in a file system that the nodes share

slurm:
  #partition: gpu
  #account: my-account
  #qos: normal
  #time: 1-00:00:00               # days-hours:minutes:seconds
  #nodes: 2
  #gpus_per_node: 4               # one rank per GPU
  #gpu_type: a100                 # requests gpu:a100:4
  #cpus_per_task: 32              # per node
  #mem: 200G                      # per node
  #constraint: a100
  #gpu_request: gpus-per-node     # or gres, if the site expects --gres=gpu:4
  #extra: ["--nice=100"]          # any other options of sbatch

launch:
  #nproc_per_node: 2              # ranks per node, if not one per GPU
  #device: auto                   # cuda, cpu or auto
  #strategy: ddp                  # none, ddp, fsdp, zero1, zero2, zero3, zero2-offload, ...
  #mixed_precision: auto          # no, fp16, bf16 or auto: the best that the GPUs support
  #timeout: 30m                   # of the process group
  #setup: ["modules: cuda/12.4", "conda: llm"]    # also "venv: DIR", "uv: DIR" or a line of bash
  #python: python3                # on the nodes; default: that of conda, venv or uv, else this one

network:
  #preset: auto                   # ethernet, infiniband, efa
  #env: {NCCL_DEBUG: WARN}

env:
  #TOKENIZERS_PARALLELISM: "false"

# Pass tokens and keys by name: their values come from your shell and are never stored.
#pass_env: [WANDB_API_KEY, HF_TOKEN]

# Choose one with 'clusterrun submit --profile a100', or with a line 'profile: a100' above.
profiles:
  #a100: {slurm: {partition: gpu, constraint: a100}, network: {preset: infiniband}}
  #debug: {slurm: {partition: debug, time: "00:30:00", nodes: 1}}
"""


class Known(NamedTuple):
    """A value as YAML, and a comment beside it ("": that of the starter); None: only a comment."""

    value: str | None
    comment: str = ""


def filled(known: Mapping[str, Known]) -> str:
    """Fill in what is known, by key.

    >>> filled({"slurm.nodes": Known("3", "of 8")}).splitlines()[15]
    '  nodes: 3                        # of 8'
    """
    lines, section = [], ""
    for line in STARTER.splitlines():
        found, heading = _SETTING.match(line), _SECTION.match(line)
        if heading:
            section = heading[1]
        elif found and (value := known.get(f"{section}.{found[2]}" if found[1] else found[2])):
            line = _written(line, found[1], found[2], value)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _written(line: str, indent: str, name: str, known: Known) -> str:
    setting, _, comment = line.partition(" # ")
    if known.value is not None:
        setting = f"{indent}{name}: {known.value}"
    comment = known.comment or comment
    return f"{setting.rstrip():<{_WIDTH}}# {comment}" if comment else setting.rstrip()
