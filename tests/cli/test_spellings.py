"""What users of other tools type by mistake gets the hint that helps, and nothing is started."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from clusterrun.cli.main import VERBS, group
from clusterrun.cli.shared import spellings
from tests.cli.conftest import CommandLine

LINES = Path(__file__).with_name("wrong_commands.txt").read_text().splitlines()
ROWS = [line for line in LINES if line and not line.startswith("#")]
WRONG = list(zip(ROWS[::2], map(str.strip, ROWS[1::2]), strict=True))  # a command, its hint
ACCEPTED = [
    "--gpus_per_node 4",
    "--nproc_per_node=4",
    "--nnodes 2",
    "--num_machines 2",
    "--num-nodes=2",
    "--mixed_precision bf16",
    "--job_name x",
    "--walltime 1h",
]


def test_a_wrong_command_gets_the_right_hint(here: CommandLine) -> None:
    files, wrong = here.files(), []
    for line, hint in WRONG:
        said = here(*shlex.split(line))
        first, *rest = said.err.splitlines()
        is_right = (said.code, said.out, rest) == (2, "", [f"  hint: {hint}"])
        if not (is_right and first.startswith("error: ")):
            wrong.append((line, said))
    assert wrong == [], "\n".join(map(str, wrong))
    assert here.files() == files


@pytest.mark.parametrize(
    "line",
    ["train -nodes 3", "-N 2 train -time 3", "--nnodes 2 --gpus_per_node 4 train -time 3"],
)
def test_arguments_of_a_script_without_an_ending_are_its_own(here: CommandLine, line: str) -> None:
    (here.path / "train.py").rename(here.path / "train")
    said = here("render", "--cluster", "slurm", "--json", *line.split())
    assert said.code == 0, said.err
    assert line.split()[-2] in said.out


def test_the_value_of_an_option_is_no_option(here: CommandLine) -> None:
    here.slurm()
    said = here("render", "--cluster", "slurm", "--sbatch-arg", "-time", "train.py")
    assert "no option" not in said.err


@pytest.mark.parametrize("options", ACCEPTED)
def test_a_spelling_with_one_meaning_is_accepted(here: CommandLine, options: str) -> None:
    argv = shlex.split(options)
    said = here(
        "render", "--cluster", "slurm", *argv, "--json", "train.py", "--", "--gpus_per_node"
    )
    assert said.code == 0, said.err
    assert '"--gpus_per_node"' in said.out.replace('\\"', '"')  # the script's own stays as it is


def known_options() -> set[str]:
    """Return every option of every command."""
    found = {"--version"}
    for verb in VERBS:
        command = group.get_command(click.Context(group), verb)
        assert command is not None
        found |= {name for each in command.params for name in each.opts + each.secondary_opts}
    return found


@pytest.mark.parametrize(
    "section", ["job", "logs", "status", "list", "cancel", "prune", "commands", "files"]
)
def test_hints_name_options_that_exist(section: str) -> None:
    known = known_options()
    for names, hint in spellings._table()[section].items():
        own = re.sub(
            r"--s\w+-arg=\S+|(sbatch|scancel)('s)? --\w+|wants --gres|jupyter.*|--(seed|lr|nice)\b",
            "",
            hint,
        )
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", own)) - set(names.split())
        assert options <= known, (names, options - known)


@pytest.mark.parametrize("section", ["job", "logs", "status", "list", "cancel", "prune"])
def test_no_option_is_answered_twice_or_by_mistake(section: str) -> None:
    names = [name for each in spellings._table()[section] for name in each.split()]
    assert len(names) == len(set(names))
    if section != "job":
        command = group.get_command(click.Context(group), section)
        assert command is not None
        assert not {name for each in command.params for name in each.opts} & set(names)
