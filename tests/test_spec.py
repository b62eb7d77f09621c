"""What a spec made in Python refuses: no other door lets a value of another type in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from clusterrun.config.choices import Strategy
from clusterrun.config.fields import Kind
from clusterrun.config.spec import FIELDS, JobSpec
from clusterrun.errors import UsageError


def test_a_value_of_another_type_is_refused_by_the_name_of_its_field() -> None:
    table: list[tuple[dict[str, Any], str]] = [
        ({"nodes": "2"}, "nodes must be a whole number, not str"),
        ({"nodes": True}, "nodes must be a whole number, not bool"),
        ({"spare_nodes": None}, "spare_nodes must be a whole number, not None"),
        ({"time_minutes": 1.5}, "time_minutes must be a whole number, not float"),
        ({"timeout_s": "30m"}, "timeout_s must be a whole number, not str"),
        ({"exclusive": 1}, "exclusive must be True or False, not int"),
        ({"script": b"train.py"}, "script must be a str, not bytes"),
        ({"mem": 200}, "mem must be a str, not int"),
        ({"strategy": 2}, "strategy must be one of its values, not int"),
        ({"args": "--lr 1"}, "args must be a list of str, not str"),
        ({"args": ("--lr", 1e-4)}, "args must be a list of str"),
        ({"env": {"A": 1}}, "env must be a mapping of str to str"),
        ({"env": "A=1"}, "env must be a mapping of str to str, not str"),
        ({"network_env": (("A", "1"),)}, "network_env must be a mapping of str to str, not tuple"),
    ]
    for asked, message in table:
        with pytest.raises(UsageError) as refused:
            JobSpec(**asked)
        assert refused.value.message == message


def test_no_field_takes_what_it_cannot_be() -> None:
    for field in FIELDS:
        with pytest.raises(UsageError, match=field.name):
            JobSpec(**{field.name: object()})  # type: ignore[arg-type]  # a table of names
        if field.kind is Kind.TEXTS:
            with pytest.raises(UsageError, match="contains a NUL byte"):
                JobSpec(**{field.name: ("a", "b\0")})  # type: ignore[arg-type]


def test_an_option_of_slurm_ends_at_its_line() -> None:
    texts = ("--nice=1\n#SBATCH --wrap=x", "--comment=a\tb", "--nice=1\r")
    for field, text in itertools.product(("sbatch_args", "srun_args"), texts):
        with pytest.raises(UsageError, match=f"{field} contains a newline") as refused:
            JobSpec(**{field: (text,)})  # type: ignore[arg-type]  # a table of names
        assert refused.value.hints


def test_arguments_of_the_script_may_hold_newlines() -> None:
    assert JobSpec(args=("a\nb",)).args == ("a\nb",)


def test_a_list_becomes_a_tuple_and_a_word_stands_for_its_member() -> None:
    spec = JobSpec(args=["a"], strategy="zero2")  # type: ignore[arg-type]  # what people write
    assert (spec.args, spec.strategy) == (("a",), Strategy.ZERO2)
    assert (JobSpec().env, JobSpec(mem=None).mem) == ({}, None)


def test_the_watch_for_hangs_can_be_switched_off() -> None:
    assert JobSpec(hang_timeout_s=0).hang_timeout_s == 0
    with pytest.raises(UsageError, match="hang_timeout_s must be at least 0"):
        JobSpec(hang_timeout_s=-1)
