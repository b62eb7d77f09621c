"""NCCL's library, by stand-ins that report a version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.health import nccl
from clusterrun.health.examine import UnknownError
from tests.patience import patience

SOURCE = "int ncclGetVersion(int *version) { *version = %d; return 0; }"
OWN = Path("nvidia", "nccl", "lib")


def library(place: Path, version: int) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("gcc was not found, which builds the stand-in for NCCL")
    place.mkdir(parents=True, exist_ok=True)
    path = place / "libnccl.so.2"
    argv = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(path), "-xc", "-"]
    subprocess.run(argv, input=SOURCE % version, text=True, check=True, timeout=60 * patience())
    return path


@pytest.fixture(name="environ")
def _environ(tmp_path: Path) -> dict[str, str]:
    """An interpreter whose packages are below `site`."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(tmp_path / "site")}


def look(environ: dict[str, str], cuda: str | None = "12.4") -> tuple[str, str, str]:
    bare = getattr(sys, "_base_executable", sys.executable)  # the environment may have one
    found = nccl.loaded(bare, cuda, environ)
    assert found.id == "cuda.nccl"
    return found.severity.value, found.text, found.fix


def test_the_library_that_torch_brings(tmp_path: Path, environ: dict[str, str]) -> None:
    path = library(tmp_path / "site" / OWN, 22703)
    assert look(environ) == ("ok", f"NCCL 2.27.3, {path}", "")


def test_another_library_is_found_first(tmp_path: Path, environ: dict[str, str]) -> None:
    library(tmp_path / "site" / OWN, 22703)
    other = library(tmp_path / "modules", 2804)
    environ["LD_LIBRARY_PATH"] = f"/nowhere:{other.parent}"
    status, text, hint = look(environ)
    assert (status, hint) == ("note", f"remove {other.parent} from LD_LIBRARY_PATH")
    assert text == f"another NCCL is found first: {other} (2.8.4); torch brings 2.27.3"
    environ.update(LD_LIBRARY_PATH="", LD_PRELOAD=str(other))
    assert look(environ)[::2] == ("note", "unset LD_PRELOAD")
    library(other.parent, 22703)
    assert look(environ)[0] == "ok", "the same version"


def test_a_library_that_does_not_load(tmp_path: Path, environ: dict[str, str]) -> None:
    path = library(tmp_path / "site" / OWN, 22703)
    path.write_bytes(path.read_bytes()[:200])
    status, text, hint = look(environ)
    assert status == "fail"
    assert str(path) in text
    assert "--force-reinstall torch" in hint


def test_the_library_of_the_machine(tmp_path: Path, environ: dict[str, str]) -> None:
    environ["LD_LIBRARY_PATH"] = str(library(tmp_path / "modules", 22304).parent)
    assert look(environ)[:2] == ("ok", f"NCCL 2.23.4, {tmp_path}/modules/libnccl.so.2")


def test_what_cannot_be_known_is_skipped(environ: dict[str, str], tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexit 1\n")
    slow.chmod(0o755)
    for python, cuda, reason in (
        (sys.executable, "", "without CUDA"),
        ("", None, "is unknown"),
        (str(slow), "12.4", "did not load NCCL"),
    ):
        with pytest.raises(UnknownError, match=reason):
            nccl.loaded(python, cuda, environ)
