"""Slurm's words for the state of a job."""

from __future__ import annotations

from clusterrun.shared.state import JobState, parse_slurm_state

# As Slurm writes them, and ours, by name.
WORDS = {
    **{" RUNNING \n": "RUNNING", "CANCELLED by 60001": "CANCELLED", "CANCELLED+": "CANCELLED"},
    **{"REQUEUE_HOLD": "PENDING", "STOPPED": "SUSPENDED", "STAGE_OUT": "COMPLETING"},
    **dict.fromkeys(("", " ", "+", "COMPLET+", "HIBERNATING", "LAUNCH_FAILED", "0"), "UNKNOWN"),
    **{each.value: each.value for each in JobState},
}


def test_states_are_read_in_each_form_that_slurm_writes() -> None:
    assert {text: parse_slurm_state(text).name for text in WORDS} == WORDS


def test_states_split_into_ended_and_active() -> None:
    active = {each.value for each in JobState if not each.is_terminal}
    assert active == {
        *("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "UNKNOWN"),
    }
    assert [each for each in JobState if each.is_success] == [JobState.COMPLETED]
