"""Numbers with a fraction, an exponent or a unit are read as they are meant."""

from __future__ import annotations

import pytest

from clusterrun.config.keys import BY_NAME
from clusterrun.config.values import interpret, written
from clusterrun.errors import UsageError


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("params", "8.03e9", 8.03e9),
        ("params", "8.03B", 8.03e9),
        ("params", "8.03b", 8.03e9),
        ("params", "480_000", 480_000),
        ("seq_len", "16k", 16_000),
        ("time_minutes", "90", 90),
        ("time_minutes", "1.5h", 90),
        ("timeout_s", "90", 90),
        ("timeout_s", "1:30:00", 5400),
        ("hang_timeout_s", "1h30m", 5400),
        ("step_time_s", "1m30s", 90),
        ("tokens", "1T", 1e12),
        ("lr", "1.25e-6", 1.25e-6),
        ("mfu", "0.4", 0.4),
        ("step_time_s", "4.5", 4.5),
        ("step_time_s", "4.5s", 4.5),
        ("step_time_s", "450ms", 0.45),
        ("samples", "1M", 1_000_000),
        ("max_steps", "2.5k", 2_500),
        ("samples", "0.123B", 123_000_000),
        ("samples", "3000000000", 3_000_000_000),
    ],
)
def test_a_number_is_read(name: str, text: str, value: float) -> None:
    assert interpret(BY_NAME[name], text, label=name) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("samples", "1.5"), ("samples", "1.2345k"), ("samples", "1000T"), ("gpus_per_node", "1.5")],
)
def test_what_is_no_whole_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} must be a whole number, not '{text}'"):
        interpret(BY_NAME[name], text, label=name)


def test_a_number_is_written_so_that_it_is_read_again() -> None:
    field = BY_NAME["lr"]
    assert interpret(field, written(field, 1.25e-6), label="lr") == 1.25e-6
