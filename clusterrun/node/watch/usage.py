"""Sample what an attempt uses on this node, in a thread: files and drivers may block it alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from clusterrun.health.cgroup import MemoryGroup, own_group
from clusterrun.health.load import Counts, counts, own_memory
from clusterrun.health.nvml import NvmlGpu
from clusterrun.node.base.cpus import allocated_cpus
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import descendants
from clusterrun.node.watch.alerts import (
    GROWTH_S,
    IDLE_PERCENT,
    State,
    following,
    full_in_s,
    holding,
)
from clusterrun.node.watch.gpus import Asking, Gpus
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.usage import HALF_BYTES, ActivityKind, Alert, GpuSample, Sample, to_line

INTERVAL_S: Final = 5.0
LONG_S: Final = 10.0  # in jobs of more than MANY nodes
MANY: Final = 100
_FIRST_S: Final = 1.0  # doubled until the interval is reached: short runs have samples, too
_JITTER: Final = 0.1  # of the interval: nodes must not write at the same time
_FAMILY_SAMPLES: Final = 6  # after so many, look again which processes a rank has
_ANSWER_S: Final = 2.0


@dataclass(kw_only=True)
class _Gpu:
    """What is known of a GPU from all its samples."""

    peak: int | None = None
    active: float = 0.0  # percent, times seconds
    measured_s: float = 0.0
    idle_s: float = 0.0

    def seen(self, index: int, gpu: NvmlGpu, elapsed_s: float) -> GpuSample:
        """Return the sample of a GPU; `elapsed_s` is the time since the one before."""
        if gpu.used is not None:
            self.peak = max(gpu.used, self.peak or 0)
        if gpu.activity is not None:
            self.active += gpu.activity * elapsed_s
            self.measured_s += elapsed_s
            self.idle_s = self.idle_s + elapsed_s if gpu.activity < IDLE_PERCENT else 0.0
        kind = ActivityKind.SM if gpu.is_of_sms else ActivityKind.UTILIZATION
        return GpuSample(
            index=index,
            memory_bytes=gpu.used,
            memory_total_bytes=gpu.total,
            memory_peak_bytes=self.peak,
            activity=gpu.activity,
            activity_kind=None if gpu.activity is None else kind,
            activity_mean=round(self.active / self.measured_s, 2) if self.measured_s else None,
            power_w=gpu.watts,
            temperature_c=gpu.celsius,
            ecc_errors=gpu.errors,
            throttle=gpu.reasons,
            idle_s=round(self.idle_s, 1),
        )


@dataclass(kw_only=True)
class Sampler:
    """Sample until `stop`; `alerted` gets each alert that is raised, `say` what can't be sampled.

    `now_s` is the head's clock. Both functions are called in the thread of the sampler.
    """

    attempt: Attempt
    gpus: Gpus | None
    pids: Callable[[], Mapping[int, int]]
    now_s: Callable[[], float]
    alerted: Callable[[list[Alert], Sample], None]
    say: Callable[[str], None]
    _group: MemoryGroup = field(default_factory=own_group)
    _ending: threading.Event = field(default_factory=threading.Event)
    _gpus: dict[int, _Gpu] = field(default_factory=dict)
    _before: Counts | None = None
    _at: float = 0.0
    _peak: int = 0
    _number: int = 0
    _lost: int = 0
    _state: State = field(default_factory=dict)
    _families: dict[int, list[int]] = field(default_factory=dict)
    _points: deque[tuple[float, int]] = field(default_factory=deque)

    def start(self) -> None:
        """Begin to sample."""
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def stop(self) -> None:
        """Take no other sample."""
        self._ending.set()

    @property
    def interval_s(self) -> float:
        """The time between two samples."""
        return LONG_S if self.attempt.plan.nodes > MANY else INTERVAL_S

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self.look()
                first_s = _FIRST_S * 2 ** min(self._number, 10)
                jitter = 1 + _JITTER * random.uniform(-1, 1)
                self._ending.wait(min(first_s, self.interval_s) * jitter)
        except Exception as error:  # noqa: BLE001 - a run goes on without its samples
            self.say(f"what this node uses is no longer sampled: {error!r}")

    def look(self) -> Sample:
        """Take a sample, write it, and report the alerts that it raises."""
        sample = self._sample()
        old, self._state = holding(self._state), following(self._state, sample)
        sample = dataclasses.replace(sample, alerts=holding(self._state))
        self._number += 1
        self._lost += not append(self.attempt.paths, self.attempt.who.node, to_line(sample))
        if new := [alert for alert in sample.alerts if alert not in old]:
            self.alerted(new, sample)
        return sample

    def _sample(self) -> Sample:
        memory, now, at = self._group.memory(), counts(), time.monotonic()
        before, elapsed_s = self._before, at - self._at if self._before else 0.0
        self._before, self._at, self._peak = now, at, max(self._peak, memory.used)
        self._points.append((at, memory.used))
        while at - self._points[0][0] > GROWTH_S:
            self._points.popleft()
        rates: dict[str, Any] = {name: _rate(name, before, now, elapsed_s) for name in vars(now)}
        return Sample(
            at=round(self.now_s(), 3),
            attempt=self.attempt.number,
            interval_s=self.interval_s,
            host_bytes=memory.used,
            host_limit_bytes=memory.limit,
            host_peak_bytes=self._peak,
            cache_bytes=memory.cache,
            host_full_s=full_in_s(self._points, memory.limit),
            cpus=allocated_cpus(os.environ),
            **rates,
            ranks=tuple(self._ranks()),
            gpus=tuple(self._of_gpus(elapsed_s)),
            lost=self._lost,
        )

    def _ranks(self) -> Iterable[tuple[int, int]]:
        pids = self.pids()
        if self._families.keys() != pids.keys() or self._number % _FAMILY_SAMPLES == 0:
            self._families = {rank: [pid, *descendants(pid)] for rank, pid in pids.items()}
        return sorted((rank, own_memory(found)) for rank, found in self._families.items())

    def _of_gpus(self, elapsed_s: float) -> Iterable[GpuSample]:
        is_open = self.gpus is not None and self.gpus.asking is Asking.OPEN
        if self.gpus is None or not is_open:
            return
        found = self.gpus.ask(_ANSWER_S)
        if self.gpus.asking is Asking.ENDED:
            self.say("NVML no longer answers; the samples of this node have no GPUs from now on")
        for gpu in found or ():
            index = self.gpus.number(gpu)
            if index < (self.attempt.plan.gpus_per_node or index + 1):
                yield self._gpus.setdefault(index, _Gpu()).seen(index, gpu, elapsed_s)


def _rate(name: str, before: Counts | None, now: Counts, elapsed_s: float) -> float | None:
    old: float | None = getattr(before, name, None)
    new: float | None = getattr(now, name)
    if old is None or new is None or elapsed_s <= 0:
        return None
    return round(max(0.0, (new - old) / elapsed_s), 2 if name == "cpu" else None)


def append(paths: RunPaths, node: str, line: bytes) -> bool:
    """Append a sample to a node's file, and begin a new one if it is full; False if it failed."""
    path = paths.usage(node)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size + len(line) > HALF_BYTES:
                path.rename(paths.earlier_usage(node))
        with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if file.write(line) == len(line):
                return True
            file.truncate(size)
    return False
