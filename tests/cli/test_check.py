"""What `check` prints, and that submit and render print the same as notes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterrun.diagnosis.table import built_in
from clusterrun.health.node import pages
from clusterrun.linting.rule import rules
from clusterrun.verbs import doctor
from tests.checkout import ROOT
from tests.cli.conftest import CommandLine

PORT = 'import os\nos.environ["MASTER_PORT"] = "29500"\n'
MANY = ("--cluster", "slurm", "-N2", "--gpus-per-node", "4")


@pytest.fixture
def fixed(here: CommandLine) -> CommandLine:
    """A command line beside a script with a fixed port."""
    (here.path / "train.py").write_text(PORT)
    return here


def test_a_pitfall_has_its_line_reason_and_fix(fixed: CommandLine) -> None:
    said = fixed("check", *MANY, "train.py")
    assert said.code == 3
    rule = rules()["fixed-port"]
    assert said.out.splitlines() == [
        f"note  fixed-port          train.py:2: MASTER_PORT is set to 29500: {rule.reason}",
        f"      hint: {rule.fix}",
    ]
    assert "1 finding" in said.err


def test_nothing_of_the_script_is_executed(here: CommandLine) -> None:
    (here.path / "train.py").write_text('open("ran", "w")\nprint("ran")\n')
    said = here("check", *MANY, "train.py")
    assert (said.code, said.out) == (0, "")
    assert here.files() == ["train.py"]


def test_a_script_without_a_size_is_checked_for_many_ranks(here: CommandLine) -> None:
    (here.path / "train.py").write_text('import os\nos.environ["MASTER_ADDR"] = "localhost"\n')
    said = here("check", "train.py")
    assert "fixed-address" in said.out
    assert "1 finding, assuming two nodes with two ranks each" in said.err
    assert "process per node" not in said.err  # a note on another world
    assert here("check", "-N", "1", "train.py").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("render", *MANY),
        ("submit", "--dry-run", "--cluster", "local", "-N2", "--nproc-per-node=2", "--device=cpu"),
    ],
)
def test_submit_and_render_print_it_as_a_note(fixed: CommandLine, words: tuple[str, ...]) -> None:
    said = fixed(*words, "train.py")
    assert said.code == 0
    assert "note: train.py:2: MASTER_PORT is set to 29500: two jobs" in said.err
    assert ("slurm" in said.out.lower()) == ("slurm" in words)


def test_nothing_is_claimed_of_a_size_that_nobody_gave(here: CommandLine) -> None:
    (here.path / "train.py").write_text(
        "import torch, lightning\nlightning.Trainer(devices=9)\n"
        'torch.distributed.init_process_group("nccl", world_size=9, rank=0)\n'
    )
    assert here("check", "train.py").code == 0
    found = _findings(here("check", "--json", *MANY, "train.py", "--epochs", "3"))
    assert found == {"lightning-size", "fixed-world-size"}


def _findings(said: Any) -> set[str]:
    return {each["id"] for each in json.loads(said.out)["findings"]}


def test_settings_and_files_of_the_job_are_read(here: CommandLine) -> None:
    (here.path / "own.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}\n"
    )
    own = ("--accelerate-config", "own.yaml", "--setup", "torchrun train.py")
    words = ("check", "--json", *MANY, *own, "train.py", "--save-dir", "/tmp/out")
    of_settings = {"starts-a-launcher", "saves-on-one-machine"}
    assert _findings(here(*words)) == of_settings | {"missing-file"}
    (here.path / "gone.json").write_text("{}")
    assert _findings(here(*words)) == of_settings
    said = here("check", *words[2:])  # a setting has no line
    assert (said.code, "  the job's settings: --save-dir /tmp/out is on" in said.out) == (3, True)


def test_without_a_script_it_names_itself(here: CommandLine) -> None:
    said = here("check", *MANY)
    assert said.code == 2
    assert "name the script in the command" in said.err


# `explain` has a page for each id


def test_each_id_is_listed(here: CommandLine) -> None:
    listed = [line.split()[0] for line in here("explain", "all").out.splitlines()[1:]]
    assert listed == [*built_in(), *pages(), *rules()]
    of_gpus = here("explain", "gpu.").out.splitlines()[1:]
    assert [line.split()[0] for line in of_gpus] == [x for x in pages() if x.startswith("gpu.")]


def test_the_page_of_a_check_is_whole(here: CommandLine) -> None:
    page = pages()["node.shm"]
    said = here("explain", "node.shm").out
    texts = [page.looks_at, page.fails, page.notes, page.why, *page.fix, *doctor.places("node.shm")]
    assert [text for text in texts if text not in " ".join(said.split())] == []
    assert said in (ROOT / "docs" / "doctor.md").read_text()


def test_an_id_of_each_kind_is_explained(here: CommandLine) -> None:
    for name, title in (
        ("cuda_oom", "A GPU ran out of memory."),
        ("node.tmp", "looks at "),
        ("fixed-port", "two jobs"),
    ):
        assert here("explain", name).out.startswith(f"{name}  {title}")
        wrong = here("explain", f"{name}e")
        assert (wrong.code, f"hint: use '{name}'" in wrong.err) == (2, True)
    for verb in ("diagnose", "doctor", "check"):
        said = here(verb, "--explain", "fixed-port")
        assert (said.code, said.out) == (0, here("explain", "fixed-port").out)
    wrong = here("explain", "nosuch")
    assert wrong.code == 2
    assert "hint: list the ids with: clusterrun explain all" in wrong.err
