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
        "slurm.time       1-00:00:00  command line (--time)\n"
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


def test_a_mistake_is_named(project: Path, capsys: Capture) -> None:
    (project / "clusterrun.yaml").write_text("\n" * 8 + "slurm: {gpus_per_nodes: 4}\n")
    for line, said in (
        (
            "show",
            "error: clusterrun.yaml:9:9: unknown key 'gpus_per_nodes' in section [slurm]\n"
            "  hint: use 'gpus_per_node'\n",
        ),
        (
            "show slurm.partiton",
            "error: no setting 'slurm.partiton'\n  hint: use 'slurm.partition'\n",
        ),
        ("show time", "error: no setting 'time'\n  hint: use 'slurm.time'\n"),
        (
            "show nope",
            "error: no setting 'nope'\n  hint: list the settings with: clusterrun config show\n",
        ),
        ("shwo", "error: no such command 'shwo'. Did you mean 'show'?"),
        ("", "Usage: clusterrun config [OPTIONS] [COMMAND] [ARGS]...\n"),
    ):
        assert main(["config", *line.split()]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err[: len(said)]) == ("", said)
        (project / "clusterrun.yaml").write_text("")


@pytest.mark.parametrize(
    ("text", "words", "status", "messages"),
    [
        ("script: train.py\n", "--strict", 0, []),
        ("slurm: {gpu_type: a100}", "--strict", 0, []),
        (
            "script: train.py\nslurm: {gpu_type: a100}\nprofiles: {a: {slurm: {gpus_per_node: 4}}}",
            *("--strict", 0, []),
        ),
        ("broken: 1\n", "job.yaml", 0, []),
        ("", "gone.yaml", 2, ["cannot read gone.yaml"]),
        ("env: {NCCL_TIMEOUT: 60}\n", "", 0, ["warning: neither NCCL nor torch reads NCCL"]),
        ("env: {NCCL_TIMEOUT: 60}\n", "--strict", 2, ["warning: neither NCCL nor torch"]),
        (
            "nmae: x\nslurm: {nodes: 0}\nprofile: gone\n",
            *("", 2, ["error: clusterrun.yaml:1:1:", "error: clusterrun.yaml:2:16:"]),
        ),
        (
            "profiles: {a: {script: x, module: y}, b: {slurm: {clusters: 'p,q'}}}\n",
            *("", 2, [": script and module cannot", ": slurm.clusters lists 2 clusters"]),
        ),
        ("script: gone.py", "", 2, [": the script 'gone.py' does not exist"]),
        ("profiles: {a: {name: x}}\nscript: gone.py", "", 2, [": the script 'gone.py' does not"]),
        ("script: bad.py", "", 2, [": bad.py:2: '(' was never closed (SyntaxError)"]),
        (
            "script: train.py\nslurm: {gpu_type: a100}",
            *("", 2, [": slurm.gpu_type names a GPU type, but no GPUs"]),
        ),
        (
            "module: train\nlaunch: {setup: [{venv: env}]}",
            *("", 2, [": setup: env is not a virtual environment"]),
        ),
    ],
)
def test_validate_finds_what_submit_would_refuse(
    project: Path, capsys: Capture, text: str, words: str, status: int, messages: list[str]
) -> None:
    (project / "train.py").touch()
    (project / "bad.py").write_text("print(1)\nprint(\n")
    (project / "job.yaml").write_text("slurm: {nodes: 2}\n")
    (project / "clusterrun.yaml").write_text(text)
    assert main(["config", "validate", *words.split()]) == status
    captured = capsys.readouterr()
    assert [each for each in messages if each not in captured.err] == []
    wrong = [each for each in messages if not each.startswith("warning")]
    assert captured.err.count("error: ") == len(wrong)


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
