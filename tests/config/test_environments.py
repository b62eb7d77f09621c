"""Environments by name in `setup`, as files, variables and options give them."""

from __future__ import annotations

import doctest

import pytest

from clusterrun.config import environments
from clusterrun.config.environments import Tool, read_step
from clusterrun.errors import ConfigError
from tests.config.conftest import Workplace


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("{modules: [cuda/12.4, nccl], venv: /my venv}",
         ("modules: cuda/12.4 nccl", "venv: /my venv")),
        ("[{modules: cuda/12.4}, {conda: /envs/llm}, 'export X=1']",
         ("modules: cuda/12.4", "conda: /envs/llm", "export X=1")),
        ("[conda: llm]", ("conda: llm",)),
        ("{uv: /src/llm}", ("uv: /src/llm",)),
    ],
)  # fmt: skip
def test_a_mapping_names_environments_in_its_order(
    workplace: Workplace, written: str, lines: tuple[str, ...]
) -> None:
    workplace.write_project(f"launch: {{setup: {written}}}")
    resolved = workplace.load()
    assert resolved.spec.setup == lines
    assert workplace.load(overrides=[f"launch.setup={written}"]).spec.setup == lines
    workplace.write_project(resolved.to_yaml())
    assert workplace.load().spec.setup == lines


def test_a_directory_counts_from_its_file_and_a_name_does_not(workplace: Workplace) -> None:
    workplace.write_project(
        "launch: {setup: [{venv: env}, {uv: ~/llm}, {conda: llm}, {conda: ./c}]}"
    )
    below = workplace.project / "below"
    below.mkdir()
    assert workplace.load(cwd=below).spec.setup == (
        f"venv: {workplace.project}/env",
        f"uv: {workplace.root}/home/llm",
        "conda: llm",
        f"conda: {workplace.project}/c",
    )


@pytest.mark.parametrize(
    ("launch", "hint"),
    [
        *(
            (f"setup: [{written}]", "write conda: NAME, venv: DIR")
            for written in ("{nix: a}", "{conda: [a, b]}", "{conda: -n}", "{modules: []}")
        ),
        ('setup: [{venv: "a\\nb"}]', "write conda: NAME, venv: DIR"),
        ("setup: llm", "write setup: [first, second], or an environment as setup: {conda: NAME}"),
        ("conda: llm", "write it under 'launch:' as setup: {conda: ...}"),
    ],
)
def test_what_names_no_environment_is_refused_at_its_line(
    workplace: Workplace, launch: str, hint: str
) -> None:
    workplace.write_project(f"launch:\n  {launch}")
    with pytest.raises(ConfigError) as caught:
        workplace.load()
    assert str(caught.value.where).startswith("clusterrun.yaml:2:")
    assert caught.value.hints[0].startswith(hint)


def test_bash_stays_bash() -> None:
    for line in ("conda activate llm", "module load cuda", "source venv/bin/activate", "venv=1"):
        assert read_step(line).tool is None
    assert read_step("conda:llm").tool is Tool.CONDA
    assert doctest.testmod(environments).failed == 0
