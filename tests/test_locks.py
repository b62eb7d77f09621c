"""Locks between processes: exclusive, never for ever, and no error where there are none."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.errors import ClusterrunError
from clusterrun.shared import locks
from clusterrun.shared.locks import locked

HOLDER = """\
import sys, time, pathlib
from clusterrun.shared.locks import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_that_is_never_released_is_an_error_that_names_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    argv = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(locks, "WAIT_S", 0.2)
        with pytest.raises(ClusterrunError, match=f"process {holder.pid} on "), locked(path):
            pass
        holder.kill()
    with locked(path):
        assert os.listdir(tmp_path) == [".lock"]


def test_a_file_system_without_locks_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path / ".lock"), locked(tmp_path / ".lock"):
        pass
