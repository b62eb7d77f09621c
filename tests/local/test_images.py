"""The pictures of the documentation show what the commands print today."""

from __future__ import annotations

import html
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
VARY = {"all", "note:", "rate", "restart"}  # they depend on how busy the machine is

# What the commands print is held by the tests of each command; this one by the pictures.
pytestmark = [pytest.mark.torch, pytest.mark.agents, pytest.mark.long, pytest.mark.timeout(300)]


def test_the_pictures_have_the_labels_of_todays_output(tmp_path: Path) -> None:
    shown = _capture().screens(tmp_path)
    assert shown.keys() == {path.stem for path in IMAGES.glob("*.svg")}
    for name, lines in shown.items():
        text = (IMAGES / f"{name}.svg").read_text()
        rows = re.findall(r"<text[^>]*>(.*?)</text>", text)
        drawn = [html.unescape(re.sub(r"<[^>]*>", "", row)) for row in rows]
        today = _labels(re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines)
        assert _labels(drawn) <= today
        assert name == "top" or _labels(drawn) == today  # it may have an alert


def _labels(lines: Iterable[str]) -> set[str]:
    """Return the words with which rows begin."""
    rows = (line for line in lines if line.strip() and not line.startswith("   "))
    words = {line.split()[0] for line in rows}
    return {word for word in words if re.fullmatch(r"[A-Za-z:]+", word)} - VARY


def _capture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capture", IMAGES / "capture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
