"""NVRx's deterministic diagnosis, to compare with; nvidia-resiliency-ext brings it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

AGENT: Final = "nvidia_resiliency_ext.attribution.restart_agent"

# Causes that each of its classes is a right name for. The classes that are left out name none.
NAMES: Final = {
    "gpu_hardware_fault": (
        "gpu_ecc",
        "gpu_fabric_not_ready",
        "gpu_hang",
        "gpu_hardware",
        "gpu_memory_held_or_faulty",
        "gpu_xid",
    ),
    "cuda_oom": ("cuda_oom",),
    "linux_oom_kill_confirmation": ("host_oom", "dataloader_killed"),
    "infra_policy_event": ("slurm_preempted", "slurm_node_fail"),
    "time_limit": ("slurm_time_limit",),
    "user_cancelled": ("slurm_cancelled",),
    "observed_distributed_operation_timeout": ("nccl_timeout",),
    "framework_crash": ("segfault",),
    "nan_or_inf": ("loss_nan",),
    "artifact_or_path_not_found": ("file_not_found", "command_not_found"),
    "checkpoint_compatibility_mismatch": ("checkpoint_corrupt",),
    "shape_mismatch": ("user_code_exception",),
    "observed_exception": ("user_code_exception",),
    "observed_failure": ("user_code_exception",),
    "argument_validation_failure": ("user_code_exception",),
}


def is_installed() -> bool:
    """Return whether this interpreter has a version with the restart agent."""
    try:
        return importlib.util.find_spec(AGENT) is not None
    except ImportError:
        return False


def names(log: Path) -> tuple[str, ...]:
    """Return the causes that its class for a log names: none if it finds no failure."""
    argv = [sys.executable, "-m", f"{AGENT}.cli", "--disable-l1", str(log)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)["primary_failure"]
    return NAMES.get(found["failure_class"], (found["failure_class"],)) if found else ()
