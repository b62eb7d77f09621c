"""Each check of `doctor` fails, and no other, if the thing that it looks at is broken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from clusterrun.backends import interpreters, machine_facts
from clusterrun.backends.slurm import query
from clusterrun.health import paths, toolchain
from clusterrun.health.node import pages
from clusterrun.launch.facts import Interpreter
from clusterrun.verbs import doctor
from tests.cli.conftest import INSTALLED, CommandLine
from tests.health.stand_in import stand_in

OFFLOAD = ("--strategy", "zero2-offload", "train.py")
GROUPS = "main*|up|1:00:00|1-infinite|no|2|idle|gpu:h100:4|64|512000|(null)|n[1-2]|none"
SLURM = ("--cluster", "slurm", "-N", "2", "--gpus-per-node", "4", "--time", "30")

Found = dict[str, dict[str, Any]]


def look(here: CommandLine, *args: str) -> Found:
    """Return the checks by id; the exit status must fit them."""
    query.forget()
    said = here("doctor", "--json", *args)
    found = {each["id"]: each for each in json.loads(said.out)["checks"]}
    assert said.code == (3 if any(each["status"] == "fail" for each in found.values()) else 0)
    return found


def changed(before: Found, after: Found) -> dict[str, str]:
    """Return the checks whose status changed, with the new one."""
    assert before.keys() == after.keys()
    return {
        name: after[name]["status"]
        for name in before
        if after[name]["status"] != before[name]["status"]
    }


def sinfo(here: CommandLine, groups: str = GROUPS) -> None:
    here.program("sinfo", f"echo '{groups}'")


@pytest.fixture(name="well")
def _well(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A machine with a driver, a compiler and a Slurm that answers."""
    here.slurm("case $* in *version*) echo slurm 24.11.5;; *) echo ok to start >&2;; esac")
    here.program("scontrol", 'echo "Slurmctld(primary) at login1 is UP"')
    sinfo(here)
    here.program("sacctmgr", "exit 0")
    here.program("nvcc", "echo 'Cuda compilation tools, release 12.4, V12.4.131'")
    here.program("c++", "exit 0")
    monkeypatch.setattr(toolchain, "cuda_of_torch", lambda *_: "12.4")
    monkeypatch.setattr(toolchain, "versions_in", lambda _, names: dict.fromkeys(names, "1"))
    monkeypatch.setattr(toolchain, "TOOLKIT", Path("/nowhere"))
    monkeypatch.setattr(paths, "PLACES_OF_ONE_MACHINE", ())  # tests run in /tmp
    for name in doctor.scrubbed({}).keys() ^ os.environ.keys():
        if name == "NCCL_TIMEOUT" or name not in doctor.scrubbed(os.environ):
            monkeypatch.delenv(name)
    return here


def test_on_a_healthy_machine_nothing_fails(well: CommandLine) -> None:
    found = look(well, *SLURM, *OFFLOAD)
    assert {each["status"] for each in found.values()} <= {"ok", "note", "skip"}
    sure = {name for name in found if name.split(".")[0] in ("config", "env", "python", "slurm")}
    assert {found[name]["status"] for name in sure | {"cuda.toolkit"}} == {"ok"}
    nodes_only = ("node.report", "node.compute", "net.meet", "net.reduce", "same.")
    assert list(found) == [name for name in pages() if not name.startswith(nodes_only)]
    assert well.files() == ["train.py"], "nothing is written"


def test_without_slurm_torch_and_gpu_the_rest_is_checked(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreters, "own_version", {**INSTALLED, "torch": ""}.__getitem__)
    monkeypatch.setattr(toolchain, "TOOLKIT", Path("/nowhere"))
    found = look(here)
    assert here("doctor").code == 0
    assert found["python.packages"]["status"] == "note"
    assert not any(name.startswith("slurm.") for name in found)
    assert {each["status"] for each in look(here, "--only", "slurm").values()} == {"skip"}
    assert {found[name]["status"] for name in ("cuda.driver", "cuda.toolkit")} == {"skip"}
    assert found["path.runs"]["status"] == "ok"
    found = look(here, "--only", "python.p", "train.py")
    assert found["python.packages"]["status"] == "fail"


def test_what_is_printed(well: CommandLine) -> None:
    well.program("scontrol", "echo 'Slurmctld(primary) at login1 is DOWN'")
    said = well("doctor", *SLURM, "--only", "slurm.c,slurm.l", "train.py")
    assert said.code == 3
    assert said.out.splitlines() == [
        "FAIL  slurm.controller    Slurmctld(primary) at login1 is DOWN",
        "      hint: try again later; check slurmctld with: scontrol ping",
        "skip  slurm.limits        slurmctld does not answer",
    ]
    assert said.err == "0 ok, 0 noted, 1 failed, 1 skipped\nfailed: slurm.controller\n"


