"""The environment that hosts build: what its lock has, and that it is built once."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from clusterrun.backends.hosts import environment, start
from clusterrun.backends.hosts.environment import ensure_environment, lock_of, python_of
from clusterrun.backends.hosts.refusals import HostError
from clusterrun.errors import ClusterrunError, UsageError


def installed(
    root: Path, name: str, version: str, origin: Mapping[str, object] | None = None
) -> metadata.Distribution:
    """Write an installed package of one module."""
    info = root / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    files = {
        f"{name}.py": f"VALUE = {version!r}\n",
        f"{info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info.name}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info.name}/direct_url.json": json.dumps(origin or {}),
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info.name}/RECORD"))
    for path, text in {**files, f"{info.name}/RECORD": record}.items():
        (root / path).write_text(text)
    return metadata.Distribution.at(info)


@pytest.fixture(name="_no_pip", autouse=True)
def _without_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "executable", "/bin/false")  # `pip config list`


def text_of(lock: bytes) -> list[str]:
    return base64.b64decode(json.loads(lock)["files"]["lock.txt"]).decode().splitlines()


def test_each_package_is_locked_by_its_origin(tmp_path: Path) -> None:
    git = {"url": "ssh://git@x.org/y.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    lock = lock_of(
        [
            installed(tmp_path, "torch", "2.7.0+cu128"),
            installed(tmp_path, "mine", "1.0", {"url": "file:///home/me/mine", "dir_info": {}}),
            installed(tmp_path, "other", "1", {**git, "subdirectory": "sub"}),
        ]
    )
    assert text_of(lock) == [
        "--extra-index-url https://download.pytorch.org/whl/cu128",
        "torch==2.7.0+cu128",
        "other @ git+ssh://git@x.org/y.git@abc#subdirectory=sub",
        "./mine-1.0-py3-none-any.whl",
    ]


def test_the_key_is_that_of_the_content(tmp_path: Path) -> None:
    package = installed(tmp_path, "mine", "1.0", {"url": "file:///home/me/mine", "dir_info": {}})
    first = json.loads(lock_of([package]))["key"]
    (tmp_path / "mine.py").touch()
    assert json.loads(lock_of([package]))["key"] == first
    (tmp_path / "mine.py").write_text("VALUE = 2\n")
    assert json.loads(lock_of([package]))["key"] != first


def test_a_token_in_a_url_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = {"url": "https://u:secret@x.org/a.whl", "archive_info": {}}
    with pytest.raises(UsageError, match="password or token") as caught:
        lock_of([installed(tmp_path, "mine", "1.0", origin)])
    assert "secret" not in str(caught.value) + caught.value.hint
    pip = tmp_path / "pip"
    pip.write_text("#!/bin/sh\necho \"global.extra-index-url='file:///a https://u:t@x.org/'\"\n")
    pip.chmod(0o755)
    monkeypatch.setattr(environment.sys, "executable", str(pip))
    with pytest.raises(UsageError, match="pip's extra-index-url has a password"):
        lock_of([])


def test_problems_of_a_host_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lock = json.loads(lock_of([]))
    for change, words in (
        ({"platform": "linux-vax"}, r"gpu2: the environment is for linux-vax, and this host is"),
        ({"python": "3.99"}, r"gpu2: there is no python3\.99"),
    ):
        changed = json.dumps({**lock, **change}).encode()
        with pytest.raises(ClusterrunError, match=words):
            ensure_environment("gpu2", start.READ, changed, print)
    denied = ("sh", "-c", "echo 'Permission denied (publickey)' >&2; exit 255")
    with pytest.raises(HostError, match="gpu1 cannot log in to gpu2: permission denied"):
        ensure_environment("gpu2", denied, b'{"python": "3.11"}', print, first="gpu1")


@pytest.mark.long
def test_an_environment_is_built_once_by_a_python_without_clusterrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    origin = {"url": "file:///gone", "dir_info": {}}
    lock = lock_of([installed(tmp_path / "site", "mine", "1.0", origin)])
    notes: list[str] = []
    for _ in range(2):
        ensure_environment("gpu2", start.READ, lock, notes.append)
        assert notes == ["gpu2: building the environment (1 packages)"]
    python = python_of(lock).replace("~", str(tmp_path))
    asked = [python, "-Ic", "import mine, sys; print(mine.VALUE, sys.prefix)"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert answer.split() == ["1.0", str(Path(python).parents[1])]
    lacking = lock_of([installed(tmp_path / "site", "no-such-package", "1.0")])
    with pytest.raises(ClusterrunError, match=r"No matching distribution.*no-such-package==1\.0"):
        ensure_environment("gpu2", start.READ, lacking, notes.append)
    built = Path(python).parents[1]
    assert [path for path in built.parent.iterdir() if path.is_dir()] == [built]
    assert (built / "lock.json").read_bytes() == lock
