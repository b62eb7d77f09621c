"""A value that can't be meant is refused alike, whichever source it comes from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clusterrun.config.choices import Strategy
from clusterrun.config.fields import Kind, interpret, written
from clusterrun.config.load import Given
from clusterrun.config.settings import yaml_text
from clusterrun.config.spec import BY_NAME, FIELDS, JobSpec
from clusterrun.errors import UsageError
from tests.config.conftest import Workplace

TIME = "write 90 (minutes), 90m, 1h30m, 1:30:00 or 1-12:00:00 (days)"
SPAN = "write 90 (seconds), 90s, 30m, 1h30m or 1:30:00"
NAME = "leave out slashes; '.', '..' and 'by-job' are reserved"
DISK = "name a directory on the disk of each node, without variables: /local/scratch"
PORTS = "write two ports between 1024 and 65535, e.g. 20000-29999"
DEFAULT = "leave it out to use the default"

# Fields, texts, message, hint. {0} is the setting as its source names it, {1} the text; a message
# without {0} is that of a text that has no value in Python.
RULES = [
    ("time_minutes", ("25:99", "1:60:00"), "'{1}' is not a time limit", TIME),
    ("time_min_minutes", ("soon",), "'{1}' is not a time limit", TIME),
    ("hang_timeout_s", ("-1",), "'-1' is not a time span", SPAN),
    ("nodes cpus_per_task layers", ("0",), "{0} must be at least 1, not 0", DEFAULT),
    ("gpus_per_node", ("-1",), "{0} must be at least 0, not -1", DEFAULT),
    ("nodes", ("99999",), "{0} must be at most 65533, not 99999", DEFAULT),
    ("nproc_per_node", ("99999",), "{0} must be at most 1024, not 99999", DEFAULT),
    ("main_process_port", ("65536",), "{0} must be at most 65535, not {1}", DEFAULT),
    ("stage_dir", ("local", "~/x", "/x/$USER"), "{0} must be an absolute path, not '{1}'", DISK),
    ("port_range", ("80-90", "20000", "2000-1000", "20000-70000", "1-2-3"),
     "{0} {1} is not a valid range of ports", PORTS),
    ("name", ("a/b", "..", "by-job"), "{0} cannot be the name of a run directory: '{1}'", NAME),
]  # fmt: skip
BAD = [
    (name, text, message.replace("{1}", text), hint)
    for names, texts, message, hint in RULES
    for name in names.split()
    for text in texts
]
GOOD = [
    ("mem", ["0", "200G", "200GB", "1500", "512m", "4TB"]),
    ("time_minutes", ["90", "90:59", "25:59:59", "1-12", "2-03:04:05"]),
    ("nodelist", ["node[01-04,7]", "a,b", "hosts/mine.txt"]),
    ("nodes", ["1", "65533"]),
    ("name", ["a.b", "ä b", "n" * 200]),
    ("setup", ["conda:llm", "export A=b:c", "http://x: y", "cd /x; a: b", "uv: /x"]),
]


class Sources:
    """Every way by which a text becomes the value of a field."""

    def __init__(self, workplace: Workplace) -> None:
        self.workplace = workplace

    def load(self, name: str, text: str) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield for each source the name that it has for the field, and its call."""
        field, place = BY_NAME[name], self.workplace
        value: Any = (text,) if field.kind is Kind.TEXTS else text
        option = field.flags[-1] if field.flags else field.key
        yield option, lambda: place.load({name: Given(value=value, flag=option)})
        yield field.key, lambda: place.load({name: value})
        yield field.key, lambda: place.load(overrides=[f"{field.key}={text}"])
        place.environ[field.env] = text
        yield field.env, place.load
        del place.environ[field.env]
        section, _, leaf = field.key.rpartition(".")
        line = f"{leaf}: {yaml_text(text) if value == text else f'[{yaml_text(text)}]'}"
        path = place.write_project(f"{section}: {{{line}}}" if section else line)
        yield field.key, place.load
        path.unlink()
        if field.kind in (Kind.TEXT, Kind.TEXTS):
            yield name, lambda: JobSpec(**{name: value})
        elif field.kind in (Kind.COUNT, Kind.NUMBER):
            yield name, lambda: JobSpec(**{name: int(text)})  # type: ignore[arg-type]


