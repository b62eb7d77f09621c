"""What a first import costs: nothing heavy before a verb needs it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from clusterrun.cli.main import VERBS
from tests.patience import finished

HEAVY = {"accelerate", "deepspeed", "jinja2", "rich", "submitit", "torch", "transformers"}

# The child writes the names of its modules at its very end, whatever ended it.
CHILD = """
import atexit, json, os, runpy, sys

def report():
    names = sorted(name for name in sys.modules if "." not in name or "clusterrun" in name)
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
        env = {**os.environ, "REPORT_FD": str(writing), "PROGRAM": program}
        done = finished([sys.executable, "-c", CHILD, *argv], env=env, pass_fds=[writing])
        assert done.returncode == 0, done.stderr
        return set(json.loads(os.read(reading, 1 << 20)))
    finally:
        os.close(reading)
        os.close(writing)


def _ours(*, program: str) -> set[str]:
    return {name for name in _loaded(program=program) if name.startswith("clusterrun.")}


def test_the_measurement_sees_a_heavy_import() -> None:
    assert "jinja2" in _loaded(program="import jinja2.ext")


def test_the_package_loads_nothing_heavy_not_even_click() -> None:
    assert not _ours(program="import clusterrun")
    for name in ("__version__, runtime", "JobSpec, submit, status", "read_logs"):
        program = f"import clusterrun; dir(clusterrun); from clusterrun import {name}"
        assert not _loaded(program=program) & (HEAVY | {"click", "yaml"})


def test_help_loads_nothing_heavy() -> None:
    for argv in (["--help"], ["help", "exit-codes"]):
        assert not _loaded(*argv) & (HEAVY | {"yaml"})
    calls = "".join(f"assert main(['{verb}', '--help']) == 0\n" for verb in VERBS)
    loaded = _loaded(program=f"from clusterrun.cli.main import main\n{calls}")
    assert {"click", "yaml"} <= loaded
    assert not loaded & HEAVY


# What only some of them need, and what these replace.
UNNEEDED = HEAVY | {"argparse", "email", "statistics", "yaml"}


def test_a_verb_loads_nothing_that_it_may_do_without() -> None:
    verbs = ("submit", "render", "status", "list", "logs", "cancel")
    get = "; ".join(f"m.group.get_command(None, '{verb}')" for verb in verbs)
    loaded = _loaded(program=f"import clusterrun.cli.main as m; {get}")
    assert not loaded & (UNNEEDED | {"asyncio", "concurrent", "psutil"})
    assert not _loaded("diagnose", os.devnull) & (UNNEEDED | {"asyncio", "concurrent", "psutil"})


def test_what_submit_imports_makes_few_dataclasses_and_compiles_few_patterns() -> None:
    # Each costs up to a millisecond in every command; a named tuple, or a text for `re`, does not.
    program = """import re, sys, clusterrun.cli.submit
values = {id(v): v for n, m in sys.modules.items() if "clusterrun." in n for v in vars(m).values()}
assert sum(type(each) is re.Pattern for each in values.values()) <= 5
assert sum("__dataclass_fields__" in vars(v) for v in values.values() if type(v) is type) <= 14"""
    assert _loaded(program=program)


# submitit, and what it loads, for sbatch alone: without srun, `submit` ends before that.
SUBMITIT = {"asyncio", "concurrent", "email", "submitit"}


@pytest.mark.parametrize(
    ("verb", "programs", "status", "more"),
    [
        ("submit", ("sbatch", "srun"), 0, SUBMITIT),
        ("submit", ("sbatch",), 1, set()),
        ("render", ("sbatch", "srun"), 0, set()),
    ],
)
def test_only_a_submission_loads_submitit(
    tmp_path: Path, verb: str, programs: tuple[str, ...], status: int, more: set[str]
) -> None:
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\necho 7\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    argv = [verb, "-N2", "--run-dir", str(tmp_path / "runs"), str(tmp_path / "train.py")]
    program = f"""
import os
os.environ["PATH"] = {str(tmp_path)!r}
from clusterrun.cli.main import main
assert main({argv!r}) == {status}
"""
    loaded = _loaded(program=program)
    heavy = UNNEEDED | {"asyncio", "concurrent", "psutil"}
    assert loaded & heavy == {"jinja2"} | more


@pytest.mark.parametrize("argv", [["status"], ["logs", "-n", "1"]])
def test_a_run_given_by_its_path_is_read_without_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    where = ("--cluster", "local", "--device", "cpu", "--set", "launch.world_contract=false")
    assert _loaded("submit", *where, "--wait", "train.py")
    (run,) = (tmp_path / "runs" / "train").iterdir()
    loaded = _loaded(*argv, str(run))
    assert not {name for name in loaded if name.startswith("clusterrun.config.")} & SETTINGS
    assert "clusterrun.config.load" in _loaded(*argv, "train")


SETTINGS = {f"clusterrun.config.{name}" for name in ("spec", "settings", "fields", "load")}


@pytest.mark.parametrize(
    "module", ["clusterrun.backends.slurm.host", "clusterrun.node.conductor.conductor"]
)
def test_a_conductor_starts_its_step_before_it_loads_more(module: str) -> None:
    # This is the time from the start of a job to its agents; the rule book follows later.
    loaded = _loaded(program=f"import {module}")
    assert not loaded & (UNNEEDED | {"asyncio", "click", "concurrent", "psutil"})
    assert len(_ours(program=f"import {module}")) < 50


def test_an_agent_loads_no_settings_and_no_templates() -> None:
    program = "import clusterrun.node.agent.process"
    assert not _loaded(program=program) & (UNNEEDED | {"click", "pickle", "decimal"})
    ours = _ours(program=program)
    assert not {name for name in ours if name.startswith(("clusterrun.cli", "clusterrun.verbs"))}
    assert "clusterrun.config.spec" not in ours


PLAN = "plan --model llama-3.1-8b --gpus-per-node 8 --gpu h100-80g --strategy zero3 --seq-len 1024"


@pytest.mark.parametrize("option", [(), ("--recommend", "--effective-batch", "64"), ("--json",)])
def test_an_answer_of_plan_loads_nothing_that_it_does_without(option: tuple[str, ...]) -> None:
    # A process of `plan` is start-up: these made a quarter of it.
    unneeded = {"asyncio", "email", "logging", "numpy", "psutil", "statistics"}
    assert not _loaded(*PLAN.split(), "--host-mem", "1000GiB", *option) & (HEAVY | unneeded)
