from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from clusterrun.cli import config
from clusterrun.cli.config import STARTER, Known, filled, find_scripts
from clusterrun.config.document import ConfigFile, Document, parse_document
from clusterrun.config.settings import Anchor
from clusterrun.config.spec import BY_KEY
from tests.cli.conftest import CommandLine

COMMENTED = re.compile(r"^( *)#(?=\S)", re.MULTILINE)


def parsed(text: str) -> Document:
    return parse_document(ConfigFile(shown="f", text=text, anchor=Anchor(), strict=True))


def keys_of(text: str) -> set[str]:
    document = parsed(text)
    assert (document.errors, document.warnings) == ([], [])
    return {setting.key for setting in document.settings} | set(document.profiles)


def values_of(path: Path) -> dict[str, object]:
    document = parsed(path.read_text())
    assert document.errors == []
    return {setting.key: setting.value for setting in document.settings}


def test_every_line_of_the_starter_is_valid_when_uncommented() -> None:
    assert keys_of(STARTER) == set()
    lines = [match.start() for match in COMMENTED.finditer(STARTER)]
    assert len(lines) > 20
    for start in lines:
        text = STARTER[:start] + COMMENTED.sub(r"\1", STARTER[start:], count=1)
        assert len(keys_of(text)) == 1, STARTER[start:].splitlines()[0]
    found = keys_of(COMMENTED.sub(r"\1", STARTER))
    assert {"script", "slurm.time", "env.TOKENIZERS_PARALLELISM", "pass_env", "a100"} <= found
    assert filled({}) == STARTER
    for key in found & BY_KEY.keys():
        line = f"{key.rpartition('.')[2]}: X"
        assert filled({key: Known("X")}).count(line) == 1, key


# The file


def written(here: CommandLine, *options: str) -> dict[str, object]:
    """Write a file that validates and renders, and return its values."""
    here("init", *options)
    assert here("config", "validate", "--strict").code == 0
    said = here("render")
    assert said.out.startswith("#!"), said.err
    return values_of(here.path / "clusterrun.yaml")


def test_on_a_laptop_the_file_leaves_ranks_and_gpus_to_submit(here: CommandLine) -> None:
    assert written(here) == {"script": "train.py", "cluster": "local"}


PARTITIONS = """\
cpu*|90|(null)|128|512000|infinite
debug|2|gpu:a100:4(S:0-1)|64|512000|00:30:00
gpu|30|gpu:a100:4(S:0-1)|64+|512000+|2-00:00:00
gpu|6|gpu:v100:2|40|384000|2-00:00:00
big|8|gpu:h100:8,craynetwork:4|96|2048000|12:00:00"""


def site(here: CommandLine, partitions: str, accounts: str = "") -> None:
    here.slurm()
    lines = []
    for row in partitions.splitlines():
        name, nodes, gres, cpus, memory, limit = row.split("|")
        lines.append(f"{name}|up|{limit}|1-infinite|no|{nodes}|idle|{gres}|{cpus}|{memory}|||none")
    here.program("sinfo", "\n".join(("cat <<'END'", *lines, "END")))
    if accounts:
        here.program("sacctmgr", f"cat <<'END'\n{accounts}\nEND")


def test_on_a_cluster_partition_gpus_time_and_account_are_slurms(here: CommandLine) -> None:
    site(here, PARTITIONS, "nlp|\nnlp|")
    assert written(here) == {
        "script": "train.py",
        "cluster": "slurm",
        "slurm.partition": "gpu",
        "slurm.time": 1440,
        "slurm.nodes": 1,
        "slurm.account": "nlp",
        "slurm.gpus_per_node": 4,
        "slurm.gpu_type": "a100",
        "slurm.cpus_per_task": 64,
    }
    text = (here.path / "clusterrun.yaml").read_text()
    assert "# also: cpu, debug, big\n" in text
    assert "# requests gpu:a100:4\n" in text
    assert len([word for word in here.asked("sinfo") if word.startswith("--format")]) == 1
    assert here.asked("sacctmgr").count("show") == 1
    lines = here("init", "--force").err.splitlines()
    assert {"  cpus_per_task 64", "  script        train.py"} <= set(lines)


