"""The options that make a job: what was typed arrives as given, interpreted in one place only."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import clusterrun
from clusterrun.cli.main import group, main
from clusterrun.cli.shared.options import (
    JobCommand,
    JobOptions,
    ScriptCommand,
    SubmitCommand,
    dry_run_option,
    follow_option,
    job_options,
    wait_option,
)
from clusterrun.config.choices import Strategy
from clusterrun.config.fields import Kind
from clusterrun.config.spec import BY_NAME, FIELDS
from clusterrun.errors import UsageError
from tests.cli.conftest import CommandLine


def parse(*args: str, script: bool = True) -> JobOptions:
    """Give a verb of its own these words and return what it received."""
    received: list[JobOptions] = []

    @click.command(cls=ScriptCommand if script else JobCommand)
    @job_options(script=script, training=True)
    @follow_option
    @wait_option
    @dry_run_option
    def verb(job: JobOptions, **_: Any) -> None:
        received.append(job)

    result: Result = CliRunner().invoke(verb, list(args), standalone_mode=False)
    if result.exception:
        raise result.exception
    return received[0]


def given_values(job: JobOptions) -> dict[str, Any]:
    return {name: (given.value, given.flag) for name, given in job.flags.items()}


SPELLINGS = [
    (field.name, field.kind, spelling)
    for field in FIELDS
    for flag in field.flags
    for spelling in flag.split("/")
]


def test_every_spelling_gives_its_field() -> None:
    for name, kind, spelling in SPELLINGS:
        text = "A=1" if kind is Kind.MAPPING else "1"
        expected: Any = (text,) if kind in (Kind.TEXTS, Kind.MAPPING) else text
        words = [spelling, text]
        if kind is Kind.FLAG:
            expected, words = not spelling.startswith("--no-"), [spelling]
        (given,) = parse(*words, "--follow").flags.items()
        assert (given[0], given[1].value) == (name, expected)
        assert given[1].flag.startswith("--")


SETTINGS = [x for x in FIELDS if not x.flags and x.group != "job"]
FORMER = {
    f"--{name.replace('_', '-')}": x for x in SETTINGS for name in (x.name, x.key.split(".")[-1])
}
FORMER.pop("--env")  # network.env, too
FORMER |= {f"--no-{x.name.replace('_', '-')}": x for x in SETTINGS if x.kind is Kind.FLAG}
FORMER |= {"-d": BY_NAME["dependency"], "-b": BY_NAME["begin"], "-H": BY_NAME["hold"]}


def test_an_option_that_is_only_a_setting_is_answered_with_it(
    here: CommandLine,
) -> None:
    here.slurm()
    (here.path / "train.py").write_text("import argparse\nprint(1)\n")
    verbs = itertools.cycle(("submit", "render", "check", "plan", "doctor"))
    for (option, field), verb in zip(FORMER.items(), verbs, strict=False):
        value = [] if field.kind is Kind.FLAG else [VALUES.get(field.name, "1")]
        said = here(verb, option, *value, "train.py")
        hint = said.err.splitlines()[-1].partition("  hint: pass ")[2]
        key, _, text = shlex.split(hint)[-1].partition("=")
        assert (said.code, key) == (2, field.key), (option, said.err)
        assert text == (value[0] if value else str(not option.startswith("--no-")).lower())
        pasted = here("config", "show", *shlex.split(hint))
        assert pasted.code == 0, (option, pasted.err)


VALUES = {
    **{"starter": "ssh", "gpu_request": "gres", "preflight": "off", "launcher": "direct"},
    **{"stage": "auto", "network": "efa", "dependency": "afterok:1", "port_range": "4000-5000"},
    **{"mem_per_cpu": "4G", "mem_per_gpu": "4G", "stage_dir": "/local", "network_env": "A=1"},
}


OF_SLURM = re.compile(r"slurm|passed_on|sbatch|rendering.bundle|spellings|config.spec")


def test_no_text_names_a_former_option() -> None:
    package = Path(clusterrun.__file__).parent
    names = "|".join(name for name in FORMER if name.startswith("--"))
    former = re.compile(rf"(?<![\w-])(?:{names})(?! host)(?![\w-])")  # a container's --network host
    found = [
        f"{path}: {name}"
        for path in [*package.rglob("*.py"), *package.rglob("*.yaml")]
        if not OF_SLURM.search(str(path.relative_to(package)))
        for name in former.findall(path.read_text())
    ]
    assert found == []


def test_no_two_options_share_a_spelling() -> None:
    spellings = [spelling for _, _, spelling in SPELLINGS] + ["--config", "--profile", "--set"]
    assert len(spellings) == len(set(spellings))
    assert parse() == JobOptions()


def test_values_stay_texts_and_words_behind_script_or_module_are_arguments() -> None:
    module = ("pkg.train", "--module")
    for line, values in (
        ("-N x --strategy zero4", {"nodes": ("x", "--nodes"), "strategy": ("zero4", "--strategy")}),
        (
            "-N 2 train.py --lr 1 -x -- --follow",
            {
                "nodes": ("2", "--nodes"),
                "script": ("train.py", ""),
                "args": (("--lr", "1", "-x", "--", "--follow"), ""),
            },
        ),
        ("-m pkg.train -- --lr 1", {"module": module, "args": (("--lr", "1"), "")}),
        ("-m pkg.train data x", {"module": module, "args": (("data", "x"), "")}),
        ("-- --lr 1", {"args": (("--lr", "1"), "")}),
    ):
        assert given_values(parse(*line.split())) == values


@given(st.lists(st.text()))
def test_any_argument_of_the_script_arrives_as_it_was_typed(args: list[str]) -> None:
    assert given_values(parse("train.py", "--", *args))["args"] == (tuple(args), "")


NO_PARSER = "print(1)"
ARGPARSE = "import argparse\np.add_argument('--lr', help='as --nodes')\ndef f(nodes): 'x --nodes'"
TRAINER = "import sys\nfrom transformers import HfArgumentParser\nif len(sys.argv) == 2: 1"
HYDRA = "import hydra\n@hydra.main()\ndef main(): 1"
REST = "import argparse\np.parse_known_args()"
ELSEWHERE = "from studio.cli import main\nmain()"
OWN = "import sys\nread(sys.argv[1:])"
FOREIGN = (
    *("import mylab\nmylab.train.run()", "from mylab.args import parse_args\nparse_args()"),
    *("import mylab, tyro\ntyro.cli(mylab.Config)", "import fire\ndef main(**kwargs): 1"),
    *("import argparse, mylab\nadd(parents=[mylab.base])", "import sys, x\nsys.path.append('..')"),
    *("import getopt, sys\ngetopt.getopt(sys.argv[1:], 'N:', ['nodes='])", "import runpy"),
    *("p.add_argument(f'--{name}')", "add = p.add_argument", "p.add_argument('x', nargs='...')"),
)


BEFORE = (["train.py"], ["-m", "train", "x"])
AFTER_SCRIPT = {
    "refused": [
        (NO_PARSER, "--wait", "--nodes=2", "--help", "-N4", "-p x"),
        (ARGPARSE, "--gpus_per_node 8", "--dry-run", "-t 5", "-N 2"),
        *((source, "--dry-run") for source in (TRAINER, HYDRA, "import dgl")),
    ],
    "noted": [
        (ARGPARSE, "--help", "--device cpu", "--strategy=x"),
        (TRAINER, "--wait", "-h", "-p x"),
        *((source, "--dry-run") for source in (REST, ELSEWHERE, OWN, *FOREIGN)),
    ],
    "passed": [
        (NO_PARSER, "-- --nodes 2", "x -- -N 2", "--no 2", "--lr -3"),
        (TRAINER, "--output_dir out --fp16 --device x --config y --num_train_epochs 3"),
        ("p.add_argument('-N', '--node_count')", "-N 2 --node-count 3"),
        ("class A:\n    dry_run: bool", "--dry-run"),
        ("import typer\ndef main(partition): 1", "--partition x"),
        ("import fire\ndef main(nodes): 1", "--nodes x"),
        ("from absl import flags\nflags.DEFINE_integer('nodes', 1)", "--nodes 2"),
        ("p.add_argument('--time-limit')", "--time 2"),  # argparse completes it
        *((source, "--nodes 2") for source in ("import arguments", "from .arguments import x")),
    ],
}


def test_our_options_after_the_script_are_refused_unless_the_script_may_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("arguments.py").write_text("import argparse\np.add_argument('--nodes')")
    table = [
        (row[0], w, answer)
        for answer, rows in AFTER_SCRIPT.items()
        for row in rows
        for w in row[1:]
    ]
    for (source, words, answer), before in itertools.product(table, BEFORE):
        Path("train.py").write_text(source)
        if answer == "refused":
            with pytest.raises(UsageError) as caught:
                parse("-N2", *before, *words.split(), "end")
            right, escape = (hint.partition(" -N2 ")[2].split() for hint in caught.value.hints)
            assert right.index(words.split()[0]) < right.index("end")
            assert "--" in escape[: escape.index(words.split()[0])]
            assert parse("-N2", *escape).notes == ()
        else:
            name = words.partition(" ")[0].partition("=")[0]
            notes = [
                note.partition(" comes after ")[0]
                for note in parse("-N2", *before, *words.split()).notes
            ]
            assert notes == [name] * (answer == "noted"), (source, words)


def test_a_verb_without_a_script_takes_options_behind_its_arguments() -> None:
    job = parse("--config", "a.yaml", "--profile", "p", "--set", "a=1", "--set", "b=2", "-N2")
    assert (job.config_file, job.profile, job.overrides) == ("a.yaml", "p", ("a=1", "b=2"))
    words = ("-N", "2", "--follow", "-t", "5")
    assert given_values(parse(*words, script=False)).keys() == {"nodes", "time_minutes"}


def test_help_groups_the_options_and_names_the_words_of_an_enum() -> None:
    @click.command(cls=SubmitCommand)
    @job_options()
    @click.option("--follow", is_flag=True)
    def verb(job: JobOptions, follow: bool) -> None: ...

    text = CliRunner().invoke(verb, ["--help"]).output
    headings = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert headings == ["Job", "Slurm", "Training", "Environment", "Configuration", "Output"]
    words = ", ".join(strategy.value for strategy in Strategy)
    assert f"{words} [default: ddp]" in " ".join(text.split())
    assert "[SCRIPT] [ARGS]..." in text
    assert "--follow" in text.partition("Output:")[2]


ROW = re.compile(r"^  (-.+?)(?:  |$)", re.MULTILINE)


def rows(verb: str, how: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return what a verb's help says about each option."""
    assert main([verb, how]) == 0
    return {row.partition(" ")[0].rstrip(",") for row in ROW.findall(capsys.readouterr().out)}


def test_submit_has_few_options_and_its_short_help_fewer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short, everything = (rows("submit", how, capsys) for how in ("--help", "--help-all"))
    assert 15 <= len(short) <= 32
    assert {"--help-all", "--json", "--strategy"} <= short < everything
    command = group.get_command(click.Context(group), "submit")
    assert command is not None
    assert len(everything) == len(command.params) - 1  # none is hidden; one is the script


def test_verbs_that_take_options_of_submit_say_so_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for verb in ("render", "check", "resume", "resubmit", "scaling", "plan"):
        told = rows(verb, "--help-all", capsys)
        assert told.isdisjoint({"--strategy", "--set", "-t", "--cluster"})
        assert ("--samples" in told) == (verb == "plan")
        main([verb, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert said.count("see clusterrun submit --help") == 1
