"""What a host answers before a run starts there, with a stand-in for NVIDIA's driver."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from clusterrun.backends.hosts import courier
from clusterrun.backends.hosts.courier import gather
from clusterrun.backends.hosts.locks import Lock, gpu_lock, take
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import current_user
from tests.health.stand_in import stand_in
from tests.patience import patience


def ask(tmp_path: Path, **more: object) -> dict[str, object]:
    home = tmp_path / "runs" / "r1"
    home.mkdir(parents=True, exist_ok=True)
    return {"home": str(home), "nonce": "7", "own_dir": str(home), **more}


def test_a_host_describes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "SEEN_S", 0.1)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 4000 10.0.0.1 22")
    script = tmp_path / "train.py"
    wanted = ask(tmp_path, paths=[str(tmp_path), str(script)])
    assert (gather(wanted)["sees_home"], gather(wanted)["missing"]) == (False, [])
    RunPaths(root=tmp_path / "runs" / "r1").nonce("7").touch()
    found = gather(wanted)
    assert json.loads(json.dumps(found)) == found
    assert (found["executable"], found["client"]) == (sys.executable, "10.0.0.9")
    assert "clusterrun" in found["versions"]
    assert abs(found["time"] - time.time()) < 60 * patience()
    assert (found["missing"], found["sees_home"], found["late"]) == ([str(script)], True, [])
    assert (found["checks"], found["gpus"]) == ([], {})


def test_a_stuck_file_system_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "DEADLINE_S", 1.0)
    monkeypatch.setattr(courier, "packages", lambda: time.sleep(30))
    assert "versions" in gather(ask(tmp_path))["late"]


def test_gpus_name_the_processes_that_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "lib", tmp_path / "says", monkeypatch).answer(gpu1_pid=os.getpid())
    held = take(gpu_lock("GPU-a"), {"run": "lm/1", "job": "7"})
    assert isinstance(held, Lock)
    first, second = gather(ask(tmp_path, device="cuda"))["gpus"]["all"]
    held.free()
    assert (first["uuid"], first["holder"]["run"], first["processes"]) == ("GPU-a", "lm/1", [])
    process = second["processes"][0]
    assert (process["pid"], process["user"]) == (os.getpid(), current_user())
    assert process["command"]
    assert second["holder"] is None