def test_the_default_partition_and_a_short_limit_are_kept(here: CommandLine) -> None:
    site(here, "a|9|gpu:4|8|1|infinite\nb*|2|gpu:2|8|1|02:00:00")
    found = written(here)
    assert (found["slurm.partition"], found["slurm.time"]) == ("b", 120)
    assert found["slurm.gpus_per_node"] == 2
    assert not {"slurm.account", "slurm.gpu_type"} & found.keys()


def test_only_partitions_of_the_users_accounts_are_chosen(here: CommandLine) -> None:
    site(here, PARTITIONS, "vision|big\nsound|big\nold|debug")
    found = written(here)
    assert (found["slurm.partition"], found["slurm.time"]) == ("big", 720)
    assert "slurm.account" not in found  # Slurm has a default, a guess could charge another
    assert "# one of: vision, sound;" in (here.path / "clusterrun.yaml").read_text()


def test_a_site_without_gpus_or_answers_leaves_the_lines_to_the_user(here: CommandLine) -> None:
    here.slurm()
    here.program("sinfo", "exit 1")
    assert "warning: sinfo did not answer" in here("init", "--force").err
    assert values_of(here.path / "clusterrun.yaml").keys() == {"script", "cluster", "slurm.nodes"}

    site(here, "cpu*|90|(null)|128|512000|infinite")
    found = written(here, "--force")
    assert (found["slurm.partition"], found["launch.device"]) == ("cpu", "cpu")


# The script


def test_the_likeliest_script_comes_first_and_the_others_are_named(here: CommandLine) -> None:
    for name in ("model.py", "finetune.py", "convert.py", "test_train.py", "setup.py", "train.sh"):
        (here.path / name).write_text("")
    assert find_scripts(here.path) == ["train.py", "finetune.py"]
    written(here)
    text = (here.path / "clusterrun.yaml").read_text()
    assert "\nscript: train.py " in text
    assert "# also found: finetune.py\n" in text


def test_a_script_of_another_name_is_found_if_it_is_alone(here: CommandLine) -> None:
    (here.path / "train.py").rename(here.path / "gpt.py")
    assert find_scripts(here.path) == ["gpt.py"]
    (here.path / "model.py").write_text("")
    assert find_scripts(here.path) == []


def test_without_a_script_the_line_asks_for_one(here: CommandLine) -> None:
    (here.path / "train.py").unlink()
    assert here("init").err.endswith("clusterrun submit SCRIPT\n")
    text = (here.path / "clusterrun.yaml").read_text()
    assert "\n#script: train.py " in text
    assert here("config", "validate", "--strict").code == 0


def test_a_large_directory_and_strange_names_do_no_harm(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a\nb: train.py", "train\x1b[31m.py"):
        (here.path / name).write_text("")
    assert find_scripts(here.path) == ["train.py"]
    assert find_scripts(here.path / "train.py") == []
    monkeypatch.setattr(config, "LISTED", 5)
    for number in range(20):
        (here.path / f"train_{number}.py").write_text("")
    assert len(find_scripts(here.path)) <= 5


def test_any_script_name_is_written_as_that_name(here: CommandLine) -> None:
    for script in ("my train.py", "#x", "a: b", "'"):
        here("init", "--force", "--script", script)
        assert values_of(here.path / "clusterrun.yaml")["script"] == script


# The command


def test_init_does_not_overwrite_unless_forced(here: CommandLine) -> None:
    path = here.path / "clusterrun.yaml"
    path.write_text("mine")
    said = here("init")
    assert (said.code, path.read_text()) == (2, "mine")
    assert "pass --force to replace it" in said.err
    assert here("init", "--force").code == 0
    assert path.read_text() != "mine"
    said = here("init", "train.py/below")
    assert (said.code, said.err.count("\n")) == (1, 2)
    assert said.err.startswith("error: cannot write ")


def test_init_makes_the_directory_and_names_the_script(here: CommandLine) -> None:
    before = os.umask(0o022)
    try:
        said = here("init", "new/project", "--script", "go.py")
    finally:
        os.umask(before)
    assert (said.code, said.out) == (0, "new/project/clusterrun.yaml\n")
    path = here.path / "new/project/clusterrun.yaml"
    assert "\nscript: go.py " in path.read_text()
    assert "warning: script 'go.py' does not exist" in said.err
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
