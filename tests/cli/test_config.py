from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterrun.cli.main import main


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "project"
    directory.mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("CLUSTERRUN_SITE_CONFIG", "/dev/null")
    return directory


Capture = pytest.CaptureFixture[str]


def test_show_prints_the_table_of_values_and_origins(
    project: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "clusterrun.yaml").write_text("slurm:\n  partition: gpu\n")
    monkeypatch.setenv("CLUSTERRUN_SLURM_ACCOUNT", "nlp")
    keys = ["slurm.partition", "slurm.time", "slurm.account", "cluster", "slurm.qos"]
    assert main(["config", "show", "--origin", "-t", "1-0", *keys]) == 0
    captured = capsys.readouterr()
    assert captured.out == (
        "KEY              VALUE       ORIGIN\n"
        "slurm.partition  gpu         ./clusterrun.yaml:2\n"
        "slurm.time       1-00:00:00  command line (-t)\n"
        "slurm.account    nlp         env CLUSTERRUN_SLURM_ACCOUNT\n"
        "cluster          auto        built-in\n"
        "slurm.qos        -           built-in\n"
    )
    assert captured.err == ""


def test_show_of_a_section_lists_its_keys_and_each_name_of_a_mapping(
    project: Path, capsys: Capture
) -> None:
    (project / "clusterrun.yaml").write_text("env:\n  B: 'x\ty'\n  A: ''\n")
    assert main(["config", "show", "env", "network"]) == 0
    assert capsys.readouterr().out == (
        "KEY                 VALUE\n"
        'env.A               ""\n'
        "env.B               x\\ty\n"
        "network.preset      auto\n"
        "network.interface   -\n"
        "network.port_range  20000-29999\n"
    )


def test_show_without_keys_leaves_out_what_nobody_said(capsys: Capture) -> None:
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["KEY", "VALUE"]
    assert ["slurm.requeue", "true"] in [line.split() for line in lines]
    assert not any(line.startswith("slurm.qos") for line in lines)


def test_show_in_json_keeps_types_and_nothing_else_is_on_stdout(
    project: Path, capsys: Capture
) -> None:
    (project / "clusterrun.yaml").write_text(
        "profile: a\nprofiles: {a: {slurm: {time: 90, nodes: 2}, env: {NCCL_TIMEOUT: 60}}}\n"
    )
    keys = ["slurm.time", "slurm.nodes", "slurm.hold", "slurm.qos", "launch.setup"]
    assert main(["config", "show", "--json", *keys]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["schema"] == "clusterrun.config-show/1"
    assert (data["profile"], data["files"]) == ("a", ["clusterrun.yaml", "/dev/null"])
    assert [(row["key"], row["value"]) for row in data["values"]] == [
        ("slurm.time", "01:30:00"),
        ("slurm.nodes", 2),
        ("slurm.hold", False),
        ("slurm.qos", None),
        ("launch.setup", []),
    ]
    assert data["values"][0]["origin"] == "./clusterrun.yaml:2 (profile a)"
    assert "used as launch.timeout" in data["warnings"][0]
    assert captured.err.startswith("warning: neither NCCL nor torch reads NCCL_TIMEOUT")


def test_show_of_an_unknown_key_is_answered_with_the_nearest(capsys: Capture) -> None:
    assert main(["config", "show", "slurm.partiton"]) == 2
    assert capsys.readouterr().err == (
        "error: no setting 'slurm.partiton'\n  hint: use 'slurm.partition'\n"
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("time", "use 'slurm.time'"),
        ("nope", "list the settings with: clusterrun config show"),
    ],
)
def test_show_finds_a_key_without_its_section(capsys: Capture, key: str, hint: str) -> None:
    assert main(["config", "show", key]) == 2
    assert capsys.readouterr().err == f"error: no setting '{key}'\n  hint: {hint}\n"


PRINT = "print a setting with: clusterrun config show"
CHANGE = "; change it in clusterrun.yaml"


def test_config_alone_prints_its_help(capsys: Capture) -> None:
    assert main(["config"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: clusterrun config [OPTIONS] [COMMAND] [ARGS]...\n")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("shwo", "use 'config show'"),
        ("slurm.time", "print it with: clusterrun config show slurm.time"),
        ("time", "print it with: clusterrun config show time"),
        ("get", f"{PRINT} KEY{CHANGE}"),
        ("get slurm.time", f"{PRINT} slurm.time{CHANGE}"),
        ("set slurm.time 5", f"{PRINT} slurm.time{CHANGE}"),
    ],
)
def test_config_with_another_word_names_the_command(capsys: Capture, word: str, hint: str) -> None:
    words = word.split()
    assert main(["config", *words]) == 2
    assert capsys.readouterr().err == f"error: no command 'config {words[0]}'\n  hint: {hint}\n"


