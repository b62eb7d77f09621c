"""What a host knows about itself, asked before a run starts there: `judge` decides by it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from clusterrun.backends.hosts.locks import gpu_lock, holder_of
from clusterrun.backends.local.process import boot_id
from clusterrun.health import paths
from clusterrun.health.examine import Look, examine
from clusterrun.health.facts import packages
from clusterrun.health.gpu_answer import LONG_S, GpuAnswer, device_names
from clusterrun.health.nvml import NO_DRIVER
from clusterrun.node.base.processes import allocated_cpus
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import current_user, user_name
from clusterrun.shared.finding import Severity

SEEN_S: Final = 1.0  # for a file server to show a new file
PAUSE_S: Final = 0.1
DEADLINE_S: Final = LONG_S + 1.0
_CHECKS_S: Final = 2.0
_AMD: Final = Path("/dev/kfd")


def gather(ask: Mapping[str, Any]) -> dict[str, Any]:
    """Return this host's facts; JSON can hold them. A stuck file system or driver is in `late`.

    `ask` has `home` and `nonce`; `own_dir`: where this host would write without the home; `paths`:
    what must exist if it sees the home; `device`: "cuda" if GPUs are needed; `gpus`: their names,
    if any were named.
    """
    is_seen = partial(_sees, RunPaths(root=Path(ask["home"])).nonce(ask["nonce"]))
    sees_home = bool(_side_by_side({"sees_home": is_seen}).get("sees_home"))
    parts: dict[str, Callable[[], Any]] = {
        "missing": lambda: [
            name for name in ask.get("paths", ()) if sees_home and not os.path.exists(name)
        ],
        "versions": packages,
        "checks": partial(_checks, Path(ask["home"] if sees_home else ask["own_dir"]).expanduser()),
        "gpus": partial(_gpus, ask),
    }
    found = _side_by_side(parts)
    connection = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]
    return {
        **{"sees_home": sees_home, "missing": [], "versions": {}, "checks": [], "gpus": {}},
        **found,
        "late": sorted({*parts} - {*found}),
        "hostname": socket.gethostname(),
        "user": current_user(),
        "boot_id": boot_id(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cpus": allocated_cpus(os.environ),
        "client": connection[0],  # the address of the first host as this one sees it
        "server": connection[2],  # and of this one as the first host reached it
        "time": time.time(),
    }


def _side_by_side(parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run each part in a thread; leave out those that are late."""
    found: dict[str, Any] = {}

    def answer(name: str, part: Callable[[], Any]) -> None:
        found[name] = part()

    threads = [threading.Thread(target=answer, args=each, daemon=True) for each in parts.items()]
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _sees(file: Path) -> bool:
    """Return whether a file is seen that another host has just written."""
    deadline = time.monotonic() + SEEN_S
    while not file.exists():
        if time.monotonic() > deadline or not file.parent.parent.is_dir():
            return False
        for place in (file.parent.parent, file.parent):  # NFS asks the server again
            with contextlib.suppress(OSError):
                os.listdir(place)
        time.sleep(PAUSE_S)
    return True


def _checks(run_dir: Path) -> list[dict[str, str]]:
    """Return what would fail with this host's directories, as JSON of findings."""
    looks: dict[str, Look] = {
        "path.runs": partial(paths.runs, run_dir, is_shared=False),
        "path.disk": partial(paths.disk, run_dir),
        "path.inodes": partial(paths.inodes, run_dir),
        "node.tmp": paths.scratch,
    }
    found = examine(looks, _CHECKS_S, late={"path.runs": paths.slow(run_dir)})
    return [each.to_data() for each in found if each.severity is Severity.FAIL]


def _gpus(ask: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GPUs that this host may use; `unknown` tells why they cannot be looked at."""
    if ask.get("device") != "cuda":
        return {}
    answer = GpuAnswer(ask.get("gpus") or device_names(os.environ), LONG_S).any
    if answer.absent and (answer.absent != NO_DRIVER or _AMD.exists()):
        return {"unknown": answer.absent}
    found = []
    for gpu in answer.gpus:
        holder = holder_of(gpu_lock(gpu.uuid or gpu.name))
        held = zip(gpu.pids or (), gpu.held or (), strict=True)
        about = {
            **{"name": gpu.name, "uuid": gpu.uuid or "", "problem": gpu.problem},
            "holder": dataclasses.asdict(holder) if holder else None,
            "processes": [{**_process(pid), "pid": pid, "bytes": size or 0} for pid, size in held],
        }
        found.append(about)
    return {"problem": answer.problem or answer.absent, "all": found}


def _process(pid: int) -> dict[str, str]:
    """Return user and command of a process; a container may not show it."""
    place = Path(f"/proc/{pid}")
    try:
        user = user_name(place.stat().st_uid)
        return {"user": user, "command": (place / "comm").read_text(errors="replace").strip()}
    except OSError:
        return {"user": "", "command": ""}
