from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from clusterrun.cli.init import STARTER, starter_text
from clusterrun.cli.main import main
from clusterrun.config.document import ConfigFile, parse_document
from clusterrun.config.settings import Anchor

Capture = pytest.CaptureFixture[str]
COMMENTED = re.compile(r"^( *)#(?=\S)", re.MULTILINE)


def keys_of(text: str) -> set[str]:
    document = parse_document(
        ConfigFile(shown="clusterrun.yaml", text=text, anchor=Anchor(), strict=True)
    )
    assert document.errors == []
    assert document.warnings == []
    return {setting.key for setting in document.settings} | set(document.profiles)


def test_the_starter_says_nothing_as_it_stands() -> None:
    assert keys_of(STARTER) == set()


def test_every_line_of_the_starter_is_valid_when_uncommented() -> None:
    lines = [match.start() for match in COMMENTED.finditer(STARTER)]
    assert len(lines) > 20
    for start in lines:
        text = STARTER[:start] + COMMENTED.sub(r"\1", STARTER[start:], count=1)
        assert len(keys_of(text)) == 1, STARTER[start:].splitlines()[0]


def test_the_whole_starter_is_valid_when_uncommented() -> None:
    found = keys_of(COMMENTED.sub(r"\1", STARTER))
    assert {"script", "slurm.time", "env.TOKENIZERS_PARALLELISM", "pass_env", "a100"} <= found


@pytest.mark.parametrize("script", ["train.py", "my train.py", "#x", "a: b", "'", "ü\n"])
def test_any_script_name_is_written_as_that_name(script: str) -> None:
    text = starter_text(script)
    document = parse_document(ConfigFile(shown="f", text=text, anchor=Anchor(), strict=True))
    if "\n" in script:  # no script can be named so, and loading says it
        assert document.errors[0].message.startswith("script holds a newline")
    else:
        assert [(s.key, s.value) for s in document.settings] == [("script", script)]


def test_init_writes_a_file_that_validates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERRUN_SITE_CONFIG", "/dev/null")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["init"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "clusterrun.yaml\n"
    assert "clusterrun config validate" in captured.err
    assert main(["config", "validate", "--strict"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["clusterrun.yaml"]


def test_init_does_not_overwrite_unless_forced(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "clusterrun.yaml"
    path.write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert path.read_text() == "mine"
    assert "--force replaces it" in capsys.readouterr().err
    assert main(["init", str(tmp_path), "--force"]) == 0
    assert path.read_text() == STARTER


def test_init_makes_the_directory_and_names_the_script(tmp_path: Path, capsys: Capture) -> None:
    directory = tmp_path / "new" / "project"
    assert main(["init", str(directory), "--script", "go.py"]) == 0
    assert "\nscript: go.py " in (directory / "clusterrun.yaml").read_text()
    assert "warning: script 'go.py' does not exist" in capsys.readouterr().err


def test_the_file_is_readable_by_colleagues_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert main(["init", str(tmp_path)]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "clusterrun.yaml").stat().st_mode) == 0o644


def test_a_directory_that_cannot_be_written_is_one_message(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()
    assert main(["init", str(tmp_path / "file" / "below")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: cannot write ")
    assert "  cause: " in captured.err