def test_a_mistake_in_the_file_is_shown_as_promised(project: Path, capsys: Capture) -> None:
    (project / "clusterrun.yaml").write_text("\n" * 8 + "slurm: {gpus_per_nodes: 4}\n")
    assert main(["config", "show"]) == 2
    assert capsys.readouterr().err == (
        "error: clusterrun.yaml:9:9: unknown key 'gpus_per_nodes' in section [slurm]\n"
        "  hint: use 'gpus_per_node'\n"
    )


def test_validate_lists_every_mistake(project: Path, capsys: Capture) -> None:
    (project / "clusterrun.yaml").write_text("nmae: x\nslurm: {nodes: 0}\nprofile: gone\n")
    assert main(["config", "validate"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 2
    assert "clusterrun.yaml:1:1" in captured.err
    assert "clusterrun.yaml:2:16" in captured.err


def test_validate_tries_every_profile(project: Path, capsys: Capture) -> None:
    (project / "clusterrun.yaml").write_text(
        "profiles: {a: {script: x, module: y}, b: {slurm: {clusters: 'p,q'}}}\n"
    )
    assert main(["config", "validate"]) == 2
    errors = capsys.readouterr().err
    assert ": script and module cannot be combined" in errors
    assert ": slurm.clusters lists 2 clusters" in errors


def test_validate_of_a_good_project(project: Path, capsys: Capture) -> None:
    (project / "train.py").touch()
    (project / "clusterrun.yaml").write_text("script: train.py\n")
    assert main(["config", "validate", "--strict"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "clusterrun.yaml: valid\n/dev/null: valid\n"
    assert captured.err == ""


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--strict"], 2)])
def test_warnings_are_mistakes_only_where_strict(
    project: Path, capsys: Capture, options: list[str], status: int
) -> None:
    (project / "clusterrun.yaml").write_text("env: {NCCL_TIMEOUT: 60}\n")
    assert main(["config", "validate", *options]) == status
    assert capsys.readouterr().err.startswith(
        "warning: neither NCCL nor torch reads NCCL_TIMEOUT (./clusterrun.yaml:1)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("script: gone.py", "the script 'gone.py' does not exist"),
        ("profiles: {a: {name: x}}\nscript: gone.py", "the script 'gone.py' does not exist"),
        ("script: bad.py", "bad.py:2: '(' was never closed (SyntaxError)"),
        (
            "script: train.py\nslurm: {gpu_type: a100}",
            "slurm.gpu_type names a GPU type, but no GPUs",
        ),
        ("script: train.py\nlaunch: {deepspeed_config: ds.json}", "the DeepSpeed configuration"),
        (
            "module: train\nlaunch: {setup: [{venv: env}]}",
            "setup: env is not a virtual environment",
        ),
    ],
)
def test_validate_finds_what_submit_would_refuse(
    project: Path, capsys: Capture, text: str, message: str
) -> None:
    (project / "train.py").touch()
    (project / "bad.py").write_text("print(1)\nprint(\n")
    (project / "clusterrun.yaml").write_text(text)
    assert main(["config", "validate"]) == 2
    assert f": {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "slurm: {gpu_type: a100}",
        "script: train.py\nslurm: {gpu_type: a100}\nprofiles: {a: {slurm: {gpus_per_node: 4}}}",
    ],
)
def test_validate_passes_what_options_or_a_profile_complete(
    project: Path, capsys: Capture, text: str
) -> None:
    (project / "train.py").touch()
    (project / "clusterrun.yaml").write_text(text)
    assert main(["config", "validate", "--strict"]) == 0, capsys.readouterr().err


def test_validate_of_a_named_file_does_not_look_at_the_project(
    project: Path, capsys: Capture
) -> None:
    (project / "clusterrun.yaml").write_text("broken: 1\n")
    (project / "job.yaml").write_text("slurm: {nodes: 2}\n")
    assert main(["config", "validate", "job.yaml"]) == 0
    assert main(["config", "validate", "gone.yaml"]) == 2
    assert "cannot read gone.yaml" in capsys.readouterr().err


def test_validate_in_json(project: Path, capsys: Capture) -> None:
    (project / "clusterrun.yaml").write_text("slurm: {nodes: x}\n")
    assert main(["config", "validate", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "schema": "clusterrun.config-validate/1",
        "valid": False,
        "files": ["clusterrun.yaml", "/dev/null"],
        "errors": [
            {
                "message": "slurm.nodes must be a whole number, not 'x'",
                "where": "clusterrun.yaml:1:16",
                "hint": "write a number, e.g. 4",
            }
        ],
        "warnings": [],
    }
    assert captured.err.startswith(
        "error: clusterrun.yaml:1:16: slurm.nodes must be a whole number"
    )
