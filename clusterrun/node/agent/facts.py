"""What only the node itself knows: its libraries, CPUs, GPUs and network interfaces."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from clusterrun.node.recovery.causes import NodeError, NodeExit

LIBRARIES = ("torch", "accelerate")
TORCH_ANSWER_S = 300  # a cold start from a file system that all nodes load
_ASK_TORCH = """
import sys; sys.path[:] = filter(None, sys.path)
import json, torch
print(json.dumps([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]))
"""
Capabilities = tuple[tuple[int, int], ...]


def versions() -> dict[str, str]:
    """Name the versions that must be equal on all nodes; an absent library is left out."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    return found


def installed_version(library: str) -> str:
    """Return a library's version, empty where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def allocated_cpus(env: Mapping[str, str]) -> int:
    """Count the CPUs that this node's task may use."""
    text = env.get("SLURM_CPUS_PER_TASK", "")
    allowed = len(os.sched_getaffinity(0))
    return min(int(text), allowed) if text.isdigit() and int(text) else allowed


def interface_of(address: str) -> str:
    """Name the network interface that has an address; empty where none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%", 1)[0] == address for known in addresses):
            return name
    return ""


def visible_gpus(env: Mapping[str, str]) -> int | None:
    """Count the GPUs that the scheduler or the user gave this node; None where nothing says it."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len(_device_names(env))
    text = env.get("SLURM_GPUS_ON_NODE", "")
    if text.isdigit():
        return int(text)
    return _nvml_count()


def _device_names(env: Mapping[str, str]) -> list[str]:
    names = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # CUDA ignores what follows an index of -1.
    return [*names[: names.index("-1")]] if "-1" in names else [name for name in names if name]


def _nvml_count() -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # noqa: BLE001 - no library, no driver or no device: NVML's own error class
        return None


def gpu_capabilities(env: Mapping[str, str]) -> Capabilities:
    """Read the compute capability of each GPU that the ranks will see; empty where none is."""
    found = _nvml_capabilities(env)
    return _torch_capabilities() if found is None else found


def _nvml_capabilities(env: Mapping[str, str]) -> Capabilities | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        names = _device_names(env) if "CUDA_VISIBLE_DEVICES" in env else _all_devices(pynvml)
        return tuple(_capability(pynvml, name) for name in names)
    except Exception:  # noqa: BLE001 - no library, no driver or no device: NVML's own error class
        return None


def _all_devices(pynvml: object) -> list[str]:
    count = pynvml.nvmlDeviceGetCount()  # type: ignore[attr-defined]  # the module, untyped
    return [str(index) for index in range(count)]


def _capability(pynvml: object, name: str) -> tuple[int, int]:
    if name.isdigit():
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))  # type: ignore[attr-defined]
    else:
        handle = pynvml.nvmlDeviceGetHandleByUUID(name.encode())  # type: ignore[attr-defined]
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)  # type: ignore[attr-defined]
    return int(major), int(minor)


def _torch_capabilities() -> Capabilities:
    """Ask torch in a process of its own, so that the agent never holds a CUDA context.

    Raises NodeError if it takes too long, which says nothing against the node.
    """
    argv = [sys.executable, "-c", _ASK_TORCH]
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=TORCH_ANSWER_S, check=True, stdin=subprocess.DEVNULL
        )
        rows = json.loads(done.stdout.splitlines()[-1])
        return tuple((int(major), int(minor)) for major, minor in rows)
    except subprocess.TimeoutExpired as error:
        text = f"{socket.gethostname()}: torch was not imported within {TORCH_ANSWER_S} s"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text) from error
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return ()
