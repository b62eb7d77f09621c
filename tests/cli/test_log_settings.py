"""What may be said about logs: from a file, a variable or --set down to the nodes' plan."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import CommandLine


def test_each_setting_of_logs_reaches_the_plan(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: str) -> list[int]:
        said = here("render", "--json", "--cluster", "local", *args, "train.py")
        plan = json.loads(json.loads(said.out)["files"]["plan.json"])
        return [plan[f"log_{name}"] for name in ("spool_bytes", "lines_per_s")]

    assert planned() == [1 << 30, 0]
    (here.path / "clusterrun.yaml").write_text("logs: {spool: 2GiB, max_lines_per_s: 500}\n")
    assert planned() == [2 << 30, 500]
    monkeypatch.setenv("CLUSTERRUN_LOGS_SPOOL", "7")
    assert planned("--set", "logs.max_lines_per_s=9") == [7, 9]


def test_a_size_that_is_none_is_refused_with_its_line(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text("logs:\n  spool: 1 zb\n  max_lines: 5\n")
    said = here("config", "validate", "--json")
    assert said.code == 2
    assert [[*error.values()] for error in json.loads(said.out)["errors"]] == [
        ["'1 zb' is not a size", "clusterrun.yaml:2:10", "write 4096 (bytes), 64KiB, 200M or 1GiB"],
        [
            *("unknown key 'max_lines' in section [logs]", "clusterrun.yaml:3:3"),
            "use 'max_lines_per_s'",
        ],
    ]
