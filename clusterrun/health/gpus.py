"""Checks of the GPUs that a node's ranks will use, by what NVML answers; no memory is touched."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, NamedTuple

import psutil

from clusterrun.health import nvml
from clusterrun.health.examine import Check, UnknownError
from clusterrun.health.machine import gib
from clusterrun.health.nvml import NvmlGpu
from clusterrun.shared import shell
from clusterrun.shared.files import parse_object
from clusterrun.shared.finding import Finding, bad, fail, ok, skip
from clusterrun.shared.own_modules import module_argv
from clusterrun.shared.wording import count

ANSWER_S: Final = 1.2  # before the launch, which must not wait for longer
LONG_S: Final = 3.0  # a driver that needs longer is broken; without persistence mode it is slow
_REST_S: Final = 0.1
HELD: Final = 0.2  # of a GPU's memory: with so much in use, ranks run out of it
FEW_BYTES: Final = 512 << 20  # in use without a job
_SLOWDOWNS: Final = {  # nvmlClocksEventReasons; idle GPUs and software's power cap are normal
    0x40: "too hot (hardware thermal slowdown)",
    0x80: "short of power (power brake)",
    0x08: "slowed down by the hardware",
}
# nvmlDeviceGpuRecoveryAction: until this is done, a GPU does not work, or not fully.
NEEDED: Final = {1: "a reset", 2: "a reboot of its node", 6: "a reset", 7: "a reboot of its node"}
_WANTED: Final = {
    3: "its peer-to-peer traffic to be drained",
    4: "a reset after its jobs have ended",
}
_MPS: Final = "nvidia-cuda-mps"  # NVIDIA's own server, as /proc shows its name
_LEAVE_OUT: Final = "leave the node out with --exclude, and tell the administrator"

_Flaw = tuple[str, bool]  # what is wrong with a GPU, and whether a job fails of it


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What NVML answered. `absent`: why it could not be asked; `problem`: how the driver failed."""

    gpus: Sequence[NvmlGpu] = ()
    driver: str = ""
    absent: str = ""
    problem: str = ""
    is_late: bool = False  # it did not answer in time


class GpuAnswer:
    """The GPUs that `names` lists as CUDA_VISIBLE_DEVICES, or all; asked when first needed."""

    def __init__(self, names: Sequence[str] = (), within_s: float = ANSWER_S) -> None:
        self._names, self.within_s = names, within_s
        self.pid = 0  # of a process that may be stuck in the driver: it is left alone

    @cached_property
    def answer(self) -> Answer:
        """The answer, whatever it is."""
        argv = module_argv(sys.executable, nvml.__name__, *self._names)
        done = shell.run_once(argv, self.within_s, rest_s=_REST_S)
        self.pid = done.pid  # if it was killed: the driver may still hold it
        return read(done, self.within_s)

    @property
    def from_nvml(self) -> Answer:
        """The answer of NVML. Raises UnknownError if NVML could not be asked."""
        if self.answer.absent:
            raise UnknownError(self.answer.absent)
        return self.answer

    @property
    def gpus(self) -> list[NvmlGpu]:
        """The GPUs that answered. Raises UnknownError if none did."""
        found = self.from_nvml
        if found.problem:
            raise UnknownError("NVIDIA's driver did not answer")
        if working := [gpu for gpu in found.gpus if not gpu.problem]:
            return working
        raise UnknownError("no GPU answered" if found.gpus else "this machine has no GPU")


def read(done: shell.Completed, within_s: float) -> Answer:
    """Read the steps that `health.nvml` printed; it may have been ended after any of them."""
    steps = [step for line in done.stdout.splitlines() if (step := parse_object(line))]
    known = {name: value for step in steps for name, value in step.items()}  # later ones win
    last_asked, absent = known.get(nvml.ASKS), known.get(nvml.ABSENT, "")
    problem = known.get(nvml.PROBLEM, "")  # how the driver failed; `absent`: why it was not asked
    is_late = done.rc == shell.TIMED_OUT
    if last_asked is None:
        how = f"within {within_s:g} s" if is_late else f"(exit status {done.rc})"
        absent = f"Python, which asks NVML, did not start {how}"
    elif is_late:
        problem = f"NVIDIA's driver did not answer within {within_s:g} s, asked for {last_asked}"
    elif done.rc != 0:
        why = (done.stderr.strip().splitlines() or [str(done.rc)])[-1]
        problem = f"asking NVIDIA's driver for {last_asked} failed: {why}"
    return Answer(
        gpus=[NvmlGpu(**step[nvml.GPU]) for step in steps if nvml.GPU in step],
        driver=known.get(nvml.DRIVER, ""),
        absent=absent,
        problem=problem,
        is_late=is_late,
    )


