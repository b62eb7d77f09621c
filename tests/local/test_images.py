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
# Phases of a start, log lines, and what a busy machine adds.
VARY = re.compile(r"^restart|^ {11}|^\d\d:\d\d:\d\d |^rate |^using job|^all well$")

pytestmark = [pytest.mark.torch, pytest.mark.agents, pytest.mark.timeout(300)]


def test_the_pictures_have_the_words_of_todays_output(tmp_path: Path) -> None:
    shown = _capture().screens(tmp_path)
    assert shown.keys() == {path.stem for path in IMAGES.glob("*.svg")}
    for name, lines in shown.items():
        text = (IMAGES / f"{name}.svg").read_text()
        rows = re.findall(r"<text[^>]*>(.*?)</text>", text)
        drawn = (html.unescape(re.sub(r"<[^>]*>", "", row)) for row in rows)
        words, today = _words(drawn), _words(re.sub(r"\x1b\[[\d;]*m", "", each) for each in lines)
        assert words <= today
        assert name == "top" or words == today  # it may have an alert


def _words(lines: Iterable[str]) -> set[str]:
    """Return the words of a screen, without numbers, names of runs and what varies."""
    fixed = (line for line in lines if not VARY.search(line))
    return {
        word for line in fixed for word in re.findall(r"(?<![\w/-])[A-Za-z][a-z]+(?![\w-])", line)
    }


def _capture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("capture", IMAGES / "capture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