def test_a_scheduler_that_does_not_answer_fails(well: CommandLine) -> None:
    well.program("scontrol", "sleep 100")
    said = well("doctor", *SLURM, "--only", "slurm.controller", "train.py")
    assert (said.code, said.out.split()[:2]) == (3, ["FAIL", "slurm.controller"])


# Programs, packages and files

Break = Callable[[CommandLine, pytest.MonkeyPatch], object]


def gone(name: str) -> Break:
    return lambda here, _: (here.bin / name).unlink()


def program(name: str, text: str) -> Break:
    return lambda here, _: here.program(name, text)


def environ(name: str, value: str) -> Break:
    return lambda _, patch: patch.setenv(name, value)


def package(**versions: str) -> Break:
    known = {**INSTALLED, **versions}
    return lambda _, patch: patch.setattr(interpreters, "own_version", known.__getitem__)


def lacking(package: str) -> Break:
    found = lambda _, names: dict.fromkeys({*names} - {package}, "1") | {package: ""}  # noqa: E731
    return lambda _, patch: patch.setattr(toolchain, "versions_in", found)


def text_of(path: str, text: str) -> Break:
    return lambda here, _: (here.path / path).write_text(text)


def both(*breaks: Break) -> Break:
    return lambda here, patch: [each(here, patch) for each in breaks]


def test_a_torch_without_cuda_for_a_job_with_gpus(
    well: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "cuda_of_torch", lambda *_: "")
    found = look(well, *SLURM, "train.py")
    assert found["python.torch"]["status"] == "fail"
    assert "--device cpu" in found["python.torch"]["hint"]
    assert look(well, *SLURM, "--device", "cpu", "train.py")["python.torch"]["status"] == "ok"


BREAKS: list[tuple[str, str, str, Break]] = [
    ("config.job", "fail", "", text_of("train.py", "print(\n")),
    ("env.left_over", "note", "unset WORLD_SIZE", environ("WORLD_SIZE", "4")),
    ("env.left_over", "note", "unset PET_NNODES", environ("PET_NNODES", "4")),
    ("env.left_over", "note", "unset NCCL_TIMEOUT", environ("NCCL_TIMEOUT", "1800")),
    ("env.left_over", "note", "unset SBATCH_QOS", environ("SBATCH_QOS", "long")),
    ("python.packages", "fail", "-m pip install '.[train]' in a clone", package(clusterrun="")),
    ("python.packages", "fail", "upgrade it", package(torch="1.9.0")),
    ("python.packages", "fail", "-m pip install '.[train]' in a", package(accelerate="")),
    ("python.packages", "fail", "-m pip install '.[train]' in a", package(deepspeed="")),
    ("python.compiler", "fail", "install g++", gone("c++")),
    ("python.compiler", "fail", "pip install ninja", lacking("ninja")),
    ("cuda.toolkit", "fail", "load CUDA 12.4", program("nvcc", "echo release 11.8,")),
    ("cuda.toolkit", "note", "load CUDA 12.4", program("nvcc", "echo release 12.6,")),
    ("cuda.toolkit", "fail", "load CUDA 12.4", gone("nvcc")),
    (
        "cuda.toolkit",
        "note",
        "load CUDA 12.4",
        both(program("nvcc", "echo release 11.8,"), environ("DS_SKIP_CUDA_CHECK", "1")),
    ),
    ("path.runs", "fail", "--run-dir", text_of("runs", "a file is in the way")),
    (
        "path.runs",
        "fail",
        "that all nodes share",
        lambda here, patch: patch.setattr(
            paths, "PLACES_OF_ONE_MACHINE", (os.path.realpath(here.path),)
        ),
    ),
    (
        "slurm.partition",
        "fail",
        "sinfo -s",
        lambda here, _: sinfo(here, groups=GROUPS.replace("|up|", "|down|")),
    ),
    (
        "slurm.submit",
        "fail",
        "sacctmgr",
        program("sbatch", "case $* in *v*) echo 24.11.5;; *) echo Invalid qos >&2; exit 1;; esac"),
    ),
]


@pytest.mark.parametrize(
    ("name", "status", "hint", "broken"),
    BREAKS,
    ids=[f"{name}-{status}-{number}" for number, (name, status, *_) in enumerate(BREAKS)],
)
def test_one_thing_is_broken(
    well: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    status: str,
    hint: str,
    broken: Break,
) -> None:
    before = look(well, *SLURM, *OFFLOAD)
    broken(well, monkeypatch)
    after = look(well, *SLURM, *OFFLOAD)
    assert changed(before, after) == {name: status}, after[name]
    assert hint in after[name]["hint"]
    assert after[name]["hint"]


