"""The memory cgroups (version 1) that a slurmd makes for its node."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tests.cluster.shape import Shape

ROOT = Path("/sys/fs/cgroup/memory")


def refusal() -> str:
    """Return why no memory limit can be set here, or an empty string."""
    probe = ROOT / f"clusterrun-probe-{os.getpid()}"
    try:
        probe.mkdir()
        (probe / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError as error:
        return str(error)
    finally:
        with suppress(OSError):
            probe.rmdir()
    return ""


def remove(shape: Shape) -> None:
    """Remove what slurmd leaves; the processes have ended."""
    for node in shape.node_names:
        for path, _, _ in os.walk(ROOT / f"slurm_{node}", topdown=False):
            with suppress(OSError):
                os.rmdir(path)
