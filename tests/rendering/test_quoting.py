"""Any text arrives as the same bytes: through bash, through sbatch's directives, through YAML."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterrun.launch.plan import Directive
from clusterrun.rendering.bundle import (
    comment_text,
    directive_line,
    sbatch_word,
    sh_word,
    yaml_scalar,
)
from tests.rendering.sbatch_reader import directives_of, read_by_sbatch, sbatch
from tests.rendering.strategies import BYTES, LINE, LINES, TEXT

WORDS = ["no", "On", "NULL", "y"]  # that YAML may take for other than text


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=40))
def test_any_text_is_one_word_of_bash_with_the_same_bytes(texts: list[str]) -> None:
    script = "printf '%s\\0' " + " ".join(map(sh_word, texts))
    assert "\n" not in script
    assert "\r" not in script
    done = subprocess.run(["bash", "-c", os.fsencode(script)], capture_output=True, check=True)
    assert done.stdout.split(b"\0")[:-1] == [os.fsencode(text) for text in texts]
    assert done.stderr == b""


def test_a_word_is_plain_where_it_may_be() -> None:
    assert [sh_word(text) for text in ("--nodes=2", "/a/b.py", 3)] == ["--nodes=2", "/a/b.py", "3"]
    with pytest.raises(ValueError, match="NUL"):
        sh_word("a\0b")
    for value in (None, True, ["x"]):
        with pytest.raises(ValueError, match="neither text nor a number"):
            sh_word(value)


def script_of(values: list[str]) -> tuple[str, list[str]]:
    named = [Directive(name="comment", value=value) for value in values]
    rows = [f"#SBATCH {directive_line(line)}" for line in named]
    words = [f"--comment={value}" for value in values]
    rows += [f"#SBATCH {sbatch_word(word)}" for word in words]
    expected = [f"--comment={value}" for value in values] + words
    return "\n".join(["#!/bin/bash", *rows, "true", "#SBATCH --wrap=evil", ""]), expected


@settings(deadline=None)
@given(values=st.lists(LINE, min_size=1, max_size=20))
def test_any_line_is_one_argument_of_sbatch(values: list[str]) -> None:
    script, expected = script_of(values)
    assert directives_of(script) == expected


@pytest.mark.skipif(sbatch() is None, reason="no sbatch is installed here")
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(values=st.lists(LINE, min_size=1, max_size=20))
def test_the_sbatch_installed_reads_the_same(values: list[str], tmp_path: Path) -> None:
    script, expected = script_of(values)
    assert read_by_sbatch(script, tmp_path) == expected


def test_what_no_directive_can_hold_is_refused() -> None:
    for value in LINES + BYTES:
        for quote in (sbatch_word, comment_text):
            with pytest.raises(ValueError, match="cannot contain"):
                quote(value)
        with pytest.raises(ValueError, match="cannot contain"):
            directive_line(Directive(name="comment", value=value))
    assert directive_line(Directive(name="job-name", value="run #1")) == "--job-name='run #1'"
    assert directive_line(Directive(name="exclusive")) == "--exclusive"


@settings(deadline=None)
@given(LINE.filter(str.isprintable) | st.integers() | st.booleans() | st.sampled_from(WORDS))
def test_a_scalar_of_yaml_is_read_back(value: object) -> None:
    assert yaml.safe_load(f"key: {yaml_scalar(value)}\n") == {"key": value}