def test_a_bad_value_has_one_message_and_one_hint_from_every_source(workplace: Workplace) -> None:
    for name, text, message, hint in BAD:
        for label, call in Sources(workplace).load(name, text):
            with pytest.raises(UsageError) as refused:
                call()
            assert refused.value.message == message.format(label)
            assert refused.value.hint == hint


def test_what_slurm_takes_is_taken(workplace: Workplace) -> None:
    for name, texts in GOOD:
        for text in texts:
            for _, call in Sources(workplace).load(name, text):
                call()


NUMBERS = {
    "params": {"8.03e9": 8.03e9, "8.03B": 8.03e9, "8.03b": 8.03e9, "480_000": 480_000},
    "seq_len": {"16k": 16_000},
    "time_minutes": {"90": 90, "1.5h": 90},
    "timeout_s": {"90": 90, "1:30:00": 5400},
    "hang_timeout_s": {"1h30m": 5400},
    "step_time_s": {"1m30s": 90, "4.5": 4.5, "4.5s": 4.5, "450ms": 0.45},
    "tokens": {"1T": 1e12},
    "lr": {"1.25e-6": 1.25e-6},
    "samples": {"1M": 1_000_000, "0.123B": 123_000_000, "3000000000": 3_000_000_000},
    "max_steps": {"2.5k": 2_500},
}
NO_NUMBERS = {"samples": ("1.5", "1.2345k", "1000T"), "gpus_per_node": ("1.5",)}


def test_a_number_is_read_as_it_is_meant_and_all_else_refused() -> None:
    for name, texts in NUMBERS.items():
        read = [interpret(BY_NAME[name], text, label=name) for text in texts]
        assert read == pytest.approx([*texts.values()])
    for name, words in NO_NUMBERS.items():
        for text in words:
            with pytest.raises(UsageError, match=rf"{name} must be a whole number, not '{text}'"):
                interpret(BY_NAME[name], text, label=name)
    field = BY_NAME["lr"]
    assert interpret(field, written(field, 1.25e-6), label="lr") == 1.25e-6


def test_a_number_is_written_as_a_number(workplace: Workplace) -> None:
    for params, text in (("8.03B", "8030000000"), ("0.25", "0.25"), ("1e-5", "1.0e-05")):
        resolved = workplace.load({"params": params})
        assert f"{{params: {text},  # command line" in resolved.to_yaml()
        (row,) = [row for row in resolved.rows() if row.key == "training.params"]
        assert row.value == float(text)


# What a spec made in Python refuses: no other door lets a value of another type in


def test_a_value_of_another_type_is_refused_by_the_name_of_its_field() -> None:
    table: list[tuple[dict[str, Any], str]] = [
        ({"nodes": "2"}, "nodes must be a whole number, not str"),
        ({"nodes": True}, "nodes must be a whole number, not bool"),
        ({"spare_nodes": None}, "spare_nodes must be a whole number, not None"),
        ({"time_minutes": 1.5}, "time_minutes must be a whole number, not float"),
        ({"hang_timeout_s": -1}, "hang_timeout_s must be at least 0, not -1"),
        ({"exclusive": 1}, "exclusive must be True or False, not int"),
        ({"script": b"train.py"}, "script must be a str, not bytes"),
        ({"mem": "lots"}, "mem must be an amount of memory, not 'lots'"),
        ({"strategy": 2}, "strategy must be a str, not int"),
        ({"args": "--lr 1"}, "args must be a list of str, not str"),
        ({"args": ("--lr", 1e-4)}, "args must be a list of str"),
        ({"env": {"A": 1}}, "env must be a mapping of str to str"),
        ({"env": "A=1"}, "env must be a mapping of str to str, not str"),
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
    assert JobSpec(args=("a\nb",)).args == ("a\nb",)  # those of the script may


def test_a_list_becomes_a_tuple_and_a_word_stands_for_its_member() -> None:
    spec = JobSpec(args=["a"], strategy="zero2")  # type: ignore[arg-type]  # what people write
    assert (spec.args, spec.strategy) == (("a",), Strategy.ZERO2)
    assert (JobSpec().env, JobSpec(mem=None).mem) == ({}, None)
    assert JobSpec(hang_timeout_s=0).hang_timeout_s == 0  # it switches the watch for hangs off
