"""What hosts' facts mean for a run: who is named, what to do, and what only is noted."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from clusterrun.backends.hosts import courier
from clusterrun.backends.hosts.courier import gather, take
from clusterrun.backends.hosts.judge import busy, closed_port, error_of, gpus_to_lock, problems
from clusterrun.backends.hosts.openssh import HINTS, Refusal, refusal_of, why
from clusterrun.config.choices import Cluster, Device
from clusterrun.errors import Exit
from clusterrun.launch.plan import Plan
from clusterrun.node.base.ports import listening_socket, why_closed
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import current_user
from tests.backends.builders import make_plan
from tests.health.stand_in import stand_in
from tests.patience import patience
from tests.ports import free_port

VERSIONS = {"python": "3.11.2", "clusterrun": "1.0", "torch": "2.6.0", "accelerate": "1.5"}
USED = "used by process 42 (python of ann)"


def plan(**more: Any) -> Plan:
    fields: dict[str, Any] = {"device": Device.CUDA, "gpus_per_node": 2, "procs_per_node": 2}
    return make_plan(Path("/r"), **{**fields, **more})


def gpu(name: str, problem: str = "") -> dict[str, Any]:
    return {"name": name, "uuid": f"GPU-{name}", "problem": problem}


def host(**more: Any) -> dict[str, Any]:
    found = {"executable": "/py", "versions": VERSIONS, "late": [], "ahead_s": 0.0}
    found |= {"missing": [], "checks": [], "sees_home": True}
    return {**found, "gpus": {"all": [gpu("0"), gpu("1")]}, **more}


FULL = {"id": "path.disk", "status": "fail", "text": "only 1 MiB are free in /r", "hint": "delete"}
CASES = [
    (host(versions={**VERSIONS, "torch": ""}), "host.packages", "/py has no torch"),
    (host(missing=["/w/t.py"]), "host.files", "/w/t.py does not exist"),
    (host(late=["missing"]), "host.files", "a file system does not answer"),
    (host(checks=[FULL]), "host.disk", "only 1 MiB are free in /r"),
    (host(gpus={"all": [gpu("0")]}), "host.gpus", "1 of 1 GPU can be used, but 2 are needed"),
    (host(gpus={"problem": "no driver", "all": []}), "host.gpus", "needed; no driver"),
    (host(late=["gpus"], gpus={}), "host.gpus", "NVIDIA's driver does not answer"),
    (
        host(gpus={"all": [gpu("0"), gpu("1", USED)]}),
        *("host.gpus", f"1 of 2 GPUs can be used, but 2 are needed; GPU 1: {USED}"),
    ),
]


def test_a_bad_host_is_named() -> None:
    for bad, name, words in CASES:
        [found] = problems(plan(), {"h1": host(), "h2": bad, "h3": bad})
        assert (found.nodes, found.id) == (("h2", "h3"), name)
        error = error_of([found])
        assert words in error.message
        assert error.message.startswith("h[2-3]: ")
        assert error.exit_code is Exit.FAILED
        assert error.hint


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            {"versions": {**VERSIONS, "python": "3.12.1"}},
            "python: h2 has 3.12.1, the other 2 have 3.11.2",
        ),
        ({"versions": {**VERSIONS, "clusterrun": "2"}}, "clusterrun: h2 has 2, "),
    ],
)
def test_hosts_with_different_versions_are_refused(other: dict[str, Any], text: str) -> None:
    late = host(versions={}, late=["versions"])
    facts = {"h1": host(), "h2": host(**other), "h3": host(), "h4": late}
    [found] = problems(plan(), facts)
    assert found.summary.startswith(f"h[1-3]: {text}")
    assert found.id == "host.packages"


def test_clocks_far_apart_are_refused() -> None:
    for ahead_s, expected in ((-61, 1), (61, 1), (59, 0), (-2, 0)):
        assert len(problems(plan(), {"h1": host(), "h2": host(ahead_s=ahead_s)})) == expected


def test_free_gpus_are_chosen() -> None:
    facts = host(gpus={"all": [gpu("0", USED), gpu("1"), gpu("2", "x"), gpu("3")]})
    assert gpus_to_lock(plan(), facts) == ["GPU-1", "GPU-3"]
    assert problems(plan(), {"h1": facts}) == []


def test_gpus_that_are_unknown_are_locked_by_number() -> None:
    facts = host(gpus={"unknown": "no pynvml"})
    assert problems(plan(), {"h1": facts}) == []
    assert gpus_to_lock(plan(cluster=Cluster.SSH), facts) == ["0", "1"]
    assert gpus_to_lock(plan(cluster=Cluster.ALLOCATION), facts) == []


def test_a_gpu_that_another_run_holds_is_named_with_its_holder() -> None:
    found = busy("h2", "GPU-1", "process 7 of ann")
    assert found.summary == "h2: GPU GPU-1 is held by process 7 of ann"


def test_a_port_is_reached_while_somebody_listens_and_named_if_not() -> None:
    with listening_socket(port := free_port()):
        assert why_closed("127.0.0.1", port, patience()) == ""
    assert why_closed("127.0.0.1", port, patience()) == "Connection refused"
    problem = closed_port("gpu2", "gpu1", 20001, "timed out")
    assert problem.summary == "gpu2: port 20001 of gpu1 cannot be reached (timed out)"
    assert "network.port_range" in problem.fix


# What a host answers before a run starts there


def ask(tmp_path: Path, **more: object) -> dict[str, object]:
    home = tmp_path / "runs" / "r1"
    home.mkdir(parents=True, exist_ok=True)
    return {
        "home": str(home),
        "nonce": "7",
        "own_dir": str(home),
        "paths": [],
        "device": "cpu",
        **more,
    }


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
    monkeypatch.setattr(courier, "packages", lambda: Event().wait())
    assert "versions" in gather(ask(tmp_path))["late"]


def test_gpus_name_the_processes_that_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "lib", tmp_path / "says", monkeypatch).answer(gpu1_pid=os.getpid())
    assert take("gpu GPU-a") == ""
    first, second = gather(ask(tmp_path, device="cuda"))["gpus"]["all"]
    holder = f"used by process {os.getpid()} of {current_user()}"
    assert (first["uuid"], first["problem"]) == ("GPU-a", holder)
    process = rf"used by process {os.getpid()} \(.+ of {current_user()}\)"
    assert re.fullmatch(process, second["problem"])


# What OpenSSH writes when it refuses (9.2 and others), and what users read of it


CHANGED = """\
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Offending ED25519 key in /home/ann/.ssh/known_hosts:1
  remove with:
  ssh-keygen -f "/home/ann/.ssh/known_hosts" -R "gpu1"
