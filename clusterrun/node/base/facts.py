"""Facts that only the node knows: its GPUs and network interfaces."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from clusterrun.health.gpu_answer import device_names
from clusterrun.node.base.causes import NodeError, NodeExit

TORCH_ANSWER_S = 300  # a cold import from a busy shared file system
_ASK_TORCH = """
import sys; sys.path[:] = filter(None, sys.path)
import json, torch
print(json.dumps([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]))
"""
Capabilities = tuple[tuple[int, int], ...]
_T = TypeVar("_T")


def interface_of(address: str) -> str:
    """Return the network interface that has an address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%", 1)[0] == address for known in addresses):
            return name
    return ""


def visible_gpus(env: Mapping[str, str]) -> int | None:
    """Count the GPUs that the scheduler or the user gave this node; None if unknown."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len(device_names(env))
    text = env.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if text.isdigit() else _nvml(lambda nvml: int(nvml.nvmlDeviceGetCount()))


def _nvml(ask: Callable[[Any], _T]) -> _T | None:
    """Return NVML's answer; None if it has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return ask(pynvml)
    except Exception:  # noqa: BLE001 - no library, no driver or no device: NVML's own error class
        return None


def gpu_capabilities(env: Mapping[str, str]) -> Capabilities:
    """Return the compute capability of each GPU that the ranks will see; empty if unknown."""
    found = _nvml(partial(_nvml_capabilities, env))
    return _torch_capabilities() if found is None else found


def _nvml_capabilities(env: Mapping[str, str], nvml: Any) -> Capabilities:
    if "CUDA_VISIBLE_DEVICES" in env:
        handles = [_handle(nvml, name) for name in device_names(env)]
    else:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    found = (nvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles)
    return tuple((int(major), int(minor)) for major, minor in found)


def _handle(nvml: Any, name: str) -> Any:
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name.encode())


def _torch_capabilities() -> Capabilities:
    """Ask torch in a child process: the agent must never hold a CUDA context.

    Raises NodeError if that takes too long; the node may still be fit.
    """
    argv = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=TORCH_ANSWER_S, check=True, stdin=subprocess.DEVNULL
        )
        rows = json.loads(done.stdout.splitlines()[-1])
        return tuple((int(major), int(minor)) for major, minor in rows)
    except subprocess.TimeoutExpired as error:
        text = f"{socket.gethostname()}: importing torch took more than {TORCH_ANSWER_S} s"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return ()
