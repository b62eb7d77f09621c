"""The states of a job, and the table of Slurm's names for them."""

from __future__ import annotations

from enum import Enum


class JobState(str, Enum):
    """The state of a job by Slurm's names: the base states, CONFIGURING and COMPLETING.

    PREEMPTED and NODE_FAIL end a job only if it was not requeued: if the scheduler still lists it
    as pending, it is pending.
    """

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    UNKNOWN = "UNKNOWN"

    @property
    def is_terminal(self) -> bool:
        """Return whether the job has ended; an unknown state counts as active."""
        return self not in _ACTIVE

    @property
    def is_success(self) -> bool:
        """Return whether the job completed."""
        return self is JobState.COMPLETED


_ACTIVE = (
    *(JobState.PENDING, JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED),
    *(JobState.COMPLETING, JobState.UNKNOWN),
)

# (long form, short form, ours), from the man pages of squeue and sacct, Slurm 22.05 to 25.05.
# The table has the flags that squeue shows instead of the base state. It leaves out those shown
# only for debugging (LAUNCH_FAILED, RECONFIG_FAIL, UPDATE_DB): they say nothing about the state.
_SLURM_STATES: tuple[tuple[str, str, JobState], ...] = (
    ("BOOT_FAIL", "BF", JobState.BOOT_FAIL),
    ("CANCELLED", "CA", JobState.CANCELLED),
    ("COMPLETED", "CD", JobState.COMPLETED),
    ("COMPLETING", "CG", JobState.COMPLETING),
    ("CONFIGURING", "CF", JobState.CONFIGURING),
    ("DEADLINE", "DL", JobState.DEADLINE),
    ("EXPEDITING", "EX", JobState.PENDING),
    ("FAILED", "F", JobState.FAILED),
    ("NODE_FAIL", "NF", JobState.NODE_FAIL),
    ("OUT_OF_MEMORY", "OOM", JobState.OUT_OF_MEMORY),
    ("PENDING", "PD", JobState.PENDING),
    ("POWER_UP_NODE", "PU", JobState.CONFIGURING),
    ("PREEMPTED", "PR", JobState.PREEMPTED),
    ("REQUEUED", "RQ", JobState.PENDING),
    ("REQUEUE_FED", "RF", JobState.PENDING),
    ("REQUEUE_HOLD", "RH", JobState.PENDING),
    ("RESIZING", "RS", JobState.RUNNING),
    ("RESV_DEL_HOLD", "RD", JobState.PENDING),
    ("REVOKED", "RV", JobState.CANCELLED),
    ("RUNNING", "R", JobState.RUNNING),
    ("SIGNALING", "SI", JobState.RUNNING),
    ("SPECIAL_EXIT", "SE", JobState.PENDING),
    ("STAGE_OUT", "SO", JobState.COMPLETING),
    ("STOPPED", "ST", JobState.SUSPENDED),
    ("SUSPENDED", "S", JobState.SUSPENDED),
    ("TIMEOUT", "TO", JobState.TIMEOUT),
)
_BY_NAME = {name: state for long, short, state in _SLURM_STATES for name in (long, short)}


def parse_slurm_state(text: str) -> JobState:
    """Parse a state as squeue, sacct and scontrol print it, possibly truncated or with a remark.

    A state that is not in the table becomes UNKNOWN, never an error.

    >>> parse_slurm_state("CANCELLED by 0"), parse_slurm_state("OUT_OF_ME+")
    (<JobState.CANCELLED: 'CANCELLED'>, <JobState.OUT_OF_MEMORY: 'OUT_OF_MEMORY'>)
    """
    words = text.split(maxsplit=1)
    word = words[0].upper() if words else ""
    if word.endswith("+"):
        start = word.rstrip("+")  # sacct truncated the state to the width of its column
        if start in _BY_NAME:
            return _BY_NAME[start]
        states = {state for long, _, state in _SLURM_STATES if long.startswith(start)}
        return states.pop() if len(states) == 1 else JobState.UNKNOWN
    return _BY_NAME.get(word, JobState.UNKNOWN)
