"""The examples in the docstrings of planning and rendering hold."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import clusterrun.launch
import clusterrun.rendering

MODULES = [
    f"{package.__name__}.{found.name}"
    for package in (clusterrun.launch, clusterrun.rendering)
    for found in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    assert sum([doctest.testmod(importlib.import_module(name)).attempted for name in MODULES]) >= 8
