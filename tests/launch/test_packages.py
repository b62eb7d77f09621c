"""What is known against the interpreter of a job, and whether the nodes will find the same."""

from __future__ import annotations

from typing import Any

import pytest

from clusterrun.config.spec import Cluster, JobSpec, Strategy
from clusterrun.launch.facts import Interpreter
from clusterrun.launch.packages import interpreter_problem, is_certain
from tests.launch.samples import slurm_facts

ALL = {"clusterrun": "1.0", "torch": "2.13.0", "accelerate": "1.15.0", "deepspeed": "0.19.8"}
OLDEST = {"python": (3, 10), "torch": (2, 4), "accelerate": (1, 10)}
INSTALL = (
    "run /p -m pip install '.[train]' in a clone of clusterrun, "
    "or name another interpreter with --python"
)
UPGRADE = "upgrade it, or name another interpreter with --python"


def problem(asked: dict[str, Any], strategy: Strategy = Strategy.DDP, **known: Any) -> Any:
    facts: dict[str, Any] = {"python": known.pop("python", "/p"), "oldest": OLDEST}
    facts["cluster"] = known.pop("cluster", Cluster.SLURM)
    found = Interpreter(**{"path": "/p", "packages": ALL, "is_known": True, **known})
    spec = JobSpec(script="train.py", **asked)
    error = interpreter_problem(spec, slurm_facts(**facts, interpreter=found), strategy)
    return error and (error.message, error.hint)


@pytest.mark.parametrize(
    ("known", "strategy", "message", "hint"),
    [
        ({"packages": {**ALL, "torch": ""}}, Strategy.DDP, "/p has no torch", INSTALL),
        (
            {"packages": {"torch": "2.13.0"}},
            Strategy.DDP,
            "/p has no clusterrun or accelerate",
            INSTALL,
        ),
        ({"packages": {}}, Strategy.ZERO2, "/p has no clusterrun, torch, accelerate or", INSTALL),
        (
            {"packages": {**ALL, "deepspeed": ""}},
            Strategy.ZERO2,
            "/p has no deepspeed, which strategy zero2 needs",
            INSTALL,
        ),
        (
            {"packages": {**ALL, "torch": "2.1.0"}},
            Strategy.DDP,
            "/p has torch 2.1.0; clusterrun needs 2.4 or newer",
            UPGRADE,
        ),
        ({"version": (3, 6)}, Strategy.DDP, "/p is Python 3.6; clusterrun needs 3.10", UPGRADE),
    ],
)
def test_what_is_missing_or_too_old_is_named(
    known: dict[str, Any], strategy: Strategy, message: str, hint: str
) -> None:
    found = problem({}, strategy, **known)
    assert found[0].startswith(message)
    assert found[1] == hint


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ({}, {}),
        ({}, {"packages": {**ALL, "deepspeed": ""}}),
        ({}, {"packages": {**ALL, "torch": "?"}}),
        ({}, {"packages": {}, "is_known": False}),
        ({}, {"packages": {**ALL, "torch": "2.1.0"}, "is_known": False}),
        ({"srun_args": ("--container-image=x",)}, {"packages": {}}),
        ({"setup": ("conda: llm",)}, {"path": "", "python": "python"}),
    ],
)
def test_nothing_is_held_against_what_is_well_or_unknown(
    asked: dict[str, Any], known: dict[str, Any]
) -> None:
    assert problem(asked, **known) is None


def test_an_interpreter_that_is_not_here() -> None:
    message, hint = problem({}, path="", python="/gone/python")
    assert message == "there is no interpreter '/gone/python' on this machine"
    assert "--python" in hint


@pytest.mark.parametrize(
    ("asked", "known", "certain"),
    [
        ({}, {"path": "/p"}, True),
        ({}, {"path": ""}, False),
        ({"setup": ("venv: /v",)}, {"path": "/p"}, True),
        ({"setup": ("modules: torch", "venv: /v")}, {"path": "/p"}, False),
        ({"setup": ("export A=1",)}, {"path": "/p"}, False),
        ({"env": {"PYTHONPATH": "/x"}}, {"path": "/p"}, False),
    ],
)
def test_bash_modules_and_other_machines_may_have_more(
    asked: dict[str, Any], known: dict[str, Any], certain: bool
) -> None:
    facts = slurm_facts(interpreter=Interpreter(**known))
    assert is_certain(JobSpec(script="train.py", **asked), facts) is certain
