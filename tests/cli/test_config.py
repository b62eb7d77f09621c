"""`config`: what it shows, finds wrong, and prints for programs."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import CommandLine


def test_show_prints_the_table_of_values_and_origins(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.path / "clusterrun.yaml").write_text("slurm:\n  partition: gpu\n")
    monkeypatch.setenv("CLUSTERRUN_SLURM_ACCOUNT", "nlp")
    said = here("config", "show", "--origin", "-t", "1-0")
    assert (said.code, said.err) == (0, "")
    rows = [line.split(maxsplit=2) for line in said.out.splitlines()]
    assert rows[0] == ["KEY", "VALUE", "ORIGIN"]
    for row in (
        ["slurm.partition", "gpu", "./clusterrun.yaml:2"],
        ["slurm.time", "1-00:00:00", "command line (--time)"],
        ["slurm.account", "nlp", "env CLUSTERRUN_SLURM_ACCOUNT"],
        ["cluster", "auto", "built-in"],
    ):
        assert row in rows
    assert "slurm.qos" not in said.out  # it has no value


def test_show_lists_each_name_of_a_mapping(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text("env:\n  B: 'x\ty'\n  A: ''\n")
    rows = [line.split() for line in here("config", "show").out.splitlines()]
    found = [row for row in rows if row[0].startswith("env.")]
    assert found == [["env.A", '""'], ["env.B", "x\\ty"]]


def test_show_in_json_keeps_types_and_nothing_else_is_on_stdout(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text(
        "profile: a\nprofiles: {a: {slurm: {time: 90, nodes: 2}, env: {NCCL_TIMEOUT: 60}}}\n"
    )
    keys = ["slurm.time", "slurm.nodes", "slurm.hold", "launch.setup"]
    said = here("config", "show", "--json")
    assert said.code == 0
    data = json.loads(said.out)
    assert data["schema"] == "clusterrun.config-show/1"
    assert (data["profile"], data["files"]) == ("a", ["clusterrun.yaml", "/dev/null"])
    values = {row["key"]: row for row in data["values"]}
    assert [values[key]["value"] for key in keys] == ["01:30:00", 2, False, []]
    assert values["slurm.time"]["origin"] == "./clusterrun.yaml:2 (profile a)"
    assert "used as launch.timeout" in data["warnings"][0]
    assert said.err.startswith("warning: neither NCCL nor torch reads NCCL_TIMEOUT")


def test_a_mistake_is_named(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text("\n" * 8 + "slurm: {gpus_per_nodes: 4}\n")
    for line, error in (
        (
            "show",
            "error: clusterrun.yaml:9:9: unknown key 'gpus_per_nodes' in section [slurm]\n"
            "  hint: use 'gpus_per_node'\n",
        ),
        ("shwo", "error: no such command 'shwo'. Did you mean 'show'?"),
        ("", "Usage: clusterrun config [OPTIONS] [COMMAND] [ARGS]...\n"),
    ):
        said = here("config", *line.split())
        assert (said.code, said.out, said.err[: len(error)]) == (2, "", error)
        (here.path / "clusterrun.yaml").write_text("")


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
            "profiles: {a: {script: x, module: y}, b: {env: {NCCL_TIMEOUT: never}}}\n",
            *("", 2, [": script and module cannot", ": 'never' is not a time span"]),
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
    here: CommandLine, text: str, words: str, status: int, messages: list[str]
) -> None:
    (here.path / "bad.py").write_text("print(1)\nprint(\n")
    (here.path / "job.yaml").write_text("slurm: {nodes: 2}\n")
    (here.path / "clusterrun.yaml").write_text(text)
    said = here("config", "validate", *words.split())
    assert said.code == status
    assert [each for each in messages if each not in said.err] == []
    wrong = [each for each in messages if not each.startswith("warning")]
    assert said.err.count("error: ") == len(wrong)


def test_validate_in_json(here: CommandLine) -> None:
    file = here.path / "clusterrun.yaml"
    file.write_text("slurm: {nodes: x}\nlogs:\n  spool: 1 zb\n  max_lines: 5\n")
    said = here("config", "validate", "--json")
    assert said.code == 2
    found = json.loads(said.out)
    errors = [(each["message"], each["where"], each["hint"]) for each in found.pop("errors")]
    assert found == {
        "schema": "clusterrun.config-validate/1",
        "valid": False,
        "files": ["clusterrun.yaml", "/dev/null"],
        "warnings": [],
    }
    sizes, unknown = "4096 (bytes), 64KiB, 200M or 1GiB", "unknown key 'max_lines' in section"
    at = "clusterrun.yaml:1:16"
    assert errors == [
        ("slurm.nodes must be a whole number, not 'x'", at, "write a number, e.g. 4"),
        ("'1 zb' is not a size", "clusterrun.yaml:3:10", f"write {sizes}"),
        (f"{unknown} [logs]", "clusterrun.yaml:4:3", "use 'max_lines_per_s'"),
    ]
    assert said.err.startswith(f"error: {at}: slurm.nodes must be a whole number")


def test_each_setting_of_logs_reaches_the_plan(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: str) -> list[int]:
        said = here("render", "--json", "--cluster", "local", *args, "train.py")
        plan = json.loads(json.loads(said.out)["files"]["plan.json"])
        return [plan[f"log_{name}"] for name in ("spool_bytes", "lines_per_s")]

    assert planned() == [1 << 30, 0]
    (here.path / "clusterrun.yaml").write_text("logs: {spool: 2GiB, max_lines_per_s: 500}\n")
    assert planned() == [2 << 30, 500]
    monkeypatch.setenv("CLUSTERRUN_LOGS_SPOOL", "7")
    assert planned("--set", "logs.max_lines_per_s=9") == [7, 9]
