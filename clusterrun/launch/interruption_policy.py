"""Decide before a job starts how it continues after an interruption."""

from __future__ import annotations

import re

from clusterrun.config.choices import OnInterrupt
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError

LEAST_WARNING_S, MOST_WARNING_S = 30, 300
UNKNOWN_LIMIT_WARNING_S = 120
_DEFAULT_SIGNAL_S = 60  # sbatch's default, if slurm.signal names no time
_SIGNAL = r"(?i)(?:[BR]+:)?(?:(?:SIG)?USR[12]|10|12)(?:@(\d+))?\Z"


def on_interrupt(spec: JobSpec) -> OnInterrupt:
    """Choose how the run continues. Raises UsageError if Slurm must not requeue."""
    if spec.on_interrupt is OnInterrupt.REQUEUE and not spec.requeue:
        raise UsageError(
            "--on-interrupt requeue and --set slurm.requeue=false contradict each other",
            hint="use --on-interrupt successor: another job continues the run",
        )
    if spec.on_interrupt is not None:
        return spec.on_interrupt
    return OnInterrupt.REQUEUE if spec.requeue else OnInterrupt.STOP


def warning_s(spec: JobSpec) -> int:
    """Return how many seconds before the time limit the ranks are asked to save.

    A tenth of the limit, within bounds, unless slurm.signal sets it; Slurm may be a minute early.
    """
    if spec.signal:
        match = re.match(_SIGNAL, spec.signal)
        return int(match[1] or _DEFAULT_SIGNAL_S) if match else _DEFAULT_SIGNAL_S
    if not spec.time_minutes:
        return UNKNOWN_LIMIT_WARNING_S
    return min(MOST_WARNING_S, max(LEAST_WARNING_S, spec.time_minutes * 6))


def signal_request(spec: JobSpec) -> str:
    """Return sbatch's --signal: it warns the conductor alone, which passes it to the head.

    Without B:, Slurm would also signal ranks that do not expect it. Raises UsageError for a signal
    that would end the job without a save, as TERM does.
    """
    if spec.signal and not re.match(_SIGNAL, spec.signal):
        raise UsageError(
            f"slurm.signal {spec.signal} is neither USR1 nor USR2, which ask the ranks to save",
            hint="write it as B:USR2@300",
        )
    flags, _, rest = (spec.signal or f"B:USR2@{warning_s(spec)}").rpartition(":")
    return f"{flags if 'B' in flags.upper() else f'B{flags}'}:{rest}"


def survives_lost_nodes(spec: JobSpec) -> bool:
    """Return whether the job outlives a lost node, to relaunch or to arrange a successor."""
    if (spec.nodes or 1) + spec.spare_nodes == 1:
        return False
    return spec.max_restarts != 0 or on_interrupt(spec) is not OnInterrupt.STOP