@pytest.mark.parametrize(
    ("name", "hint", "args"),
    [
        ("slurm.partition", "--partition: main", ("--partition", "gpu")),
        ("slurm.limits", "--nodes 2", ("-N", "3")),
        ("slurm.limits", "--time 01:00:00", ("--time", "2h")),
        ("slurm.limits", "--gpus-per-node 4", ("--gpus-per-node", "8")),
    ],
)
def test_a_request_beyond_the_site(
    well: CommandLine, name: str, hint: str, args: tuple[str, ...]
) -> None:
    found = look(well, *SLURM, *args, *OFFLOAD)
    assert [each for each in found if found[each]["status"] == "fail"] == [name]
    assert hint in found[name]["hint"]


@pytest.mark.parametrize(
    ("drained", "wanted", "status", "hint"),
    [(1, "2", "note", "sinfo -R -p main"), (2, "2", "fail", "--nodes 1"), (3, "2", "fail", "wait")],
)
def test_nodes_that_are_drained(
    well: CommandLine, drained: int, wanted: str, status: str, hint: str
) -> None:
    rows = "main*|up|1:00:00|1-infinite|no|{}|{}|gpu:h100:4|64|512000|(null)|n[{}]|{}"
    reason = "NHC: check_fs_mount:  /scratch not mounted"
    out = rows.format(drained, "drained", f"{4 - drained}-3", reason)
    up = [rows.format(3 - drained, "idle", f"1-{3 - drained}", "none")] if drained < 3 else []
    sinfo(well, groups="\n".join([*up, out]))
    found = look(well, *SLURM[:3], wanted, *SLURM[4:], *OFFLOAD)
    assert found["slurm.nodes"]["status"] == status
    assert hint in found["slurm.nodes"]["hint"]
    nodes = "n3" if drained == 1 else f"n[{4 - drained}-3]"
    assert found["slurm.nodes"]["text"].startswith(
        f"{drained} of 3 nodes are down or drained: "
        f"NHC: check_fs_mount: /scratch not mounted ({nodes})"
    )
    assert found["slurm.limits"]["status"] == "ok"


def test_a_job_that_submit_would_refuse_is_refused(well: CommandLine) -> None:
    assert well("doctor", *SLURM, "absent.py").code == 2
    (well.path / "clusterrun.yaml").write_text("script: train.py\nnods: 2\n")
    said = well("doctor", *SLURM, "train.py")
    assert (said.code, said.out) == (2, "")
    assert "clusterrun.yaml:2" in said.err
    assert "hint: " in said.err


def test_what_another_interpreter_lacks(tmp_path: Path) -> None:
    """Its own files tell: torch is not imported to know its CUDA."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '12.6'\n")
    known = {"torch": "2.6.0+cu124"}
    found = Interpreter("/p", (3, 8), known, is_known=True, places=(str(tmp_path),))
    assert toolchain.cuda_of_torch(found.places, known["torch"]) == "12.6"


def test_what_does_not_answer_is_left_behind(
    well: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DEADLINE_S", 1.0)
    monkeypatch.setattr(toolchain, "cuda_of_torch", lambda *_: Event().wait())
    found = look(well, "--cluster", "local", "--only", "python", "--only", "node")
    assert found["python.torch"]["status"] == "skip"
    assert "no answer" in found["python.torch"]["text"]
    assert found["node.shm"]["status"] != "skip"


@pytest.mark.parametrize(("cluster", "status"), [("local", "fail"), ("slurm", "note")])
def test_a_gpu_with_errors(
    well: CommandLine, monkeypatch: pytest.MonkeyPatch, cluster: str, status: str
) -> None:
    driver = stand_in(well.path.parent / "nvml", well.path.parent / "says", monkeypatch)
    driver.answer(gpu0_recovery=0, gpu1_recovery=0)
    monkeypatch.setattr(machine_facts, "find_gpus", lambda: {"0": "GPU-a", "1": "GPU-b"})
    job = ("--cluster", cluster, "--device", "cuda", "--gpus-per-node", "2", "--only", "gpu")
    before = look(well, *job)
    driver.answer(gpu1_failure=1)
    after = look(well, *job)
    assert changed(before, after) == {"gpu.ecc": status}
    assert "GPU 1" in after["gpu.ecc"]["text"]
    assert before["gpu.count"]["status"] == ("ok" if cluster == "local" else "skip")
    assert look(well, "--device", "cpu", "--only", "gpu.e")["gpu.ecc"]["status"] == "skip"
    ours = look(well, "--cluster", "local", "--gpu-ids", "0", "--only", "gpu")
    assert {each["status"] for each in ours.values()} == {"ok"}
