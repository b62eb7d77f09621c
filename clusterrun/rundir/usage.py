"""What a run uses on its nodes: `usage/<node>.jsonl`, a line for each sample, the newest last.

The agent appends. At HALF_BYTES it renames the file to `<node>.old`, which replaces the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from clusterrun.rundir.paths import RunPaths
from clusterrun.shared import files
from clusterrun.shared.hostlist import fold_ranks
from clusterrun.shared.typed import decoded

HALF_BYTES: Final = 2 << 20
LINE_BYTES: Final = 64 << 10  # at most; a node of 8 GPUs has lines of about 1 KB


class AlertKind(str, Enum):
    """What an alert is about."""

    HOST_MEMORY = "host_memory"
    GPU_MEMORY = "gpu_memory"
    GPU_TEMPERATURE = "gpu_temperature"
    GPU_IDLE = "gpu_idle"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert that holds since `at`; `gpu` is the index of its GPU."""

    kind: AlertKind
    at: float
    gpu: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """A GPU, by the number that the ranks use; None: NVML does not report it."""

    index: int
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    memory_peak_bytes: int | None = None  # of the attempt
    activity: float | None = None  # percent, of late
    activity_mean: float | None = None  # percent, of the attempt
    power_w: float | None = None
    temperature_c: int | None = None
    idle_s: float = 0.0  # for how long its activity has been below 5 %

    @property
    def memory_percent(self) -> float | None:
        """How full its memory is."""
        return percent(self.memory_bytes, self.memory_total_bytes)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What an attempt uses on one node.

    Host memory is that of the cgroup with the smallest limit, or of the machine if no limit is
    smaller than its memory, without page cache.
    """

    at: float  # epoch seconds by the conductor's clock
    attempt: int
    interval_s: float = 5.0
    host_bytes: int | None = None
    host_limit_bytes: int | None = None
    host_peak_bytes: int | None = None
    host_full_s: float | None = None  # until it is full, if it grows as in the last ten minutes
    cpu: float | None = None  # a number of CPUs, of `cpus`
    cpus: int | None = None
    ranks: tuple[tuple[int, int], ...] = ()  # a rank, and memory of its own and its processes' own
    gpus: tuple[GpuSample, ...] = ()
    alerts: tuple[Alert, ...] = ()
    lost: int = 0  # samples that could not be written

    @property
    def host_percent(self) -> float | None:
        """How full the host memory is."""
        return percent(self.host_bytes, self.host_limit_bytes)

    @property
    def fullest_percent(self) -> float:
        """How full its fullest memory is."""
        return max(p or 0.0 for p in (self.host_percent, *(g.memory_percent for g in self.gpus)))


_GPU_FIELDS: Final = tuple(field.name for field in dataclasses.fields(GpuSample))


def percent(used: int | None, limit: int | None) -> float | None:
    """Return which share of a limit is used; None if it is not known.

    >>> percent(3, 4), percent(3, None), percent(3, 0)
    (75.0, None, None)
    """
    return None if used is None or not limit or limit < 0 else 100.0 * used / limit


def alert_texts(alerts: Iterable[Alert], sample: Sample) -> list[str]:
    """Describe alerts of a node by its newest sample, those of one kind in one line."""
    by_kind: dict[AlertKind, list[GpuSample]] = {}  # host memory has no GPUs
    for alert in alerts:
        by_kind.setdefault(alert.kind, []).extend(g for g in sample.gpus if g.index == alert.gpu)
    return [_alert_text(kind, gpus, sample) for kind, gpus in by_kind.items()]


def _alert_text(kind: AlertKind, gpus: Sequence[GpuSample], sample: Sample) -> str:
    """Describe the alerts of one kind by the worst of these GPUs, or by the shortest idle time."""
    if kind is AlertKind.HOST_MEMORY:
        full_s = sample.host_full_s
        full = "" if full_s is None else f", full in {max(1, round(full_s / 60)):,} min"
        return f"host memory {share_text(sample.host_bytes, sample.host_limit_bytes)}{full}"
    which = f"GPU{'s' if len(gpus) > 1 else ''} {fold_ranks(gpu.index for gpu in gpus)}"
    if kind is AlertKind.GPU_MEMORY:
        most = max(gpus, key=lambda gpu: gpu.memory_percent or 0, default=GpuSample(index=0))
        return f"{which}: memory {share_text(most.memory_bytes, most.memory_total_bytes)}"
    if kind is AlertKind.GPU_TEMPERATURE:
        return f"{which}: {max((gpu.temperature_c or 0 for gpu in gpus), default=0)} °C"
    idle_s = min((gpu.idle_s for gpu in gpus), default=0)
    return f"{which}: idle for {idle_s / 60:.0f} min while others work"


def share_text(used: int | None, limit: int | None) -> str:
    """Describe what is used of a limit.

    >>> share_text(3 << 30, 4 << 30)
    '75 % of 4 GiB'
    """
    return f"{percent(used, limit) or 0:.0f} % of {(limit or 0) / (1 << 30):,.0f} GiB"


def to_line(sample: Sample) -> bytes:
    """Return the line of a sample; a GPU is a list of its fields' values."""
    data = {name: value for name, value in vars(sample).items() if value not in (None, ())}
    data["gpus"] = [list(vars(gpu).values()) for gpu in sample.gpus]
    data["alerts"] = [vars(alert) for alert in sample.alerts]
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def parse(line: bytes) -> Sample | None:
    """Parse one sample; None for any other line."""
    data = files.parse_object(line) or {}
    with contextlib.suppress(TypeError, ValueError):
        gpus = [dict(zip(_GPU_FIELDS, values, strict=False)) for values in data.get("gpus", ())]
        sample: Sample = decoded(Sample, {**data, "gpus": gpus})
        return sample
    return None


def read_latest(paths: RunPaths, attempt: int | None = None) -> dict[str, Sample]:
    """Return the newest sample of each node of an attempt; None: the newest attempt."""
    number = paths.newest_attempt() if attempt is None else attempt
    nodes: set[str] = set()
    with contextlib.suppress(OSError):
        nodes = {entry.stem for entry in paths.usage_dir.iterdir()}
    newest = {node: next(_newest_first(paths, node), None) for node in sorted(nodes)}
    return {node: each for node, each in newest.items() if each and each.attempt == number}


def _newest_first(paths: RunPaths, node: str) -> Iterator[Sample]:
    """Yield a node's samples, newest first; repeat them if more of a file's end must be read."""
    for path in (paths.usage(node), paths.earlier_usage(node)):
        for size in (files.TAIL_BYTES, LINE_BYTES):
            lines = files.end_of(path, size).split(b"\n")
            yield from filter(None, map(parse, reversed(lines)))


def silent(samples: Mapping[str, Sample], now: float) -> dict[str, float]:
    """Return the nodes that have left out three samples, and the seconds since their newest."""
    newest = max((sample.at for sample in samples.values()), default=now)
    # Compare with the newest node: this clock may differ from theirs. After a minute without any
    # sample all are silent, and this clock is all there is.
    latest = now if now - newest > 60.0 else newest
    ages = {node: latest - sample.at for node, sample in samples.items()}
    return {node: age for node, age in ages.items() if age > 3 * samples[node].interval_s}
