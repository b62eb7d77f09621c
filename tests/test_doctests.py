"""The examples in all docstrings hold."""

from __future__ import annotations

import doctest
import importlib

from tests.checkout import ROOT


def test_the_examples_hold() -> None:
    files = [path for path in (ROOT / "clusterrun").rglob("*.py") if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert [name for name, result in results.items() if result.failed] == []
    assert sum(result.attempted for result in results.values()) >= 100
