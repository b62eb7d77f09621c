"""Checks of the GPUs that a node's ranks will use, by what NVML answers; no memory is touched."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from clusterrun.health.examine import Look, UnknownError
from clusterrun.health.gpu_answer import LONG_S, GpuAnswer
from clusterrun.health.machine import gib
from clusterrun.health.nvml import NvmlGpu
from clusterrun.shared.finding import Finding, bad, fail, ok, skip
from clusterrun.shared.wording import count

HELD: Final = 0.2  # of a GPU's memory: with so much in use, ranks run out of it
FEW_BYTES: Final = 512 << 20  # in use without a job
_SLOWDOWNS: Final = {  # nvmlClocksEventReasons; idle GPUs and software's power cap are normal
    0x40: "too hot (hardware thermal slowdown)",
    0x80: "short of power (power brake)",
    0x08: "slowed down by the hardware",
}
# nvmlDeviceGpuRecoveryAction: until this is done, a GPU does not work, or not fully.
_NEEDED: Final = {1: "a reset", 2: "a reboot of its node", 6: "a reset", 7: "a reboot of its node"}
_WANTED: Final = {
    3: "its peer-to-peer traffic to be drained",
    4: "a reset when its jobs have ended",
}
_MPS: Final = "nvidia-cuda-mps"  # NVIDIA's own server, as /proc shows its name
_LEAVE_OUT: Final = "leave the node out with --exclude, and report it to the administrators"

_Flaw = tuple[str, bool]  # what is wrong with a GPU, and whether a job fails of it


def gpu_checks(asked: GpuAnswer | None, ranks: int) -> dict[str, Look]:
    """Return the checks of GPUs by id; `asked` is None if the job uses no GPU."""
    looks: dict[str, Callable[[GpuAnswer], Finding]] = {
        "gpu.count": partial(enough, ranks=ranks),
        "gpu.ecc": ecc,
        "gpu.throttle": throttle,
        "gpu.foreign": foreign,
        "gpu.xid": xid,
    }
    return {
        name: partial(look, asked) if asked else partial(skip, name, "this job uses no GPU")
        for name, look in looks.items()
    }


def enough(asked: GpuAnswer, ranks: int) -> Finding:
    """Compare the GPUs that answer with the ranks of a node."""
    name, found = "gpu.count", asked.asked
    if found.problem:
        hint = "look at the driver: nvidia-smi -q; if it is only slow, turn persistence mode on"
        return bad(name, found.problem, hint, is_sure=not found.is_late or asked.within_s >= LONG_S)
    if silent := [f"GPU {gpu.name}: {gpu.problem}" for gpu in found.gpus if gpu.problem]:
        return fail(name, "; ".join(silent), f"{_LEAVE_OUT}: nvidia-smi -L")
    kinds = Counter(gpu.model or "unknown model" for gpu in found.gpus)
    text = f"{count(len(found.gpus), 'GPU')} ({', '.join(kinds) or 'none'})"
    needed = f"{count(ranks, 'rank')}, each of which needs one"
    if len(found.gpus) < ranks:
        return fail(
            name, f"{text} for {needed}", "request them: --gpus-per-node; list: nvidia-smi -L"
        )
    return ok(name, f"{text} for {count(ranks, 'rank')}")


def ecc(asked: GpuAnswer) -> Finding:
    """Look at the errors of the GPUs' memory that ECC could not correct.

    A GPU that remaps rows (Ampere and newer) contains most of them (Xid 94): they end one process,
    and the driver asks for a reset if it is needed. Older ones need a reset (48), as after a failed
    remapping (64). After a remapping (63) a job can run: the reset is due when it has ended.
    """
    known = [gpu for gpu in asked.gpus if (gpu.errors, gpu.is_pending) != (None, None)]
    if not known:
        raise UnknownError("the GPUs do not report errors of their memory")
    found = {gpu.name: _wear(gpu) for gpu in known}
    hint = f"{_LEAVE_OUT}: nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER"
    silent = [gpu.name for gpu in asked.gpus if None in (gpu.errors, gpu.is_pending)]
    return _judged("gpu.ecc", found, f"no uncorrected error on {_all(known)}", hint, silent)


def _wear(gpu: NvmlGpu) -> list[_Flaw]:
    errors = count(gpu.errors or 0, "uncorrected ECC error")
    is_lasting = gpu.is_worn is None or gpu.recovery in _NEEDED
    return [
        *([("remapping a row of its memory failed", True)] if gpu.is_worn else []),
        *([(f"{errors} since its last reset", is_lasting)] if gpu.errors else []),
        *([("a part of its memory waits for a reset", False)] if gpu.is_pending else []),
    ]


def throttle(asked: GpuAnswer) -> Finding:
    """Look for GPUs that the hardware slows down."""
    known = [gpu for gpu in asked.gpus if gpu.reasons is not None]
    if not known:
        raise UnknownError("the GPUs do not report why their clocks are low")
    found = {gpu.name: [(text, False) for text in slowdowns(gpu.reasons or 0)] for gpu in known}
    hint = f"{_LEAVE_OUT}: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
    silent = [gpu.name for gpu in asked.gpus if gpu.reasons is None]
    return _judged("gpu.throttle", found, f"no slowdown on {_all(known)}", hint, silent)


def slowdowns(reasons: int) -> list[str]:
    """Return the worst reason for which the hardware slows a GPU down, if there is one."""
    return [text for bit, text in _SLOWDOWNS.items() if reasons & bit][:1]


def foreign(asked: GpuAnswer) -> Finding:
    """Look for processes and memory of others on the GPUs, before the ranks use them."""
    known = [gpu for gpu in asked.gpus if gpu.pids is not None or gpu.used is not None]
    if not known:
        raise UnknownError("the GPUs do not report their memory and processes")
    children = psutil.Process().children(recursive=True) if any(x.pids for x in known) else ()
    own = {process.pid for process in children}
    found = {gpu.name: _users(gpu, own) for gpu in known}
    most = max((gpu.used or 0 for gpu in known), default=0)
    hint = "list them: nvidia-smi; end your own, or take whole nodes: --set slurm.exclusive=true"
    silent = [gpu.name for gpu in asked.gpus if None in (gpu.pids, gpu.used)]
    good = f"no processes on {_all(known)}, at most {gib(most)} in use"
    return _judged("gpu.foreign", found, good, hint, silent)


def _users(gpu: NvmlGpu, own: Collection[int]) -> list[_Flaw]:
    pids = set(gpu.pids or ())
    others = ", ".join(
        name for name in map(_process, sorted(pids.difference(own))) if _MPS not in name
    )
    used, total = gpu.used or 0, gpu.total or 0
    if used <= FEW_BYTES or pids.intersection(own):
        return [(f"used by {others}", False)] if others else []
    by = others or "processes that are not visible here"
    return [(f"{gib(used)} of {gib(total)} in use, by {by}", used > HELD * total)]


def _process(pid: int) -> str:
    """Describe a process of this machine; a container may not show it."""
    place = Path(f"/proc/{pid}")
    try:
        own = ", yours" if place.stat().st_uid == os.getuid() else ""
        return f"process {pid} ({(place / 'comm').read_text().strip()}{own})"
    except OSError:
        return f"process {pid} (not visible here)"


def xid(asked: GpuAnswer) -> Finding:
    """Look whether the driver asks for a reset of a GPU, or a reboot of its node."""
    known = [gpu for gpu in asked.gpus if gpu.recovery is not None]
    if not known:
        raise UnknownError("the driver does not report whether a GPU needs a reset (before 570)")
    found: dict[str, list[_Flaw]] = {}
    for gpu in known:
        needed, wanted = _NEEDED.get(gpu.recovery or 0), _WANTED.get(gpu.recovery or 0)
        text = f"the driver asks for {needed or wanted}"
        found[gpu.name] = [(text, bool(needed))] if needed or wanted else []
    hint = f"{_LEAVE_OUT}: nvidia-smi -q; dmesg | grep -i xid"
    return _judged("gpu.xid", found, f"no reset is needed on {_all(known)}", hint)


def _all(gpus: Sequence[NvmlGpu]) -> str:
    return count(len(gpus), "GPU")


def _judged(
    name: str,
    found: Mapping[str, Iterable[_Flaw]],
    good: str,
    hint: str,
    silent: Sequence[str] = (),
) -> Finding:
    """Return the worst of the findings by GPU; `silent` GPUs did not report all of it."""
    findings = [
        (f"GPU {gpu}: {text}", is_sure) for gpu, each in found.items() for text, is_sure in each
    ]
    rest = f"; not all is reported by GPU {', '.join(silent)}" if silent else ""
    if not findings:
        return ok(name, f"{good}{rest}")
    is_sure = any(is_sure for _, is_sure in findings)
    return bad(name, "; ".join(text for text, _ in findings), hint, is_sure=is_sure)
