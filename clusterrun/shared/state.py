"""The id of a job, its states, and the table of Slurm's names for them."""

from __future__ import annotations

import re
from enum import Enum

_FORM = r"[LH]?[0-9]{1,15}|[0-9]{1,15}[_+][0-9]{1,9}|"


class JobId(str):
    """4711, 4711_3 (task of an array), 4711+1 (component), L3 (this machine), H4 (on hosts).

    "" is no job. Any other text raises ValueError: a text of another party becomes an id only here,
    before it names a file.
    """

    __slots__ = ()

    def __new__(cls, text: object = "") -> JobId:
        """Check the text."""
        if not isinstance(text, str):
            raise ValueError(f"a job id must be a string, not {type(text).__name__}")
        if re.fullmatch(_FORM, text) is None:
            raise ValueError(f"{text[:40]!r} is not a job id")
        return super().__new__(cls, text)

    @classmethod
    def read(cls, text: object) -> JobId:
        """Return a text as an id; "" if it is not a job id."""
        try:
            return cls(text)
        except ValueError:
            return cls()

    @property
    def is_own(self) -> bool:
        """Return whether clusterrun gave the id, and no scheduler."""
        return self.startswith(("L", "H"))

    @property
    def number(self) -> int:
        """The number that orders ids; 0 for none."""
        return int(re.split("[_+]", self.lstrip("LH"))[0] or 0)


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

# Other states, from the man pages of squeue and sacct, Slurm 22.05 to 25.05: the flags that squeue
# shows instead of the base state. It leaves out those shown only for debugging (LAUNCH_FAILED,
# RECONFIG_FAIL, UPDATE_DB): they say nothing about the state.
_OTHERS = {
    JobState.PENDING: "EXPEDITING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
    JobState.CONFIGURING: "POWER_UP_NODE",
    JobState.RUNNING: "RESIZING SIGNALING",
    JobState.CANCELLED: "REVOKED",
    JobState.COMPLETING: "STAGE_OUT",
    JobState.SUSPENDED: "STOPPED",
}
_BY_NAME = {
    **{state.value: state for state in JobState},
    **{name: state for state, names in _OTHERS.items() for name in names.split()},
}


def parse_slurm_state(text: str) -> JobState:
    """Parse a state as squeue, sacct and scontrol print it, perhaps with a remark.

    A state that is not in the table becomes UNKNOWN, never an error.

    >>> parse_slurm_state("CANCELLED by 0"), parse_slurm_state("HIBERNATING")
    (<JobState.CANCELLED: 'CANCELLED'>, <JobState.UNKNOWN: 'UNKNOWN'>)
    """
    words = text.upper().split(maxsplit=1)
    name = words[0].rstrip("+") if words else ""  # sacct may shorten a remark to "CANCELLED+"
    return _BY_NAME.get(name, JobState.UNKNOWN)
