"""Pitfalls that launchers before this one fell into, each held by the test that names it.

Others stand beside what they test.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import clusterrun
from clusterrun import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.accelerate_argv import NodeLaunch, launch_argv
from tests.launch.samples import on_slurm
from tests.patience import patience
from tests.rendering.job import BatchSite, make_site, rendered


@pytest.fixture(name="site")
def _site(tmp_path: Path) -> BatchSite:
    return make_site(tmp_path)


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project on a login node whose sbatch writes down what it was given."""
    programs, project = tmp_path / "bin", tmp_path / "project"
    for directory in (programs, project):
        directory.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    sbatch = f"""
        env -0 > "{tmp_path}/sbatch.env"
        printf '%s\\0' "$@" > "{tmp_path}/sbatch.args"
        for option; do [[ $option == --output=* ]] && output=${{option#*=}}; done
        [[ -d ${{output%/*}} ]] || exit 1  # Slurm makes no directories
        echo 4711"""
    for name, text in {"sbatch": sbatch, "srun": "exit 0"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for name in ("STATE", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("CLUSTERRUN_SITE_CONFIG", "/dev/null")
    monkeypatch.delenv("PWD", raising=False)
    monkeypatch.chdir(project)
    return project


def submitted(**asked: object) -> clusterrun.JobRecord:
    fields = {"script": "train.py", "cluster": "slurm", "nodes": 2, **asked}
    return clusterrun.submit(JobSpec(**fields)).record  # type: ignore[arg-type]  # values of many types


def sbatch_was_given(project: Path, what: str) -> list[str]:
    return (project.parent / f"sbatch.{what}").read_text().split("\0")[:-1]


def test_nodes_are_told_who_leads_and_do_not_compare_host_names() -> None:
    plan = on_slurm(nodes=2, gpus_per_node=4)

    def argv(rank: int) -> tuple[str, ...]:
        where = NodeLaunch("a.yaml", "", rank, "10.0.0.1", 20001, "bf16")
        return launch_argv(plan, where, python="python")

    first, second = argv(0), argv(1)
    differing = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert [(first[i - 1], first[i], second[i]) for i in differing] == [
        ("--machine_rank", "0", "1")
    ]
    assert second[second.index("--rdzv_backend") + 1] == "static"
    assert second[second.index("--main_process_ip") + 1] == "10.0.0.1"


def test_a_leftover_of_another_srun_does_not_contradict_our_cpus(site: BatchSite) -> None:
    bundle = rendered(site.plan(nodes=1, cpus_per_task=4))
    done = site.run(bundle, str(site.run_dir(bundle)), SRUN_CPUS_PER_TASK="1", SLURM_CPU_BIND="x")
    assert done.returncode == 0, done.stderr
    seen = site.env_of("python.agent.0.env")
    assert b"SRUN_CPUS_PER_TASK" not in seen
    assert b"SLURM_CPU_BIND" not in seen
    assert b"--cpus-per-task=4" in site.got("srun.args")


def test_what_leaks_from_a_shell_inside_a_job_is_scrubbed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaked = {
        *("SLURM_JOB_ID", "SLURM_CPU_BIND", "SLURM_MEM_PER_NODE", "SLURM_NTASKS"),
        *("SBATCH_MEM_PER_NODE", "SBATCH_EXPORT", "SRUN_CPUS_PER_TASK", "SALLOC_PARTITION"),
        *("SLURMD_NODENAME", "PMI_RANK", "PMIX_RANK"),
        *("PET_RDZV_ENDPOINT", "PET_STANDALONE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"),
        *("MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("ROLE_RANK", "NODE_RANK", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    }
    own = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "HF_HOME"}
    for name in leaked | own:
        monkeypatch.setenv(name, "0")
    submitted()
    names = {entry.partition("=")[0] for entry in sbatch_was_given(project, "env")}
    assert not names & leaked
    assert {"PATH", *own} <= names


def test_the_value_of_a_secret_is_in_no_file_and_reaches_the_job(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-value")
    record = submitted(pass_env=("MY_API_KEY",))
    assert "MY_API_KEY=s3cr3t-value" in sbatch_was_given(project, "env")
    (project.parent / "sbatch.env").unlink()
    files = [path for path in project.parent.rglob("*") if path.is_file()]
    assert record.paths.record in files
    assert [path for path in files if b"s3cr3t-value" in path.read_bytes()] == []


def test_the_directory_of_the_output_is_there_before_sbatch_runs(project: Path) -> None:
    submitted(name="50% faster")
    (output,) = (a for a in sbatch_was_given(project, "args") if a.startswith("--output="))
    directory = Path(output.partition("=")[2]).parent
    assert directory.is_dir()
    assert "%" not in str(directory)  # no pattern: Slurm would not make what it stands for


def test_the_directories_of_a_run_are_the_users_alone(project: Path) -> None:
    record = submitted()
    places = [record.paths.root, *record.paths.root.rglob("*")]
    open_to_others = [path for path in places if path.lstat().st_mode & 0o077]
    assert [path for path in open_to_others if not path.is_symlink()] == []


def test_nodes_need_no_client_of_slurm_and_no_home(site: BatchSite) -> None:
    files = rendered(site.plan(nodes=2, gpus_per_node=4)).files
    clients = r"\b(?:scontrol|squeue|sacct|sinfo|scancel)\b(?! *\()"
    nodes = _code(files["env.sh"] + files["node.sh"])
    assert re.findall(clients, nodes) == []
    batch = _code(files["job.sbatch"])  # the conductor, outside of any container, asks Slurm
    assert re.findall(clients, batch) == []
    scripts = nodes + batch
    assert re.findall(r"\$\{?HOME\b|(?<![\w.])~/", _code(scripts)) == []


def _code(scripts: str) -> str:
    return "\n".join(line for line in scripts.splitlines() if not line.lstrip().startswith("#"))


def test_an_array_is_refused_in_every_spelling() -> None:
    for option in ("--array=0-3", "-a0-3", "--arr=0-3", "--array"):
        with pytest.raises(UsageError, match="does not apply to a clusterrun job") as refused:
            on_slurm(sbatch_args=(option,))
        assert refused.value.hints == ("submit each job separately: one job is one run",)


def test_the_agent_is_the_task_itself(site: BatchSite) -> None:
    """A cgroup's processes end with the task's own: no shell may stand in its place."""
    python = site.stubs / "python"
    python.write_text(f'#!/bin/bash\necho "$$" > "{site.root}/pid"\n')
    run_dir = site.run_dir(rendered(site.plan(nodes=1)))
    argv = ["bash", str(run_dir / "node.sh"), str(run_dir), "1"]
    task = subprocess.Popen(argv, env=site.environment(), stdin=subprocess.DEVNULL)
    assert task.wait(timeout=30 * patience()) == 0
    assert (site.root / "pid").read_text() == f"{task.pid}\n"


def test_only_the_conductor_starts_a_step(site: BatchSite) -> None:
    files = rendered(site.plan(nodes=2)).files
    starts = [name for name, text in files.items() if re.search(r"^\s*srun\b", text, re.MULTILINE)]
    assert starts == []


def test_a_run_is_found_by_its_id_whatever_other_runs_are_called(project: Path) -> None:
    first = submitted(name="train-2")
    (project.parent / "bin" / "sbatch").write_text("#!/bin/bash\necho 2\n")
    second = submitted(name="train")
    assert (first.job_id, second.job_id) == ("4711", "2")
    assert str(clusterrun.find_job("2").run_dir) == second.run_dir
    assert str(clusterrun.find_job("4711").run_dir) == first.run_dir
    assert os.path.realpath(project / "runs" / "by-job" / "4711") == first.run_dir


def test_every_leftover_of_a_launcher_around_the_job_is_unset_on_the_node(site: BatchSite) -> None:
    """A job's own environment may hold them where Slurm itself or the site put them there."""
    leftovers = {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("PET_X", "TORCHELASTIC_X", "PMI_X", "PMIX_X", "OMPI_COMM_X", "MV2_COMM_X"),
        *("ACCELERATE_X", "FSDP_X", "PARALLELISM_CONFIG_X", "MEGATRON_LM_X"),
    }
    bundle = rendered(site.plan(nodes=1))
    kept = {"KEPT": "7", "SLURM_CONF": "/etc/slurm.conf"}  # and what tells a node who it is
    done = site.run(bundle, str(site.run_dir(bundle)), **dict.fromkeys(leftovers, "7"), **kept)
    assert done.returncode == 0, done.stderr
    seen = {name.decode() for name in site.env_of("python.agent.0.env")}
    assert seen & leftovers == set()
    assert {*kept, "SLURM_NODEID", "SLURM_JOB_ID"} <= seen
