"""What a first import costs: nothing heavy before a verb needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from clusterrun.cli.main import VERBS
from tests.patience import PATIENCE

HEAVY = {"accelerate", "deepspeed", "jinja2", "rich", "submitit", "torch", "transformers"}

# The child writes the names of its modules at its very end, whatever ended it.
CHILD = """
import atexit, json, os, runpy, sys

def report():
    names = sorted({name.partition(".")[0] for name in sys.modules})
    os.write(int(os.environ["REPORT_FD"]), json.dumps(names).encode())

atexit.register(report)
if sys.argv[1:]:
    runpy.run_module("clusterrun", run_name="__main__", alter_sys=True)
else:
    exec(os.environ["PROGRAM"])
"""


def _loaded(*argv: str, program: str = "") -> set[str]:
    """Run `python -m clusterrun ARGV`, or a program, and name the modules that it loaded."""
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *argv],
            env={**os.environ, "REPORT_FD": str(writing), "PROGRAM": program},
            pass_fds=[writing],
            capture_output=True,
            text=True,
            timeout=60 * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return set(json.loads(os.read(reading, 1 << 20)))
    finally:
        os.close(reading)
        os.close(writing)


def test_the_measurement_sees_a_heavy_import() -> None:
    assert "jinja2" in _loaded(program="import jinja2.ext")


def test_import_clusterrun_loads_nothing_heavy_not_even_click() -> None:
    loaded = _loaded(program="import clusterrun; clusterrun.__version__; dir(clusterrun)")
    assert "clusterrun" in loaded
    assert not loaded & (HEAVY | {"click", "yaml"})


def test_what_a_training_script_may_import_loads_nothing_heavy() -> None:
    assert not _loaded(program="import clusterrun.runtime") & (HEAVY | {"click", "yaml"})


@pytest.mark.parametrize("name", ["JobSpec", "submit", "status"])
def test_the_verbs_of_the_package_load_nothing_heavy(name: str) -> None:
    assert not _loaded(program=f"from clusterrun import {name}") & HEAVY


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["help", "exit-codes"]])
def test_the_command_line_alone_loads_nothing_heavy(argv: list[str]) -> None:
    assert not _loaded(*argv) & (HEAVY | {"yaml"})


def test_help_of_all_verbs_loads_nothing_heavy() -> None:
    calls = "".join(f"assert main(['{verb}', '--help']) == 0\n" for verb in VERBS)
    loaded = _loaded(program=f"from clusterrun.cli.main import main\n{calls}")
    assert {"click", "yaml"} <= loaded
    assert not loaded & HEAVY


PLAN = "plan --model llama-3.1-8b --gpus-per-node 8 --gpu h100-80g --strategy zero3 --seq-len 1024"


@pytest.mark.parametrize("option", [(), ("--recommend", "--effective-batch", "64"), ("--json",)])
def test_an_answer_of_plan_loads_nothing_that_it_does_without(option: tuple[str, ...]) -> None:
    # A process of `plan` is start-up: these made a quarter of it.
    unneeded = {"asyncio", "email", "logging", "psutil", "statistics"}
    assert not _loaded(*PLAN.split(), "--host-mem", "1000GiB", *option) & (HEAVY | unneeded)
