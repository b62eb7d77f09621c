"""GPUAlert's public logs, and its own rules if `gpualert` is installed, to compare with.

Their repository, Parv-01/gpualert-eval on GitHub, has 474 logs of 15 classes: most were printed by
programs that fail on purpose, 30 are from threads of users. `labels.jsonl` has the classes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

# Causes that each class is a right name for, chosen before any answer was seen.
CLASSES: Final = {
    "cuda_oom": ("cuda_oom",),
    "nccl": (
        *("nccl_timeout", "nccl_connect_refused", "nccl_interface_missing", "peer_died"),
        *("nccl_unique_id_timeout", "nccl_version_mismatch", "nccl_library_mismatch"),
        *("nccl_net_plugin_missing", "nccl_cuda_error", "nccl_internal_assert"),
        *("collective_desync", "hang_rank_missing", "rendezvous_unreachable"),
    ),
    "cuda_runtime": ("device_assert", "cuda_illegal_access", "gpu_memory_held_or_faulty"),
    "ram_oom": ("host_oom",),
    "oom_killer": ("host_oom",),
    "segfault": ("segfault",),
    "file_not_found": ("file_not_found",),
    "permission": ("permission_denied",),
    "missing_module": ("module_missing",),
    "device_mismatch": ("device_mismatch",),
    "nan_loss": ("loss_nan",),
    "traceback": ("user_code_exception",),
    "div_zero": ("user_code_exception",),  # of these three, the named exception must be right, too
    "assertion": ("user_code_exception",),
    "runtime_error": ("user_code_exception", "no_kernel_image", "state_dict_mismatch"),
}
EXCEPTIONS: Final = {
    "div_zero": "ZeroDivisionError",
    "assertion": "AssertionError",
    "runtime_error": "RuntimeError",
}
# What GPUAlert 0.1.6 calls each class.
NAMES: Final = {
    "GPU out-of-memory (CUDA OOM)": "cuda_oom",
    "NCCL communication error": "nccl",
    "CUDA runtime error": "cuda_runtime",
    "System out-of-memory (RAM)": "ram_oom",
    "Process killed by OS (OOM)": "oom_killer",
    "Segmentation fault": "segfault",
    "File not found": "file_not_found",
    "Permission denied": "permission",
    "Missing Python module": "missing_module",
    "Tensor device mismatch": "device_mismatch",
    "NaN detected in loss": "nan_loss",
    "Python exception (traceback)": "traceback",
    "Division by zero": "div_zero",
    "Assertion failed": "assertion",
    "Python RuntimeError": "runtime_error",
}


def is_installed() -> bool:
    """Return whether this interpreter has GPUAlert."""
    return importlib.util.find_spec("gpualert") is not None


def class_of(log: Path, code: int) -> str:
    """Return the class that GPUAlert finds for a log of a program that exited with `code`."""
    from gpualert.parse_errors import parse_errors

    answer = str(parse_errors("", log.read_text(errors="replace"), code))
    return NAMES.get(answer.partition("\n")[0].strip(), "")
