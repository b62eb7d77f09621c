"""Start the example in small real worlds of CPU processes."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from clusterrun.shared.control_page import ControlPage, SavePoint
from tests.patience import finished
from tests.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_lm.py"
GLOO = Path(__file__).with_name("gloo.py")

DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero2-offload": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
    "zero3-offload": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
    },
}
# accelerate's launcher gives these from a config only where it finds a GPU
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
# what a script finds in a run of clusterrun, besides its attempt
IN_A_RUN = {
    "CLUSTERRUN_RUN_DIR": "/run",
    "CLUSTERRUN_JOB_ID": "1",
    "CLUSTERRUN_NODE": "n0",
    "CLUSTERRUN_WORLD_SIZE": "2",
}


def accelerate_config(strategy: str, processes: int, json_file: Path | None) -> dict[str, Any]:
    """Return the accelerate config of one machine with these CPU processes."""
    plain = strategy in {"ddp", "fsdp"}
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if plain else "DEEPSPEED",
        "use_cpu": strategy == "ddp",
        "num_machines": 1,
        "num_processes": processes,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1",
        "main_process_port": free_port(),
        "mixed_precision": "no",
    }
    if json_file:
        config["deepspeed_config"] = {"deepspeed_config_file": str(json_file)}
        del config["mixed_precision"]
    elif not plain:
        config["deepspeed_config"] = DEEPSPEED[strategy] | {"gradient_clipping": 1.0}
    return config


def command(
    folder: Path,
    strategy: str,
    processes: int,
    *args: str,
    json_file: Path | None = None,
    example: Path = SCRIPT,
) -> tuple[list[str], Mapping[str, str]]:
    """Return argv and environment that start the example; `none` needs no launcher."""
    clean = ("ACCELERATE_", "CLUSTERRUN_", "DS_", "LOCAL_", "MASTER_", "RANK", "WANDB_", "WORLD_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(clean)}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if strategy == "none":
        return [sys.executable, str(example), *args], env
    file = folder / f"{strategy}-{processes}.yaml"
    file.write_text(yaml.safe_dump(accelerate_config(strategy, processes, json_file)))
    script = [str(example)]
    if strategy == "ddp":
        env["ACCELERATE_USE_CPU"] = "true"
    else:
        env |= {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
        env |= FSDP if strategy == "fsdp" else {}
        script = [str(GLOO), *script]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    return [*launch, *script, *args], env


def train(
    folder: Path,
    strategy: str,
    processes: int,
    *args: str,
    json_file: Path | None = None,
    environ: Mapping[str, str] = MappingProxyType({}),
    example: Path = SCRIPT,
) -> subprocess.CompletedProcess[str]:
    """Run the example to its end and return what it printed."""
    argv, env = command(folder, strategy, processes, *args, json_file=json_file, example=example)
    return finished(argv, timeout_s=300, env={**env, **environ}, cwd=folder)


def printed(run: subprocess.CompletedProcess[str]) -> str:
    """Return what a process printed that ended well."""
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def held_out(text: str) -> tuple[float, float]:
    """Return the loss after the training and before it."""
    ((after, before),) = re.findall(r"held-out loss (\S+) \(untrained (\S+)\)", text)
    return float(after), float(before)


def asked_to_leave(folder: Path, step: int) -> dict[str, str]:
    """Let both ranks of a run in this new folder leave, saved, after a step; return their job."""
    folder.mkdir()
    page = ControlPage(folder / "control", 2)
    page.hold(1)
    page.decide(SavePoint(1, step))
    return IN_A_RUN | {"CLUSTERRUN_ATTEMPT": "1", "CLUSTERRUN_SPOOL": str(folder)}
