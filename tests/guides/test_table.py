"""Every command, file and figure of the five guides has an answer, and the tests that show it.

One table for each guide, `<example>.yaml`, in the guide's order:

- `covered`: the tests show it; `why` says what differs from the guide, where something does;
- `part`: the tests show a part of it, and `why` says what is missing;
- `not`: `why` says why not.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ITEMS = {
    "finetune_lora": 34,
    "one_gpu_to_many": 21,
    "deepspeed_offload": 28,
    "small_transformer": 25,
    "pretrain_parquet": 35,
}
LEAST_COVERED = 136  # may only grow
FIELDS = {"item", "says", "answer", "tests", "why", "absent"}


def table(guide: str) -> list[dict[str, Any]]:
    text = Path(__file__).with_name(f"{guide}.yaml").read_text()
    rows: list[dict[str, Any]] = yaml.safe_load(text)
    return rows


ROWS = [pytest.param(row, id=f"{guide}: {row['item']}") for guide in ITEMS for row in table(guide)]


@functools.cache
def functions(path: str) -> dict[str, bool]:
    """Return the test functions of a file, and whether `make test` leaves each out."""
    tree = ast.parse((ROOT / path).read_text())
    marks = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    is_long = any(mark.startswith("pytestmark") and "mark.long" in mark for mark in marks)
    return {
        node.name: is_long or "pytest.mark.long" in map(ast.unparse, node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("guide", ITEMS)
def test_each_item_of_a_guide_has_a_row_of_its_own(guide: str) -> None:
    rows = table(guide)
    assert len(rows) == ITEMS[guide]
    assert [item for item, n in Counter(row["item"] for row in rows).items() if n > 1] == []


def test_all_tables_are_looked_at() -> None:
    assert {path.stem for path in Path(__file__).parent.glob("*.yaml")} == ITEMS.keys()


@pytest.mark.parametrize("row", ROWS)
def test_an_answer_has_its_tests_or_its_reason(row: dict[str, Any]) -> None:
    assert row.keys() <= FIELDS
    assert row["says"]
    assert row["answer"] in {"covered", "part", "not"}
    assert bool(row.get("tests")) is (row["answer"] != "not")
    assert "absent" in row or row["answer"] != "not"
    if row["answer"] != "covered" or "why" in row:
        assert row["why"].endswith(".")


@pytest.mark.parametrize("row", [row for row in ROWS if "absent" in row.values[0]])
def test_what_is_not_there_is_still_not_there(row: dict[str, Any]) -> None:
    """A page or file that names it means that the row is out of date."""
    for path, texts in row["absent"].items():
        assert [text for text in texts if text in (ROOT / path).read_text()] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.values[0]["answer"] == "covered"])
def test_what_is_covered_is_tested_by_make_test(row: dict[str, Any]) -> None:
    named = (each.partition("::") for each in row["tests"])
    assert any(not functions(path)[name] for path, _, name in named)


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_an_answer_exist(row: dict[str, Any]) -> None:
    for named in row.get("tests", ()):
        path, _, name = named.partition("::")
        assert name.startswith("test_")
        assert (ROOT / path).is_file(), named
        assert name in functions(path), named


def test_no_fewer_items_are_covered_than_before() -> None:
    answers = Counter(row["answer"] for guide in ITEMS for row in table(guide))
    assert answers.total() == 143
    assert answers["covered"] >= LEAST_COVERED
