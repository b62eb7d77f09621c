"""Sample what an attempt uses on this node, in a thread: files and drivers may block it alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from clusterrun.health.machine import MemoryGroup, cpu_seconds, own_group, own_memory
from clusterrun.health.nvml import NvmlGpu
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.processes import allocated_cpus, descendants
from clusterrun.node.forward.forward import Forwarder
from clusterrun.node.watch.notes import Gpus
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.usage import (
    HALF_BYTES,
    Alert,
    AlertKind,
    GpuSample,
    Sample,
    alert_texts,
    to_line,
)
from clusterrun.shared.files import size_of

LIMITS: Final = {
    AlertKind.HOST_MEMORY: 70.0,  # percent of the limit
    AlertKind.GPU_MEMORY: 80.0,  # percent of what the GPU has
    AlertKind.GPU_TEMPERATURE: 85.0,  # degrees Celsius
    AlertKind.GPU_IDLE: 10.0,  # minutes, while another GPU of the node works
}
IDLE_PERCENT: Final = 5.0
GROWTH_S: Final = 600.0  # the time over which growth is measured
SAMPLES: Final = 3
_POINTS: Final = 5.0
_LEAST_S: Final = GROWTH_S / 2  # a shorter time, such as a script's start, tells nothing
_MOST_S: Final = 24 * 3600.0  # what is full later is not said

Key = tuple[AlertKind, int | None]
State = Mapping[Key, Alert | int]  # an alert that holds, or how many samples were at the limit


def following(state: State, sample: Sample) -> dict[Key, Alert | int]:
    """Return the state after a sample; a value that is not known changes nothing."""
    new = {key: _next(state.get(key, 0), key, n, sample.at) for key, n in _values(sample)}
    return {**state, **new}


def _next(before: Alert | int, key: Key, value: float, at: float) -> Alert | int:
    """Begin an alert after SAMPLES values at the limit; end it _POINTS below the limit."""
    kind, gpu = key
    if isinstance(before, Alert):
        return before if value > LIMITS[kind] - _POINTS else 0
    count = before + 1 if value >= LIMITS[kind] else 0
    return count if count < SAMPLES else Alert(kind=kind, gpu=gpu, at=at)


def holding(state: State) -> tuple[Alert, ...]:
    """Return the alerts that hold."""
    return tuple(alert for alert in state.values() if isinstance(alert, Alert))


def _values(sample: Sample) -> Iterator[tuple[Key, float]]:
    """Yield what LIMITS limits; an idle GPU only counts while another one is busy."""
    if sample.host_percent is not None:
        yield (AlertKind.HOST_MEMORY, None), sample.host_percent
    is_any_busy = any((gpu.activity or 0.0) >= IDLE_PERCENT for gpu in sample.gpus)
    for gpu in sample.gpus:
        idle_minutes = gpu.idle_s / 60 if is_any_busy else 0.0
        values = {
            AlertKind.GPU_MEMORY: gpu.memory_percent,
            AlertKind.GPU_TEMPERATURE: gpu.temperature_c,
            AlertKind.GPU_IDLE: None if gpu.activity is None else idle_minutes,
        }
        yield from (((kind, gpu.index), v) for kind, v in values.items() if v is not None)


def full_in_s(points: Sequence[tuple[float, int]], limit: int) -> float | None:
    """Return in how many seconds memory is full, by (time, bytes); None for never or unknown."""
    if points[-1][0] - points[0][0] < _LEAST_S:
        return None
    from statistics import linear_regression  # slow to import

    times, used = zip(*points, strict=True)
    slope, left = linear_regression(times, used).slope, limit - points[-1][1]
    return round(left / slope, 1) if 0 < left < slope * _MOST_S else None


INTERVAL_S: Final = 5.0
LONG_S: Final = 10.0  # in jobs of more than MANY nodes
MANY: Final = 100
_FIRST_S: Final = 1.0  # doubled until the interval is reached: short runs have samples, too
_JITTER: Final = 0.1  # of the interval: nodes must not write at the same time
_FAMILY_SAMPLES: Final = 6  # after so many, look again which processes a rank has
_ANSWER_S: Final = 2.0


@dataclass
class Sampler:
    """Sample until `stop`, in a thread; the journal gets the alerts that are raised."""

    attempt: Attempt
    gpus: Gpus | None
    pids: Callable[[], Mapping[int, int]]
    journal: Forwarder
    _group: MemoryGroup = field(default_factory=own_group)
    _ending: threading.Event = field(default_factory=threading.Event)
    _gpus: dict[int, GpuSample] = field(default_factory=dict)
    _cpu_s: float = 0.0
    _points: deque[tuple[float, int]] = field(default_factory=deque)  # of time and memory
    _begun: float = 0.0  # when the first sample was taken
    _peak: int = 0
    _number: int = 0  # of samples taken
    _lost: int = 0  # how many of them could not be written
    _state: State = field(default_factory=dict)
    _families: dict[int, list[int]] = field(default_factory=dict)  # each rank's processes

    def start(self) -> None:
        """Begin to sample."""
        threading.Thread(target=self._run, name="sampler", daemon=True).start()

    def stop(self) -> None:
        """Take no other sample."""
        self._ending.set()

    @property
    def _interval_s(self) -> float:
        return LONG_S if self.attempt.plan.nodes > MANY else INTERVAL_S

    def _run(self) -> None:
        """Sample less and less often, down to once per interval."""
        try:
            while not self._ending.is_set():
                self.take_sample()
                pause_s = min(_FIRST_S * 2 ** min(self._number, 10), self._interval_s)
                self._ending.wait(pause_s * (1 + _JITTER * random.uniform(-1, 1)))
        except Exception as error:  # noqa: BLE001 - the run continues without samples
            if not self._ending.is_set():  # at the end, the process that asks NVML is killed
                self.journal.say(f"this node's usage is no longer sampled: {error!r}")

    def take_sample(self) -> Sample:
        """Take a sample, write it, and report the alerts that it raises."""
        sample = self._sample()
        old, self._state = holding(self._state), following(self._state, sample)
        sample = dataclasses.replace(sample, alerts=holding(self._state))
        self._number += 1
        if not append(self.attempt.paths, self.attempt.who.node, to_line(sample)):
            self._lost += 1
        for text in alert_texts([new for new in sample.alerts if new not in old], sample):
            self.journal.say(text)
        return sample

    def _sample(self) -> Sample:
        """Measure; CPU time and idle time count from the sample before."""
        (used, limit), cpu_before_s, at = self._group.memory(), self._cpu_s, time.monotonic()
        elapsed_s = at - self._points[-1][0] if self._points else 0.0
        self._points.append((at, used))
        while at - self._points[0][0] > GROWTH_S:
            self._points.popleft()
        self._begun = self._begun or at
        self._cpu_s, self._peak = cpu_seconds(), max(self._peak, used)
        cpu_used_s = max(0.0, self._cpu_s - cpu_before_s)
        return Sample(
            at=round(self.journal.now_s(), 3),
            attempt=self.attempt.number,
            interval_s=self._interval_s,
            host_bytes=used,
            host_limit_bytes=limit,
            host_peak_bytes=self._peak,
            host_full_s=full_in_s(self._points, limit),
            cpu=round(cpu_used_s / elapsed_s, 2) if elapsed_s else None,
            cpus=allocated_cpus(os.environ),
            ranks=tuple(sorted(self._ranks())),
            gpus=tuple(self._of_gpus(elapsed_s, at - self._begun)),
            lost=self._lost,
        )

    def _ranks(self) -> Iterator[tuple[int, int]]:
        pids = self.pids()
        if self._families.keys() != pids.keys() or self._number % _FAMILY_SAMPLES == 0:
            self._families = {rank: [pid, *descendants(pid)] for rank, pid in pids.items()}
        yield from ((rank, own_memory(found)) for rank, found in self._families.items())

    def _of_gpus(self, elapsed_s: float, total_s: float) -> Iterator[GpuSample]:
        """Yield the next sample of each GPU that the job has requested."""
        if self.gpus is None or not self.gpus.is_open:
            return
        planned = self.attempt.plan.gpus_per_node  # 0: all
        for gpu in self.gpus.ask(_ANSWER_S) or ():
            index = self.gpus.number(gpu)
            if not planned or index < planned:
                last = self._gpus.get(index, GpuSample(index=index))
                self._gpus[index] = _next_sample(last, gpu, elapsed_s, total_s)
                yield self._gpus[index]


def _next_sample(before: GpuSample, gpu: NvmlGpu, elapsed_s: float, total_s: float) -> GpuSample:
    """Return a GPU's next sample; the mean of its activity, weighted by time, is over `total_s`."""
    idle_s, mean = before.idle_s, before.activity_mean
    if gpu.activity is not None:
        idle_s = round(idle_s + elapsed_s, 1) if gpu.activity < IDLE_PERCENT else 0.0
        mean = gpu.activity if mean is None else mean
        mean += (gpu.activity - mean) * elapsed_s / max(total_s, elapsed_s, 1e-9)  # not by 0
    peaks = [size for size in (before.memory_peak_bytes, gpu.used) if size is not None]
    return GpuSample(
        index=before.index,
        memory_bytes=gpu.used,
        memory_total_bytes=gpu.total,
        memory_peak_bytes=max(peaks, default=None),
        activity=gpu.activity,
        activity_mean=None if mean is None else round(mean, 2),
        power_w=gpu.watts,
        temperature_c=gpu.celsius,
        idle_s=idle_s,
    )


def append(paths: RunPaths, node: str, line: bytes) -> bool:
    """Append a sample to a node's file, and begin a new one if it is full; False if that fails."""
    path = paths.usage(node)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if size_of(path) + len(line) > HALF_BYTES:
            path.rename(paths.earlier_usage(node))
        with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
            if (written := file.write(line) or 0) < len(line):  # the disk is full
                file.truncate(file.tell() - written)  # so that the next sample begins a line
            return written == len(line)
    return False