Host key for gpu1 has changed and you have requested strict checking.
Host key verification failed.
"""
CLOSED = (
    "kex_exchange_identification: Connection closed by remote host\n"
    "Connection closed by UNKNOWN port 65535\n"
)
KEY_FILE = """\
@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for '/home/ann/.ssh/id' are too open.
Load key "/home/ann/.ssh/id": bad permissions
ann@gpu1: Permission denied (publickey).
"""
SAID = [
    (Refusal.CHANGED_KEY, 255, CHANGED),
    (
        *(Refusal.UNKNOWN_KEY, 255),
        "No ED25519 host key is known for gpu1 and you have requested strict checking.\n"
        "Host key verification failed.\n",
    ),
    (Refusal.KEY_FILE, 255, KEY_FILE),
    (Refusal.OTHER, 255, "Bad owner or permissions on /home/ann/.ssh/config"),
    (
        *(Refusal.TOO_MANY_KEYS, 255),
        "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\n"
        "Disconnected from 10.0.0.1 port 22\n",
    ),
    (Refusal.DENIED, 255, "ann@gpu1: Permission denied (publickey,password)."),
    (
        *(Refusal.UNKNOWN_HOST, 255),
        "ssh: Could not resolve hostname gpu1: Name or service not known",
    ),
    (Refusal.UNKNOWN_HOST, 255, f"ssh: Could not resolve hostname jump: x\n{CLOSED}"),
    (Refusal.REFUSED, 255, "ssh: connect to host gpu1 port 22: Connection refused"),
    (Refusal.SILENT, 255, "ssh: connect to host gpu1 port 22: Connection timed out"),
    (Refusal.SILENT, 255, "ssh: connect to host gpu1 port 22: No route to host"),
    (Refusal.SILENT, 255, "Connection timed out during banner exchange"),
    (Refusal.OTHER, 255, CLOSED),
    (Refusal.OTHER, 255, "Timeout, server gpu1 not responding."),
    (Refusal.OTHER, 255, "something new\nand unknown\n"),
    (Refusal.OTHER, 255, ""),
    (Refusal.NO_PYTHON, 127, "bash: line 1: exec: python3.12: not found"),
    (Refusal.NO_PYTHON, 127, "bash: line 1: /opt/py/bin/python: No such file or directory"),
    (Refusal.NO_PYTHON, 126, "bash: line 1: /opt/py/bin/python: Permission denied"),
    (Refusal.NO_CLUSTERRUN, 1, "/usr/bin/python3: No module named clusterrun"),
    (Refusal.NO_CLUSTERRUN, 1, "Traceback (most recent call last):\nImportError: TypeAlias"),
    (Refusal.SETUP, 122, "clusterrun: gpu1: setup line 1 failed with status 1: false"),
    (Refusal.ENDED, 0, ""),
    (Refusal.SILENT, -9, "Welcome to gpu1"),
]


def test_every_reason_is_named() -> None:
    assert {refusal for refusal, _, _ in SAID} == {*Refusal} == {*HINTS}
    for refusal, rc, stderr in SAID:
        error = why("gpu1", rc, stderr)
        assert refusal_of(rc, stderr) is refusal
        assert error.message == f"gpu1: {refusal.value}"
        assert error.exit_code is (Exit.UNREACHABLE if rc in (255, -9) else Exit.FAILED)
        assert error.hint
        assert "HOST" not in error.hint.replace("USER@", "")


def test_the_last_line_is_quoted_as_plain_text() -> None:
    assert why("gpu1", 255, "first\nlast \x1b[31mred\n\n").cause == "last  [31mred"


def test_a_refusal_between_hosts_names_both() -> None:
    error = why("gpu2", 255, "ann@gpu2: Permission denied (publickey).", first="gpu1")
    assert error.message == "gpu1 cannot log in to gpu2: permission denied"
    assert error.hint.startswith("on gpu1: copy your key with ssh-copy-id gpu2")
    assert why("gpu2", 127, "", first="gpu1").message == "gpu2: Python was not found"
