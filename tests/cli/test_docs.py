"""Commands of the documentation that need a cluster render: the largest world of `scaling`, too."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine
from tests.readme import blocks
from tests.test_docs import pages_with


@pytest.mark.parametrize("page", pages_with("render"))
def test_commands_for_a_cluster_render(page: str, here: CommandLine) -> None:
    here.slurm()
    Path("train.py").write_text("")
    for text in blocks("render", page):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(os.path.expandvars(re.sub(r"\s#\s.*", "", line)))
            assert words[0] == "clusterrun"
            assert words[1] in ("submit", "scaling")
            said = here("render", *(re.sub(r"^[\d,]+,", "", word) for word in words[2:]))
            assert said.code == 0, said.err
