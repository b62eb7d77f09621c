"""Slurm's words for the state of a job."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.shared import state
from clusterrun.shared.state import JobState, parse_slurm_state


def test_examples_in_the_docstrings_hold() -> None:
    result = doctest.testmod(state)
    assert result.attempted >= 1
    assert result.failed == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("COMPLETED", JobState.COMPLETED),
        ("CD", JobState.COMPLETED),
        ("R", JobState.RUNNING),
        ("PD", JobState.PENDING),
        (" RUNNING \n", JobState.RUNNING),
        ("CANCELLED by 0", JobState.CANCELLED),
        ("CANCELLED by 60001", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("OOM", JobState.OUT_OF_MEMORY),
        ("COMPLETIN+", JobState.COMPLETING),
        ("CONFIGURI+", JobState.CONFIGURING),
        ("REQUEUE_H+", JobState.PENDING),
        ("SPECIAL_E+", JobState.PENDING),
        ("RESV_DEL_+", JobState.PENDING),
        ("NF", JobState.NODE_FAIL),
        ("ST", JobState.SUSPENDED),
        ("SO", JobState.COMPLETING),
    ],
)
def test_states_are_read_in_each_form_that_slurm_writes(text: str, expected: JobState) -> None:
    assert parse_slurm_state(text) is expected


@pytest.mark.parametrize("text", ["", " ", "+", "COMPLET+", "HIBERNATING", "LAUNCH_FAILED", "0"])
def test_an_unknown_state_is_unknown_and_counts_as_active(text: str) -> None:
    assert parse_slurm_state(text) is JobState.UNKNOWN
    assert not JobState.UNKNOWN.is_terminal


@given(st.text())
def test_no_text_raises(text: str) -> None:
    assert isinstance(parse_slurm_state(text), JobState)


def test_each_state_can_be_read_back_from_its_own_name() -> None:
    assert [parse_slurm_state(each.value) for each in JobState] == list(JobState)


def test_states_split_into_ended_and_active() -> None:
    active = {each.value for each in JobState if not each.is_terminal}
    assert active == {
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "SUSPENDED",
        "COMPLETING",
        "UNKNOWN",
    }
    assert [each for each in JobState if each.is_success] == [JobState.COMPLETED]