def device_names(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that the scheduler or the user named, if any; -1 hides those after it."""
    names = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if "-1" in names:  # as CUDA does
        return names[: names.index("-1")]
    return [name for name in names if name]


def gpu_facts(gpu_answer: GpuAnswer) -> dict[str, str]:
    """Return what should be equal on all nodes; {} if it is unknown."""
    try:
        gpus = gpu_answer.gpus
    except UnknownError:
        return {}
    kinds = Counter(f"{gpu.model}, {gib(gpu.total)}" for gpu in gpus if gpu.model and gpu.total)
    links = {f"{sum(gpu.links)} of {len(gpu.links)} active" for gpu in gpus if gpu.links}
    return {
        "driver": gpu_answer.from_nvml.driver,
        "gpus": ", ".join(f"{number} x {kind}" for kind, number in sorted(kinds.items())),
        "nvlinks": ", ".join(sorted(links)),
    }


def gpu_checks(gpu_answer: GpuAnswer | None, ranks: int) -> dict[str, Check]:
    """Return the checks of GPUs by id; `gpu_answer` is None if the job uses no GPU."""
    checks: dict[str, Callable[[GpuAnswer], Finding]] = {
        "gpu.count": partial(gpu_count, ranks=ranks),
        "gpu.ecc": partial(_find_flaws, "gpu.ecc", _ECC),
        "gpu.throttle": partial(_find_flaws, "gpu.throttle", _THROTTLE),
        "gpu.foreign": foreign_use,
        "gpu.xid": partial(_find_flaws, "gpu.xid", _XID),
    }
    if gpu_answer is None:
        return {name: partial(skip, name, "this job uses no GPU") for name in checks}
    return {name: partial(run, gpu_answer) for name, run in checks.items()}


def gpu_count(gpu_answer: GpuAnswer, ranks: int) -> Finding:
    """Compare the GPUs that answer with the ranks of a node."""
    name, answer = "gpu.count", gpu_answer.from_nvml
    if answer.problem:
        hint = "look at the driver: nvidia-smi -q; if it is only slow, turn persistence mode on"
        is_sure = not answer.is_late or gpu_answer.within_s >= LONG_S  # then it is broken, not slow
        return bad(name, answer.problem, hint, is_sure=is_sure)
    if silent := [f"GPU {gpu.name}: {gpu.problem}" for gpu in answer.gpus if gpu.problem]:
        return fail(name, "; ".join(silent), f"{_LEAVE_OUT} what this prints: nvidia-smi -L")
    kinds = ", ".join({gpu.model or "unknown model": None for gpu in answer.gpus}) or "none"
    text = f"{count(len(answer.gpus), 'GPU')} ({kinds}) for {count(ranks, 'rank')}"
    if len(answer.gpus) < ranks:
        hint = "request one for each rank with --gpus-per-node; list them: nvidia-smi -L"
        return fail(name, f"{text}, each of which needs one", hint)
    return ok(name, text)


class _FlawCheck(NamedTuple):
    """A check of each GPU for flaws of one kind."""

    reported: Callable[[NvmlGpu], Sequence[object]]  # None for what a GPU does not report
    flaws: Callable[[NvmlGpu], Iterable[_Flaw]]
    good: str  # the text if no GPU has a flaw; {}: how many GPUs report
    hint: str
    unknown: str  # what no GPU reports


def _find_flaws(name: str, check: _FlawCheck, answer: GpuAnswer) -> Finding:
    """Return the GPUs' flaws as one finding. Raises UnknownError if no GPU reports on them."""
    known = [gpu for gpu in answer.gpus if any(each is not None for each in check.reported(gpu))]
    if not known:
        raise UnknownError(check.unknown)
    flaws = [(f"GPU {gpu.name}: {text}", sure) for gpu in known for text, sure in check.flaws(gpu)]
    if flaws:
        text = "; ".join(text for text, _ in flaws)
        return bad(name, text, check.hint, is_sure=any(sure for _, sure in flaws))
    silent = [gpu.name for gpu in answer.gpus if None in check.reported(gpu)]  # None: not reported
    rest = f"; incomplete reports from GPU {', '.join(silent)}" if silent else ""
    return ok(name, f"{check.good.format(count(len(known), 'GPU'))}{rest}")


def _wear(gpu: NvmlGpu) -> list[_Flaw]:
    """Return the errors of a GPU's memory that ECC could not correct.

    A GPU that remaps rows (Ampere and newer) contains most errors (Xid 94): one process ends, and
    the driver asks for a reset if it is needed. An older GPU needs a reset (48), and so does one
    whose remapping failed (64). After a remapping (63) a job can run, and the reset can follow it.
    """
    errors = count(gpu.errors or 0, "uncorrected ECC error")
    is_lasting = gpu.is_worn is None or gpu.recovery in NEEDED  # None: it remaps no rows
    flaws = (
        (gpu.is_worn, "remapping a row of its memory failed", True),
        (gpu.errors, f"{errors} since its last reset", is_lasting),
        (gpu.is_pending, "a part of its memory waits for a reset", False),
    )
    return [(text, is_sure) for is_present, text, is_sure in flaws if is_present]


def _slowdowns(gpu: NvmlGpu) -> list[_Flaw]:
    """Return the worst reason for which the hardware slows a GPU down, if there is one."""
    return [(text, False) for bit, text in _SLOWDOWNS.items() if (gpu.reasons or 0) & bit][:1]


def _requested_repairs(gpu: NvmlGpu) -> list[_Flaw]:
    """Return the flaw that the driver asks for a repair of a GPU, such as a reset, if it does."""
    needed, wanted = NEEDED.get(gpu.recovery or 0), _WANTED.get(gpu.recovery or 0)
    text = f"the driver asks for {needed or wanted}"
    return [(text, bool(needed))] if needed or wanted else []


_ECC: Final = _FlawCheck(
    lambda gpu: (gpu.errors, gpu.is_pending),
    _wear,
    "no uncorrected error on {}",
    f"{_LEAVE_OUT} what this prints: nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER",
    "the GPUs do not report memory errors",
)
_THROTTLE: Final = _FlawCheck(
    lambda gpu: (gpu.reasons,),
    _slowdowns,
    "no slowdown on {}",
    f"{_LEAVE_OUT} what this prints: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
    "the GPUs do not report why their clocks are low",
)
_XID: Final = _FlawCheck(
    lambda gpu: (gpu.recovery,),
    _requested_repairs,
    "no reset is needed on {}",
    f"{_LEAVE_OUT} what this prints: nvidia-smi -q; dmesg | grep -i xid",
    "the driver does not report whether a GPU needs a reset (before 570)",
)


def foreign_use(answer: GpuAnswer) -> Finding:
    """Look for processes and memory of others on the GPUs, before the ranks use them."""
    has_pids = any(gpu.pids for gpu in answer.gpus)
    children = psutil.Process().children(recursive=True) if has_pids else ()
    most = max(gpu.used or 0 for gpu in answer.gpus)  # `gpus` raises if there is none
    check = _FlawCheck(
        reported=lambda gpu: (gpu.pids, gpu.used),
        flaws=partial(_foreign_users, own={process.pid for process in children}),
        good=f"no processes on {{}}, at most {gib(most)} in use",
        hint="list them: nvidia-smi; end yours, or request whole nodes: --set slurm.exclusive=true",
        unknown="the GPUs do not report their memory and processes",
    )
    return _find_flaws("gpu.foreign", check, answer)


def _foreign_users(gpu: NvmlGpu, own: Collection[int]) -> list[_Flaw]:
    """Return who else uses a GPU or its memory; processes `own` are those that this one started."""
    pids = set(gpu.pids or ())
    names = map(described, sorted(pids.difference(own)))
    others = ", ".join(name for name in names if _MPS not in name)
    used, total = gpu.used or 0, gpu.total or 0
    if used > FEW_BYTES and pids.isdisjoint(own):  # otherwise, `own` may use the memory
        by = others or "processes that are not visible here"
        is_sure = used > HELD * total  # ranks would run out of memory
        return [(f"{gib(used)} of {gib(total)} in use, by {by}", is_sure)]
    return [(f"used by {others}", False)] if others else []


def described(pid: int) -> str:
    """Describe a process of this machine; a container may not show it."""
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()} of {process.username()})"
    except psutil.Error:
        return f"process {pid} (not visible here)"
