"""What hosts' facts mean for a run: who is named, what to do, and what only is noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.hosts.courier import can_connect, listen
from clusterrun.backends.hosts.judge import busy, closed_port, error_of, gpus_to_lock, judged
from clusterrun.backends.hosts.locks import Holder, gpu_lock, job_lock
from clusterrun.config.choices import Cluster, Device
from clusterrun.errors import Exit
from clusterrun.launch.plan import Plan
from clusterrun.shared.finding import Finding, Severity
from tests.backends.builders import make_plan
from tests.ports import free_port

VERSIONS = {"clusterrun": "1.0", "torch": "2.6.0", "accelerate": "1.5"}


def plan(**more: Any) -> Plan:
    fields: dict[str, Any] = {"device": Device.CUDA, "gpus_per_node": 2, "procs_per_node": 2}
    return make_plan(Path("/r"), **{**fields, **more})


def gpu(name: str, *processes: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {"name": name, "uuid": f"GPU-{name}", "problem": "", "model": "H100", "holder": None}
    return {**fields, "processes": [*processes], "used": 0, "total": 1 << 36, **more}


def process(command: str = "python", size: int = 3 << 30) -> dict[str, Any]:
    return {"pid": 42, "user": "ann", "command": command, "bytes": size}


def problems(*about: Any) -> list[Finding]:
    return [each for each in judged(*about) if each.severity is Severity.FAIL]


def notes(*about: Any) -> list[Finding]:
    return [each for each in judged(*about) if each.severity is Severity.NOTE]


def host(**more: Any) -> dict[str, Any]:
    found = {"python": "3.11.2", "executable": "/py", "versions": VERSIONS, "late": []}
    found |= {"missing": [], "checks": [], "sees_home": True}
    return {**found, "gpus": {"all": [gpu("0"), gpu("1")]}, **more}


FULL = {"id": "path.disk", "status": "fail", "text": "only 1 MiB are free for /r", "hint": "delete"}
CASES = [
    (host(versions={**VERSIONS, "torch": ""}), "host.packages", "/py has no torch"),
    (host(missing=["/w/t.py"]), "host.files", "/w/t.py does not exist there"),
    (host(late=["missing"]), "host.files", "a file system does not answer there"),
    (host(checks=[FULL]), "host.disk", "only 1 MiB are free for /r"),
    (host(gpus={"all": [gpu("0")]}), "host.gpus", "1 GPU, but 2 are needed"),
    (host(gpus={"problem": "no driver", "all": []}), "host.gpus", "needed (no driver)"),
    (host(late=["gpus"], gpus={}), "host.gpus", "NVIDIA's driver does not answer"),
    (
        host(gpus={"all": [gpu("0"), gpu("1", process())]}),
        *("host.busy", "2 are needed: GPU 1: process 42 (python of ann, 3.0 GiB)"),
    ),
    (
        host(gpus={"all": [gpu("0"), gpu("1", holder={"pid": 7, "user": "bob", "run": "lm/1"})]}),
        *("host.busy", "GPU 1: run lm/1 of bob (process 7)"),
    ),
]


def test_a_bad_host_is_named() -> None:
    for bad, name, words in CASES:
        [found] = problems(plan(), {"h1": host(), "h2": bad, "h3": bad}, {})
        assert (found.nodes, found.id) == (("h2", "h3"), name)
        error = error_of([found])
        assert words in error.message
        assert error.message.startswith("h[2-3]: ")
        assert error.exit_code is Exit.FAILED
        assert error.hint


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"python": "3.12.1"}, "python: h2 has 3.12.1, the other 2 have 3.11.2"),
        ({"versions": {**VERSIONS, "clusterrun": "2"}}, "clusterrun: h2 has 2, "),
    ],
)
def test_hosts_with_different_versions_are_refused(other: dict[str, Any], text: str) -> None:
    late = host(versions={}, late=["versions"])
    facts = {"h1": host(), "h2": host(**other), "h3": host(), "h4": late}
    [found] = problems(plan(), facts, {})
    assert found.summary.startswith(f"h[1-3]: {text}")
    assert found.id == "host.packages"


def test_clocks_far_apart_are_refused_and_others_noted() -> None:
    facts = {"h1": host(), "h2": host()}
    for ahead_s, expected in ((-61, 1), (61, 1), (59, 0), (-2, 0)):
        assert len(problems(plan(), facts, {"h2": ahead_s})) == expected
        assert len(notes(plan(), facts, {"h2": ahead_s})) == 1 - expected


def test_what_does_no_harm_is_noted() -> None:
    screen = process("Xorg", 100 << 20)
    mixed = {
        "h1": host(gpus={"all": [gpu("0", screen), gpu("1")]}),
        "h2": host(gpus={"all": [gpu("0", model="A100"), gpu("1", model="A100")]}),
        "h3": host(sees_home=False, gpus={"unknown": "nvidia-ml-py is not installed"}),
    }
    assert problems(plan(), mixed, {}) == []
    text = "\n".join(each.summary for each in notes(plan(), mixed, {}))
    assert "h3: the run directory is not shared there" in text
    assert "h3: its GPUs are not checked" in text


def test_free_gpus_are_chosen() -> None:
    facts = host(gpus={"all": [gpu("0", process()), gpu("1"), gpu("2", problem="x"), gpu("3")]})
    assert gpus_to_lock(plan(), facts) == ["GPU-1", "GPU-3"]
    assert problems(plan(), {"h1": facts}, {}) == []


def test_gpus_that_are_unknown_are_locked_by_number() -> None:
    facts = host(gpus={"unknown": "no pynvml"})
    assert gpus_to_lock(plan(cluster=Cluster.SSH), facts) == ["0", "1"]
    assert gpus_to_lock(plan(cluster=Cluster.ALLOCATION), facts) == []


def test_a_lock_of_the_job_is_the_same_host_twice() -> None:
    holder = Holder(pid=7, user="ann", run="lm/1", job="9", host="h1")
    twice = error_of([busy("h2", job_lock("9"), holder, "9")])
    assert (twice.message, twice.exit_code) == ("h2: the same machine as h1", Exit.USAGE)
    other = busy("h2", gpu_lock("GPU-1"), holder, "10")
    assert other.summary == "h2: GPU GPU-1 is held by run lm/1 of ann (process 7)"


def test_a_port_is_reached_while_somebody_listens_and_named_if_not() -> None:
    first = listen((free_port(), 0))
    assert first
    second = listen((first.getsockname()[1], free_port()))
    assert second
    with first, second:
        ports = [each.getsockname()[1] for each in (first, second)]
        assert ports[0] != ports[1]
        assert [can_connect("127.0.0.1", port) for port in ports] == ["", ""]
    assert can_connect("127.0.0.1", ports[0]) == "Connection refused"
    problem = closed_port(["gpu2", "gpu3"], "gpu1", 20001, "timed out")
    assert problem.summary == "gpu[2-3]: port 20001 of gpu1 cannot be reached (timed out)"
    assert "network.port_range" in problem.fix
