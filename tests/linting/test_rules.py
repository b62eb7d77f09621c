"""Each rule finds its pitfall where it is, and is silent where it is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterrun import linting
from clusterrun.cli.doctor import pages
from clusterrun.linting import rule as registry
from clusterrun.linting.rule import Launch, lint, rules
from tests.checkout import EXAMPLES, listed

LAUNCHES = {
    "ddp": Launch(nodes=2, ranks_per_node=4),
    "zero3": Launch(nodes=2, ranks_per_node=4, strategy="zero3"),
    "fsdp": Launch(nodes=2, ranks_per_node=8, strategy="fsdp", max_restarts=3),
    "cpu": Launch(nodes=4, ranks_per_node=2, has_gpus=False),
}
TABLE: dict[str, dict[str, list[dict[str, Any]]]] = yaml.safe_load(
    Path(__file__).with_name("rules.yaml").read_text()
)
FOUND = [(rule, case) for rule, both in TABLE.items() for case in both["finds"]]
SILENT = [(rule, case) for rule, both in TABLE.items() for case in both["silent"]]
OWN = sorted(
    path
    for path in listed(EXAMPLES)
    if path.suffix == ".py"
    if b"torch" in path.read_bytes() or b"accelerate" in path.read_bytes()
)


def _launch(case: dict[str, Any]) -> Launch:
    fields = dict(case.get("launch", {}))
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Launch(**{**fields, **lists})


def test_a_file_adds_a_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeps.py").write_text(
        "from clusterrun.linting.rule import rule\n\n"
        '@rule("sleeps", "all ranks wait", "remove it")\n'
        "def _sleeps(script, launch):\n"
        '    yield from ((call, "it sleeps") for call in script.calls("time.sleep"))\n'
    )
    monkeypatch.setattr(registry, "_RULES", dict(rules()))
    monkeypatch.setattr(linting, "__path__", [*linting.__path__, str(tmp_path)])
    (found,) = lint(b"import time\ntime.sleep(1)\n", Launch())
    assert (found.id, found.line, found.text, found.fix) == (
        *("sleeps", 2, "it sleeps: all ranks wait", "remove it"),
    )
    assert pages()["sleeps"] == ("all ranks wait", [("fix", "remove it")])


def test_each_pitfall_is_found_at_its_lines_and_nowhere_else() -> None:
    assert set(TABLE) == set(rules())
    wrong = []
    for rule, case in FOUND:
        lines = case["script"].splitlines()
        expected = [n for n, line in enumerate(lines, 1) if line.endswith("# here")] or [0]
        found = [x.line for x in lint(case["script"].encode(), _launch(case)) if x.id == rule]
        wrong += [(rule, case, found)] * (found != expected)
    for rule, case in SILENT:
        if rule in {each.id for each in lint(case["script"].encode(), _launch(case))}:
            wrong.append((rule, case, []))
    assert wrong == []


def test_the_guides_have_no_pitfall() -> None:
    launches = LAUNCHES.values()
    assert OWN
    assert [p for p in OWN if any(lint(p.read_bytes(), each) for each in launches)] == []


def test_the_file_that_the_trainer_names_is_looked_for() -> None:
    script = b"""from transformers import TrainingArguments
TrainingArguments(deepspeed="conf/ds.json")
"""
    found = lint(script, Launch(is_missing=lambda path: path == "conf/ds.json"))
    assert [each.id for each in found] == ["missing-file"]
    assert lint(script, Launch()) == ()


@pytest.mark.parametrize("source", [b"def (", b"\0", b"(" * 5000, b"\xff\xfe"])
def test_what_is_not_python_has_no_finding(source: bytes) -> None:
    assert lint(source, Launch()) == ()


# Scripts that packages ship: nothing is found in them, since nothing in them is wrong


LEAST = 10
_SCRIPTS = "script sync ops merge_weights ddp_comm_hook distributed_data_loop"
_WITH_MODELS = (
    "checkpointing metrics performance pippy peak_memory_usage zero3_integration "
    "ds_multiple_model ds_alst_ulysses_sp"
)
_ACCELERATE = "accelerate/test_utils/scripts"
SCRIPTS = (
    *(f"{_ACCELERATE}/test_{name}.py" for name in _SCRIPTS.split()),
    *(f"{_ACCELERATE}/external_deps/test_{name}.py" for name in _WITH_MODELS.split()),
)
# `make test-all` installs these.
MORE = (
    *(f"trl/scripts/{name}.py" for name in ("sft", "dpo", "kto", "grpo", "reward", "rloo")),
    *(f"lightning/pytorch/demos/{name}.py" for name in ("transformer", "lstm", "boring_classes")),
    "torchtitan/train.py",
)
# Added to each script: a linter that reads nothing would also find nothing.
PITFALL = b'\nimport os\nos.environ["MASTER_PORT"] = "29500"\n'


def _found(scripts: tuple[str, ...]) -> Iterator[Path]:
    for name in scripts:
        package, _, rest = name.partition("/")
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            if (path := Path(place, rest)).is_file():
                yield path


def _in(path: Path, launch: str) -> list[tuple[str, str]]:
    found = lint(path.read_bytes() + PITFALL, LAUNCHES[launch])
    return [(each.id, each.text.partition(":")[0]) for each in found]


ONLY_OURS = [("fixed-port", "MASTER_PORT is set to 29500")]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_nothing_is_found_in_scripts_of_accelerate(launch: str) -> None:
    found = {path: _in(path, launch) for path in _found(SCRIPTS)}
    assert len(found) >= LEAST
    assert {path: each for path, each in found.items() if each != ONLY_OURS} == {}


@pytest.mark.long
@pytest.mark.parametrize("launch", LAUNCHES)
def test_nothing_is_found_in_scripts_of_other_trainers(launch: str) -> None:
    paths = list(_found(MORE))
    if len(paths) < len(MORE) // 2:
        pytest.skip("trl and lightning are not installed")
    assert {path.name: _in(path, launch) for path in paths} == {p.name: ONLY_OURS for p in paths}
