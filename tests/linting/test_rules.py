"""Each rule finds its pitfall where it is, and is silent where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterrun import linting
from clusterrun.cli.explain import pages
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
    page = next(page for page in pages() if page.id == "sleeps")
    assert (page.summary, page.rows) == ("all ranks wait", [("fix", "remove it")])


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
