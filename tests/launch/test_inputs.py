"""What the arguments of a script read is looked for before the job waits in a queue."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.machine_facts import gather_facts
from clusterrun.config.choices import Cluster, Strategy
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch import inputs
from clusterrun.launch.facts import Interpreter
from clusterrun.launch.inputs import interpreter_problem, is_certain
from clusterrun.launch.make import make_plan
from tests.launch.samples import here, local_facts, on_slurm, slurm_facts


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("--data /nonexistent/x.parquet", "--data: /nonexistent/x.parquet"),
        ("--config configs/a.yaml --epochs 3", "--config: configs/a.yaml"),
        ("--config=configs/a.yaml", "--config: configs/a.yaml"),
        ("--train-file train.jsonl --validation_file v.csv",
         "--train-file: train.jsonl, --validation_file: v.csv"),
        ("--model_name_or_path ./llama --tokenizer /models/t",
         "--model_name_or_path: ./llama, --tokenizer: /models/t"),
        ("--data a.parquet b.parquet --lr 1", "--data: a.parquet, --data: b.parquet"),
        ("--image_folder /d/images --data_path /d/c.json --pretrain_mm_mlp_adapter /d/p.bin",
         "--image_folder: /d/images, --data_path: /d/c.json, --pretrain_mm_mlp_adapter: /d/p.bin"),
        ("--resume_from_checkpoint /ckpt/step-5", "--resume_from_checkpoint: /ckpt/step-5"),
        ("data.path=/d/x.parquet trainer.epochs=3", "data.path: /d/x.parquet"),
        ("--deepspeed ds.json", "--deepspeed: ds.json"),
        ("--anything /opt/x", "--anything: /opt/x"),
        # What a script makes, or what is no path of this machine.
        ("--output /new/out --output_dir=./out --save-path /new/model.pt --logging_dir logs", ""),
        ("--checkpoint-dir /new/ckpt --checkpoint /new/a.pt --tensorboard /tb --log-file a", ""),
        ("--cache_dir /cache --offload_folder /nvme/x --model-dir /opt/ml/model", ""),
        ("--experiment-dir /new/e --exp_dir /new/e --snapshot-dir /new/s", ""),
        ("--save-adapter adapter.pt --run-name run.v1.txt", ""),
        ("--load /new/ckpt --save /new/ckpt", ""),
        ("--model_name_or_path meta-llama/Llama-3.1-8B --dataset HuggingFaceH4/ultrachat_200k", ""),
        ("--dataset wikitext --data data --preset cpu --strategy zero2-offload", ""),
        ("--data s3://bucket/x.parquet --data-path 'data/*.parquet' --train-file '{a,b}.json'", ""),
        ("--config-name train.yaml --lr 1e-3 --betas 0.9 0.95 --bf16 True --text a/b", ""),
        ("train 10 --max-steps 10 --save-every 5 -v --prompt 'what is 1/2?'", ""),
        ("--master /new --output /new", ""),
    ],
)  # fmt: skip
def test_arguments_that_look_like_inputs_are_looked_for(arguments: str, found: str) -> None:
    named = inputs.inputs(shlex.split(arguments))
    assert ", ".join(f"{flag}: {path}" for flag, path in named) == found


def test_a_note_names_what_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").touch()
    args = ("--config", "there.yaml", "--data", "/nonexistent/x.parquet", "--valid", "gone.csv")
    spec = JobSpec(script="train.py", args=args, cluster=Cluster.LOCAL)
    plan = make_plan(spec, gather_facts(spec, cwd=tmp_path, environ={}))
    assert [note for note in plan.notes if "exist" in note] == [
        "--data: /nonexistent/x.parquet does not exist here",
        "--valid: gone.csv does not exist here",
    ]


def test_what_only_the_nodes_have_is_not_looked_for() -> None:
    args, note = ("--data", "{}"), "--data: {} does not exist here"
    for path, is_noted in (("/tmp/staged.parquet", False), ("/workspace/x.parquet", True)):
        missing = {"missing": frozenset((path,))}
        asked = tuple(each.format(path) for each in args)
        assert (note.format(path) in on_slurm(slurm_facts(**missing), args=asked).notes) is is_noted
        assert note.format(path) in here(local_facts(**missing), args=asked).notes
    image = ("--container-image=train:1.4",)
    in_image = on_slurm(slurm_facts(**missing), args=asked, srun_args=image)
    assert note.format(path) not in in_image.notes


def test_a_virtual_environment_that_is_none_is_refused() -> None:
    facts = slurm_facts(missing=frozenset(("env/bin/activate",)))
    with pytest.raises(
        UsageError, match="env is not a virtual environment: it has no bin/activate"
    ):
        on_slurm(facts, setup=("venv: env",))
    assert on_slurm(setup=("venv: env",)).setup == ("venv: /home/ada/project/env",)


def test_the_nodes_run_the_python_of_the_environment(tmp_path: Path) -> None:
    local: dict[str, Any] = {"script": "train.py", "cluster": Cluster.LOCAL}
    for setup, python in {
        ("venv: env",): f"{tmp_path}/env/bin/python",
        ("conda: llm", "export A=1"): "python",
        ("venv: /v", "conda: llm"): "python",
        ("modules: cuda",): "",
        ("conda activate llm",): "",
    }.items():
        spec = JobSpec(**local, setup=setup)
        facts = gather_facts(spec, cwd=tmp_path, environ={})
        assert facts.python == (python or sys.executable)
        plan = make_plan(spec, dataclasses.replace(facts, missing=frozenset()))
        assert any("setup activates" in note for note in plan.notes) == bool(python)
        own = JobSpec(**local, setup=setup, python="python3.9")
        assert gather_facts(own, cwd=tmp_path, environ={}).python == "python3.9"


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


def test_what_is_missing_or_too_old_is_named() -> None:
    wrong: list[tuple[dict[str, Any], Strategy, str, str]] = [
        ({"packages": {**ALL, "torch": ""}}, Strategy.DDP, "/p has no torch", INSTALL),
        ({"packages": {"torch": "2.13.0"}}, Strategy.DDP, "/p has no clusterrun or acc", INSTALL),
        ({"packages": {}}, Strategy.ZERO2, "/p has no clusterrun, torch, accelerate or", INSTALL),
        (
            {"packages": {**ALL, "deepspeed": ""}},
            *(Strategy.ZERO2, "/p has no deepspeed, which strategy zero2 needs", INSTALL),
        ),
        (
            {"packages": {**ALL, "torch": "2.1.0"}},
            *(Strategy.DDP, "/p has torch 2.1.0; clusterrun needs 2.4 or newer", UPGRADE),
        ),
        ({"version": (3, 6)}, Strategy.DDP, "/p is Python 3.6; clusterrun needs 3.10", UPGRADE),
    ]
    for known, strategy, message, hint in wrong:
        found = problem({}, strategy, **known)
        assert (found[0][: len(message)], found[1]) == (message, hint)
    message, hint = problem({}, path="", python="/gone/python")
    assert message == "there is no interpreter '/gone/python' on this machine"
    assert "--python" in hint


def test_nothing_is_held_against_what_is_well_or_unknown() -> None:
    well: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({}, {"packages": {**ALL, "deepspeed": ""}}),
        ({}, {"packages": {**ALL, "torch": "?"}}),
        ({}, {"packages": {}, "is_known": False}),
        ({}, {"packages": {**ALL, "torch": "2.1.0"}, "is_known": False}),
        ({"srun_args": ("--container-image=x",)}, {"packages": {}}),
        ({"setup": ("conda: llm",)}, {"path": "", "python": "python"}),
    ]
    assert [each for each in well if problem(each[0], **each[1]) is not None] == []


def test_bash_modules_and_other_machines_may_have_more() -> None:
    cases: list[tuple[dict[str, Any], str, bool]] = [
        ({}, "/p", True),
        ({}, "", False),
        ({"setup": ("venv: /v",)}, "/p", True),
        ({"setup": ("modules: torch", "venv: /v")}, "/p", False),
        ({"setup": ("export A=1",)}, "/p", False),
        ({"env": {"PYTHONPATH": "/x"}}, "/p", False),
    ]
    for asked, path, certain in cases:
        facts = slurm_facts(interpreter=Interpreter(path=path))
        assert is_certain(JobSpec(script="train.py", **asked), facts) is certain
