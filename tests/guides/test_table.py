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


ROWS = [(f"{guide}: {row['item']}", row) for guide in ITEMS for row in table(guide)]


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


def test_each_item_of_a_guide_has_a_row_of_its_own() -> None:
    assert {path.stem for path in Path(__file__).parent.glob("*.yaml")} == ITEMS.keys()
    assert {guide: len(table(guide)) for guide in ITEMS} == ITEMS
    assert [name for name, n in Counter(name for name, _ in ROWS).items() if n > 1] == []


def test_an_answer_has_its_tests_or_its_reason() -> None:
    wrong = []
    for name, row in ROWS:
        is_whole = row.keys() <= FIELDS and row["says"]
        is_known = row["answer"] in {"covered", "part", "not"}
        has_tests = bool(row.get("tests")) is (row["answer"] != "not")
        has_absent = "absent" in row or row["answer"] != "not"
        is_said = "why" not in row if row["answer"] == "covered" else False
        is_said = is_said or row["why"].endswith(".")
        wrong += [] if is_whole and is_known and has_tests and has_absent and is_said else [name]
    assert wrong == []


def test_what_is_not_there_is_still_not_there() -> None:
    """A page or file that names it means that the row is out of date."""
    wrong = []
    for name, row in ROWS:
        for path, texts in row.get("absent", {}).items():
            wrong += [name for text in texts if text in (ROOT / path).read_text()]
    assert wrong == []


def test_the_tests_of_an_answer_exist_and_make_test_runs_one() -> None:
    wrong = []
    for name, row in ROWS:
        is_run = row["answer"] != "covered"
        for named in row.get("tests", ()):
            path, _, test = named.partition("::")
            is_there = test.startswith("test_") and (ROOT / path).is_file()
            is_there = is_there and test in functions(path)
            wrong += [] if is_there else [(name, named)]
            is_run = is_run or (is_there and not functions(path)[test])
        wrong += [] if is_run else [(name, "make test runs none of its tests")]
    assert wrong == []


def test_no_fewer_items_are_covered_than_before() -> None:
    answers = Counter(row["answer"] for _, row in ROWS)
    assert answers.total() == 143
    assert answers["covered"] >= LEAST_COVERED
