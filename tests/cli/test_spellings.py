"""What users of other tools type by mistake gets the hint that helps, and nothing is started."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from clusterrun.cli.main import VERBS, group
from clusterrun.cli.shared import spellings
from clusterrun.config.fields import Kind
from clusterrun.config.spec import BY_NAME
from tests.cli.conftest import CommandLine
from tests.config.test_bad_values import BAD

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
    "line", ["train -nodes 3", "-N 2 train -time 3", "--nnodes 2 --gpus_per_node 4 train -time 3"]
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


def test_a_spelling_with_one_meaning_is_accepted(here: CommandLine) -> None:
    for options in ACCEPTED:
        words = ("--cluster", "slurm", *options.split(), "--json", "train.py")
        said = here("render", *words, "--", "--gpus_per_node")
        assert said.code == 0, said.err
        assert '"--gpus_per_node"' in said.out.replace('\\"', '"')  # the script's own stays


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


# A hint that is followed leads on: the same error does not come back.

FILLED = {"FILE": "own.yaml", "COUNT": "2", "ADDRESS": "me@here"}
TYPED = [(BY_NAME[name], text) for name, text, *_ in BAD if BY_NAME[name].kind is not Kind.FLAG]
COMMANDS = [shlex.split(line) for line, _ in WRONG] + [
    ["submit", f"{field.flags[0]}={text}", "train.py"]
    for field, text in TYPED
    if field.flags and field.flags[0].startswith("--")
]


def without(words: list[str], at: int) -> list[str]:
    """Leave out an option and its value."""
    value = words[at + 1 : at + 2] if "=" not in words[at] and words[at].startswith("-") else []
    has_value = bool(value) and not value[0].startswith("-") and value[0] != "train.py"
    return [*words[:at], *words[at + 1 + has_value :]]


def followed(words: list[str], error: str, hint: str) -> list[str] | None:
    """Return the command line that a hint proposes; None if only a person can tell."""
    if line := re.search(rf"clusterrun ((?:{'|'.join(VERBS)})\b[^$]*?)(?=;|\)|'|\Z)", hint):
        return shlex.split(line[1])
    token = "".join((re.findall(r"'([^']+)'|(?<= )(--[\w-]+)", error) or [("", "")])[0])
    at = next((n for n, word in enumerate(words) if token and token in word), None)
    first = re.split(r", or |; |:? \(|, e\.g\.(?! -)", hint)[0]
    options = re.findall(r"(?<!\w)(--?[a-zA-Z][\w-]*)(?:[ =]([\w:.\[\]/@,-]*[\w\]]))?", first)
    options = [pair for pair in options if pair[0] != token]
    if options and not hint.startswith(("leave", "use '", "list", "run", "read")):
        rest = words if at is None else without(words, at)
        for name in (name for name, _ in options if name in rest):
            rest = without(rest, rest.index(name))
        typed = [word for pair in options for word in pair if word not in ("", "or", "for", "is")]
        return [rest[0], *(FILLED.get(word, word) for word in typed), *rest[1:]]
    if at is None or hint.startswith("leave it out"):
        return None if at is None else without(words, at)
    used = re.match(r"(?:use|did you mean) '([^']+)'|write ([^ ]+?)(?:[;, ]|\Z)", hint)
    example = re.search(r"(?:e\.g\. |as Slurm does: )(\S+)", hint)
    new = example[1] if example else "".join(used.groups("")) if used else token
    return [*words[:at], words[at].replace(token, new), *words[at + 1 :]]


def test_a_hint_that_is_followed_leads_on(here: CommandLine) -> None:
    (here.path / "own.yaml").write_text("distributed_type: MULTI_GPU\n")
    left = []
    for words in COMMANDS:
        error, *rest = here(*words).err.splitlines()[-2:]
        new = followed(words, error, "".join(rest).removeprefix("  hint: "))
        if new is None or new == words:
            left.append((words, rest))
            continue
        verb = "render" if new[0] == "submit" else new[0]  # it must start nothing
        assert error not in here(verb, *new[1:]).err, (words, rest, new)
    assert len(left) < len(COMMANDS) / 5, left
