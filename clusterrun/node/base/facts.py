"""Facts that only the node knows: its GPUs and network interfaces."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping

from clusterrun.health.gpu_answer import GpuAnswer, device_names
from clusterrun.node.base.causes import NodeError, NodeExit

TORCH_ANSWER_S = 300  # a cold import from a busy shared file system
_ASK_TORCH = """
import sys; sys.path[:] = filter(None, sys.path)
import json, torch
print(json.dumps([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]))
"""
Capabilities = tuple[tuple[int, int], ...]


def interface_of(address: str) -> str:
    """Return the network interface that has an address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address.split("%", 1)[0] == address for known in addresses):
            return name
    return ""


def visible_gpus(env: Mapping[str, str], asked: GpuAnswer) -> int | None:
    """Count the GPUs that the scheduler or the user gave this node; None if unknown."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len(device_names(env))
    text = env.get("SLURM_GPUS_ON_NODE", "")
    if text.isdigit():
        return int(text)
    return None if asked.any.absent or asked.any.problem else len(asked.any.gpus)


def gpu_capabilities(env: Mapping[str, str], asked: GpuAnswer) -> Capabilities:
    """Return the compute capability of each GPU that the ranks will see; empty if unknown."""
    if visible_gpus(env, asked) == 0:
        return ()
    found = [(gpu.capability or (0, 0)) for gpu in asked.any.gpus]
    if not found or (0, 0) in found or asked.any.problem:
        return _torch_capabilities()
    return tuple((major, minor) for major, minor in found)


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
