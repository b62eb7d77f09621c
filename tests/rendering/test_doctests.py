"""The examples in the docstrings of planning, estimating and rendering hold."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import clusterrun.estimates
import clusterrun.launch
import clusterrun.rendering

PACKAGES = (clusterrun.estimates, clusterrun.launch, clusterrun.rendering)


def test_the_examples_hold() -> None:
    names = [
        f"{package.__name__}.{found.name}"
        for package in PACKAGES
        for found in pkgutil.iter_modules(package.__path__)
    ]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert [name for name, result in results.items() if result.failed] == []
    assert sum(result.attempted for result in results.values()) >= 40
