"""What may be said about logs: from a file, a variable or --set down to the nodes' plan."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import CommandLine

KEYS = [
    ("spool", "2GiB", "log_spool_bytes", 2 << 30, 1 << 30),
    ("max_lines_per_s", "500", "log_lines_per_s", 500, 0),
]
LEAST = "write 1 or more, or leave it out"


def planned(here: CommandLine, *args: str) -> dict[str, Any]:
    said = here("render", "--json", "--cluster", "local", *args, "train.py")
    assert said.code == 0, said.err
    plan: dict[str, Any] = json.loads(json.loads(said.out)["files"]["plan.json"])
    return plan


@pytest.mark.parametrize(("key", "text", "name", "value", "default"), KEYS)
def test_each_setting_reaches_the_plan_and_knows_its_default(
    here: CommandLine, key: str, text: str, name: str, value: int, default: int
) -> None:
    assert planned(here)[name] == default
    assert planned(here, "--set", f"logs.{key}={text}")[name] == value


@pytest.mark.parametrize(("key", "text", "name", "value", "default"), KEYS)
def test_each_setting_is_read_from_a_file_and_a_variable(
    here: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    text: str,
    name: str,
    value: int,
    default: int,
) -> None:
    (here.path / "clusterrun.yaml").write_text(f"logs:\n  {key}: {text}\n")
    assert planned(here)[name] == value
    shown = here("config", "show", "--origin", f"logs.{key}").out.splitlines()[1]
    assert shown.split() == [f"logs.{key}", text, "./clusterrun.yaml:2"]
    monkeypatch.setenv(f"CLUSTERRUN_LOGS_{key.upper()}", "7")
    assert planned(here)[name] == 7


@pytest.mark.parametrize(
    ("line", "column", "message", "hint"),
    [
        ("spool: 1 zb", 10, "'1 zb' is not a size", "write 4096 (bytes), 64KiB, 200M or 1GiB"),
        ("spool: 0", 10, "logs.spool must be at least 1, not 0", LEAST),
        (
            "max_lines_per_s: 0",
            20,
            "logs.max_lines_per_s must be at least 1, not 0",
            LEAST,
        ),
        (
            "max_lines_per_s: few",
            20,
            "logs.max_lines_per_s must be a whole number, not 'few'",
            "write a number, e.g. 4",
        ),
        (
            "max_lines: 5",
            3,
            "unknown key 'max_lines' in section [logs]",
            "use 'max_lines_per_s'",
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_its_line(
    here: CommandLine, line: str, column: int, message: str, hint: str
) -> None:
    (here.path / "clusterrun.yaml").write_text(f"logs:\n  {line}\n")
    said = here("config", "validate", "--json")
    assert said.code == 2
    (error,) = json.loads(said.out)["errors"]
    assert error == {"message": message, "where": f"clusterrun.yaml:2:{column}", "hint": hint}
