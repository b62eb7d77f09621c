"""What is looked up about this machine, by stub programs where the machine lacks the thing."""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends import machine_facts
from clusterrun.backends.environment import working_directory
from clusterrun.backends.machine_facts import gather_facts, visible_gpus
from clusterrun.config.choices import Cluster
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError, UsageError
from tests.health.stand_in import stand_in
from tests.patience import finished

ROOT = Path(__file__).resolve().parents[2]
TWO = {"0": "GPU-aa11", "1": "GPU-bb22"}


def program(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("listed", "ids"),
    [
        (None, ("0", "1")),
        ("", ()),
        ("1,0", ("1", "0")),
        ("1", ("1",)),
        ("-1", ()),
        ("0,7,1", ("0",)),
        ("NoDevFiles", ()),
        ("GPU-bb22", ("GPU-bb22",)),
        ("GPU-b", ("GPU-b",)),
        ("GPU-ff", ()),
    ],
)
def test_cuda_visible_devices_is_honoured_as_cuda_reads_it(
    listed: str | None, ids: tuple[str, ...]
) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(TWO, environ) == ids


def test_a_divided_gpu_counts_as_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = stand_in(tmp_path / "nvml", tmp_path / "says", monkeypatch)
    line = "from clusterrun.backends.machine_facts import find_gpus; print(find_gpus())"
    for says, found in (
        ({"gpu0_mig": 1}, {"MIG-a": "MIG-a", "1": "GPU-b"}),
        ({"gpu1_handle": -15}, {"MIG-a": "MIG-a", "1": ""}),
        ({"gpus": -999}, {}),
        ({"init": -18}, {}),
    ):
        driver.answer(**says)
        done = finished([sys.executable, "-c", line], check=True, cwd=ROOT)
        assert done.stdout == f"{found}\n"


def test_slurm_is_chosen_where_sbatch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert machine_facts.choose_cluster(Cluster.AUTO) is Cluster.LOCAL
    program(tmp_path / "bin", "sbatch", "exit 1")
    assert machine_facts.choose_cluster(Cluster.AUTO) is Cluster.SLURM
    assert machine_facts.choose_cluster(Cluster.LOCAL) is Cluster.LOCAL


def test_facts_are_absolute_and_hold_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_bytes(b"\xef\xbb\xbf# mine\rdistributed_type: NO\r\n")
    spec = JobSpec(
        script="train.py",
        cluster=Cluster.LOCAL,
        run_dir="../runs",
        python="./venv/bin/python",
        accelerate_config="own.yaml",
    )
    found = gather_facts(spec, cwd=tmp_path, environ={})
    assert found.workdir == str(tmp_path)
    assert found.runs_dir == str(tmp_path.parent / "runs")
    assert found.python == str(tmp_path / "venv/bin/python")
    # sbatch refuses the line ends of DOS
    assert found.accelerate_config_text == "# mine\ndistributed_type: NO\n"
    assert found.deepspeed_config_text == ""
    bare = dataclasses.replace(spec, cluster=Cluster.SLURM, python="python3")
    assert gather_facts(bare, cwd=tmp_path, environ={}).python == "python3"  # of the nodes' PATH
    assert found.local_cpus == len(os.sched_getaffinity(0))


def test_a_json_of_the_users_must_exist_also_among_the_scripts_arguments(tmp_path: Path) -> None:
    (tmp_path / "here.json").write_bytes(b"\xff")  # what it holds decides nothing here

    def gather(*args: str, **more: Any) -> None:
        spec = JobSpec(**{"script": "t.py", "cluster": Cluster.SLURM, "args": args, **more})
        gather_facts(spec, cwd=tmp_path, environ={})

    for args, more, message in (
        ((), {"deepspeed_config": "ds.json"}, "the DeepSpeed configuration 'ds.json' does not ex"),
        (("--deepspeed", "ds.json"), {}, "JSON that does not exist: 'ds.json'"),
        (("--deepspeed_config=ds.json",), {}, "JSON that does not exist: 'ds.json'"),
    ):
        with pytest.raises(UsageError, match=message) as no:
            gather(*args, **more)
        assert no.value.hint == "did you mean 'here.json'?"
    gather("--deepspeed", "/tmp/ds-of-the-node.json")
    gather("--deepspeed", "ds.json", srun_args=("--container-image=x",))
    gather("--deepspeed", "here.json")
    gather("--deepspeed")


def test_the_working_directory_keeps_the_name_that_the_shell_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    monkeypatch.chdir(real)
    assert working_directory({"PWD": str(link)}) == link
    assert working_directory({"PWD": str(tmp_path)}) == real
    assert working_directory({"PWD": "relative"}) == real
    assert working_directory({}) == real
    real.rmdir()
    with pytest.raises(ClusterrunError, match="the working directory no longer exists"):
        working_directory({})
