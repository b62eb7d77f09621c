"""A value that can't be meant is refused alike, whichever source it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clusterrun.config import Given
from clusterrun.config.fields import Kind
from clusterrun.config.keys import BY_NAME
from clusterrun.config.parallel import FIELDS as PARALLEL
from clusterrun.config.settings import yaml_text
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from tests.config.conftest import Workplace

MEMORY = "write a whole number with K, M, G or T, e.g. 200G"
TIME = "write 90 (minutes), 90m, 1h30m, 1:30:00 or 1-12:00:00 (days)"
WAIT = "write afterok:JOBID, or singleton"
HOSTS = "write it as Slurm does: node[01-04,7]"
NAME = "leave out slashes; '.', '..' and 'by-job' are reserved"
DISK = "name a directory on the disk of each node, without variables: /local/scratch"
MODULE = "list installed modules, such as [transformers, datasets]"
PORTS = "write two ports between 1024 and 65535, e.g. 20000-29999"
COUNT = "write 1 or more, or leave it out"

# Field, text, message, hint. {} is the setting as its source names it; a message without it is
# that of a text that has no value in Python.
BAD = [
    ("mem", "lots", "{} must be an amount of memory, not 'lots'", MEMORY),
    ("mem", "12Q", "{} must be an amount of memory, not '12Q'", MEMORY),
    ("mem", "1.5G", "{} must be an amount of memory, not '1.5G'", MEMORY),
    ("mem", "200GiB", "{} must be an amount of memory, not '200GiB'", MEMORY),
    ("mem_per_gpu", "-1", "{} must be an amount of memory, not '-1'", MEMORY),
    ("mem_per_cpu", "4 cores", "{} must be an amount of memory, not '4 cores'", MEMORY),
    ("time_minutes", "25:99", "'25:99' is not a time limit", TIME),
    ("time_minutes", "1:60:00", "'1:60:00' is not a time limit", TIME),
    ("time_min_minutes", "soon", "'soon' is not a time limit", TIME),
    ("exclude", "a b", "{} must not contain spaces: 'a b'", "separate nodes with commas"),
    (
        "nodelist",
        "node[1-",
        "{}: bad host list 'node[1-': '[' is unmatched at position 5",
        HOSTS,
    ),
    (
        "exclude",
        "n[9-1]",
        "{}: bad host list 'n[9-1]': range '9-1' runs backwards at position 3",
        HOSTS,
    ),
    ("dependency", "foo", "{}: 'foo' is not a dependency", WAIT),
    ("dependency", "afterok", "{}: 'afterok' is not a dependency", WAIT),
    ("dependency", "aftrok:12", "{}: 'aftrok:12' is not a dependency", "write afterok:12"),
    ("dependency", "afterok:1,x:2", "{}: 'x:2' is not a dependency", WAIT),
    ("health_command", "nhc 'x", '{} "nhc \'x": No closing quotation', "close each quote"),
    ("nodes", "0", "{} must be at least 1, not 0", COUNT),
    ("nodes", "-2", "{} must be at least 1, not -2", COUNT),
    (
        "nodes",
        "1000000",
        "{} must be at most 65533, not 1000000",
        "write 65533 or less (Slurm's maximum), or leave it out",
    ),
    (
        "nproc_per_node",
        "100000000000",
        "{} must be at most 1024, not 100000000000",
        "write 1024 or less, or leave it out",
    ),
    *(
        (
            name,
            "2000000000",
            "{} must be at most 67105792, not 2000000000",
            "write 67105792 or less, or leave it out",
        )
        for name in PARALLEL.values()
    ),
    ("gpus_per_node", "-1", "{} must be at least 0, not -1", "write 0 or more, or leave it out"),
    ("cpus_per_task", "0", "{} must be at least 1, not 0", COUNT),
    ("layers", "0", "{} must be at least 1, not 0", COUNT),
    (
        "hang_timeout_s",
        "-1",
        "'-1' is not a time span",
        "write 90 (seconds), 90s, 30m, 1h30m or 1:30:00",
    ),
    (
        "main_process_port",
        "65536",
        "{} must be at most 65535, not 65536",
        "write 65535 or less, or leave it out",
    ),
    *(
        ("stage_dir", text, f"{{}}: '{text}' is not an absolute path", DISK)
        for text in ("local", "~/copies", "$TMPDIR/x", "/scratch/$USER")
    ),
    *(
        ("preload", text, f"{{}}: '{text}' is not the name of a module", MODULE)
        for text in ("a b", "../x.py", "a..b", "numpy,json")
    ),
    ("port_range", "80-90", "{} 80-90 is not a range of ports", PORTS),
    ("port_range", "20000", "{} 20000 is not a range of ports", PORTS),
    ("port_range", "2000-1000", "{} 2000-1000 is not a range of ports", PORTS),
    ("port_range", "20000-70000", "{} 20000-70000 is not a range of ports", PORTS),
    ("port_range", "1-2-3", "{} 1-2-3 is not a range of ports", PORTS),
    ("name", "a/b", "{} 'a/b' cannot be the name of a run directory", NAME),
    ("name", "..", "{} '..' cannot be the name of a run directory", NAME),
    ("name", "by-job", "{} 'by-job' cannot be the name of a run directory", NAME),
    (
        "name",
        "n" * 201,
        "{} is longer than 200 bytes",
        "shorten it: it becomes the name of a directory",
    ),
    (
        "setup",
        "conad:llm",
        "setup: 'conad:llm' is neither an environment nor a line of bash",
        "write conda: llm",
    ),
    (
        "setup",
        "module: cuda/12.4",
        "setup: 'module: cuda/12.4' is neither an environment nor a line of bash",
        "write modules: cuda/12.4",
    ),
]
GOOD = [
    ("mem", ["0", "200G", "200GB", "1500", "512m", "4TB"]),
    ("time_minutes", ["90", "90:59", "25:59:59", "1-12", "2-03:04:05"]),
    ("nodelist", ["node[01-04,7]", "a,b", "hosts/mine.txt"]),
    ("dependency", ["afterok:1:2", "singleton", "afterany:7_3?AFTER:8+5", "4711", "aftercorr:3_*"]),
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
        yield field.env, lambda: self._by_environment(field.env, text)
        yield field.key, lambda: self._by_file(field.key, text, is_list=value != text)
        if field.kind in (Kind.TEXT, Kind.TEXTS):
            yield name, lambda: JobSpec(**{name: value})
        elif field.kind in (Kind.COUNT, Kind.NUMBER):
            yield name, lambda: JobSpec(**{name: int(text)})  # type: ignore[arg-type]

    def _by_environment(self, variable: str, text: str) -> None:
        self.workplace.environ[variable] = text
        try:
            self.workplace.load()
        finally:
            del self.workplace.environ[variable]

    def _by_file(self, key: str, text: str, *, is_list: bool) -> None:
        section, _, leaf = key.rpartition(".")
        quoted = f"[{yaml_text(text)}]" if is_list else yaml_text(text)
        line = f"{leaf}: {quoted}"
        path = self.workplace.write_project(f"{section}: {{{line}}}" if section else line)
        try:
            self.workplace.load()
        finally:
            path.unlink()


def test_a_bad_value_has_one_message_and_one_hint_from_every_source(workplace: Workplace) -> None:
    for name, text, message, hint in BAD:
        calls = list(Sources(workplace).load(name, text))
        assert len(calls) >= 5
        for label, call in calls:
            with pytest.raises(UsageError) as refused:
                call()
            assert refused.value.message == message.format(label)
            assert refused.value.hint == hint
            assert "\n" not in refused.value.message


def test_what_slurm_takes_is_taken(workplace: Workplace) -> None:
    for name, texts in GOOD:
        for text in texts:
            for _, call in Sources(workplace).load(name, text):
                call()


def test_arguments_in_one_text_are_answered_with_the_list(workplace: Workplace) -> None:
    workplace.write_project("args: --lr 1 --name 'a b'")
    with pytest.raises(UsageError, match="args must be a list") as refused:
        workplace.load()
    assert refused.value.hint == "write args: ['--lr', '1', '--name', 'a b']"
    with pytest.raises(UsageError, match="args must be a list of str, not str") as refused:
        JobSpec(args="--lr 1")  # type: ignore[arg-type]  # what people write
    assert refused.value.hint == "write ['--lr', '1']"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("args: [a, b\nname: x\n", "close the list that begins on line 1 with ]"),
        ("name: x\nenv: {A: 1\nargs: []\n", "close the mapping that begins on line 2 with }"),
        ("args: [a,\n", "close the list or mapping with ] or }"),
        ("name: 'abc\nargs: []\n", "close the quotation mark on line 1"),
        ("name: @b\n", "put the value in quotation marks"),
        ("name: a: b\n", "put a value with ': ' in quotation marks"),
        ("args:\n  - a\n name: x\n", "indent all keys of a level by the same number of spaces"),
    ],
)
def test_broken_yaml_is_answered_with_what_to_mend(
    workplace: Workplace, text: str, hint: str
) -> None:
    workplace.write_project(text)
    with pytest.raises(UsageError, match="this is not valid YAML") as refused:
        workplace.load()
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("params", "written"),
    [("478720", "478720"), ("8.03B", "8030000000"), ("0.25", "0.25"), ("1e-5", "1.0e-05")],
)
def test_a_number_is_written_as_a_number(workplace: Workplace, params: str, written: str) -> None:
    resolved = workplace.load({"params": params})
    assert f"training: {{params: {written},  # command line" in resolved.to_yaml().splitlines()
    (row,) = [row for row in resolved.rows() if row.key == "training.params"]
    assert row.value == float(written)
