"""What a script says of secrets is in its logs, and in no bundle that others get."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.config.test_secrets import FORMS, NAMES, PARTS
from tests.road import LIGHT, project

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]

SAYS = """
import json, sys
texts = json.load(open("texts.json"))
for stream in (sys.stdout, sys.stderr):
    print(*texts, sep="\\n", file=stream)
raise RuntimeError("\\n".join(texts))
"""


def test_a_bundle_has_no_secret_that_a_script_printed_and_raised(tmp_path: Path) -> None:
    here = project(tmp_path / "project", tmp_path / "state")
    (here.path / "says.py").write_text(SAYS)
    texts = [*FORMS, *(f"{name}={PARTS[0]}" for name in NAMES.split())]
    (here.path / "texts.json").write_text(json.dumps(texts))
    start = ("submit", "--wait", "--cluster", "local", "--nproc-per-node", "1", *LIGHT, "says.py")
    assert here.cli(*start).returncode == 1
    here.cli("diagnose", "--bundle", "help.tgz")
    with tarfile.open(here.path / "help.tgz") as archive:
        files = [archive.extractfile(member) for member in archive.getmembers()]
        everything = "".join(file.read().decode() for file in files if file)
    assert "RuntimeError" in everything
    assert [part for part in PARTS if part in everything] == []
