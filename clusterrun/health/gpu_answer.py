"""What NVML answers about the GPUs of a node, asked once for all checks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from clusterrun.health import nvml
from clusterrun.health.examine import UnknownError
from clusterrun.health.machine import gib
from clusterrun.health.nvml import NvmlGpu
from clusterrun.shared import shell
from clusterrun.shared.own_modules import module_argv

ANSWER_S: Final = 1.2  # before the launch, which must not wait for longer
LONG_S: Final = 3.0  # a driver that needs longer is broken; without persistence mode it is slow
_REST_S: Final = 0.1
_WORDS: Final[Mapping[bool | None, str]] = {True: "on", False: "off"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer. `absent`: why there is none; `problem`: how the driver failed.

    `is_late`: it did not answer in time.
    """

    gpus: Sequence[NvmlGpu] = ()
    system: Mapping[str, str] = field(default_factory=dict)
    absent: str = ""
    problem: str = ""
    is_late: bool = False


class GpuAnswer:
    """The GPUs that `names` lists as CUDA_VISIBLE_DEVICES, or all; asked when first needed.

    `pid` is a process that may be stuck in the driver; it is left alone.
    """

    def __init__(self, names: Sequence[str] = (), within_s: float = ANSWER_S) -> None:
        self._names, self.within_s = names, within_s
        self.pid = 0

    @cached_property
    def any(self) -> Answer:
        """The answer, whatever it is."""
        argv = module_argv(sys.executable, nvml.__name__, *self._names)
        done = shell.run_once(argv, self.within_s, rest_s=_REST_S)
        self.pid = done.pid
        return read(done, self.within_s)

    @property
    def asked(self) -> Answer:
        """What NVML answered. Raises UnknownError if it is not here."""
        if self.any.absent:
            raise UnknownError(self.any.absent)
        return self.any

    @property
    def gpus(self) -> list[NvmlGpu]:
        """The GPUs that answered. Raises UnknownError if none did."""
        if self.asked.problem:
            raise UnknownError("NVIDIA's driver did not answer")
        if found := [gpu for gpu in self.asked.gpus if not gpu.problem]:
            return found
        raise UnknownError("no GPU answered" if self.asked.gpus else "this machine has no GPU")


def read(done: shell.Completed, within_s: float) -> Answer:
    """Read the steps of `health.nvml`, which may have been ended after any of them."""
    steps = _steps(done.stdout)
    known = {name: value for step in steps for name, value in step.items()}
    asks, absent = known.get(nvml.ASKS), known.get(nvml.ABSENT, "")
    problem = known.get(nvml.PROBLEM, "")
    is_late = done.rc == shell.TIMED_OUT
    if asks is None:
        how = f"within {within_s:g} s" if is_late else f"(exit status {done.rc})"
        absent = f"Python, which asks NVML, did not start {how}"
    elif is_late:
        problem = f"NVIDIA's driver did not answer within {within_s:g} s, asked for {asks}"
    elif done.rc != 0:
        words = done.stderr.strip().splitlines()
        problem = f"asking NVIDIA's driver for {asks} failed: {words[-1] if words else done.rc}"
    return Answer(
        gpus=[NvmlGpu(**step[nvml.GPU]) for step in steps if nvml.GPU in step],
        system=known.get(nvml.SYSTEM, {}),
        absent=absent,
        problem=problem,
        is_late=is_late,
    )


def _steps(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [step for step in found if isinstance(step, dict)]


def device_names(env: Mapping[str, str]) -> list[str]:
    """Return the GPUs that the scheduler or the user named; none if they named none."""
    names = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # CUDA ignores what follows an index of -1.
    return [*names[: names.index("-1")]] if "-1" in names else [name for name in names if name]


def gpu_facts(asked: GpuAnswer) -> dict[str, str]:
    """Return what should be equal on all nodes; {} if it is unknown."""
    try:
        gpus = asked.gpus
    except UnknownError:
        return {}
    kinds = Counter(f"{gpu.model}, {gib(gpu.total)}" for gpu in gpus if gpu.model and gpu.total)
    modes = {
        "gpus": [f"{number} x {kind}" for kind, number in sorted(kinds.items())],
        "ecc": _alike(_WORDS.get(gpu.has_ecc) for gpu in gpus),
        "mig": _alike(_WORDS.get(gpu.has_mig) for gpu in gpus),
        "persistence mode": _alike(_WORDS.get(gpu.is_persistent) for gpu in gpus),
        "nvlinks": _alike(_links(gpu) for gpu in gpus),
    }
    facts = {name: ", ".join(values) for name, values in modes.items() if values}
    return {**asked.asked.system, **facts}


def _alike(values: Iterable[str | None]) -> list[str]:
    return sorted({value for value in values if value})


def _links(gpu: NvmlGpu) -> str:
    return f"{sum(gpu.links)} of {len(gpu.links)} active" if gpu.links else ""
