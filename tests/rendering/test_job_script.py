"""The batch script in real bash: its run directory, attempts, end, and exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.errors import NodeExit
from tests.patience import finished, patience
from tests.rendering.job import BatchSite, end_of, make_site, mode, rendered

UNFIT, CANCELLED = int(NodeExit.NODE_UNFIT), int(NodeExit.CANCELLED)


@pytest.fixture
def site(tmp_path: Path) -> BatchSite:
    return make_site(tmp_path)


def test_by_hand_it_unpacks_a_private_run_directory_of_its_own(site: BatchSite) -> None:
    bundle = rendered(site.plan(nodes=2, gpus_per_node=4, setup=("true",), env={"A": "b\nc"}))
    done = site.run(bundle)
    run_dir = site.runs / "job" / "4711"
    assert (done.returncode, done.stderr) == (0, "")
    assert {name: (run_dir / name).read_text() for name in bundle.files} == bundle.files
    assert json.loads((run_dir / "job.json").read_text())["job_id"] == "4711"
    assert (site.runs / "by-job" / "4711").resolve() == run_dir
    assert [mode(path) for path in (run_dir, run_dir / "attempts")] == [0o700, 0o700]
    assert {mode(path) for path in run_dir.glob("*.*") if path.name != "end.json"} == {0o600}
    again = site.run(bundle)  # another submission
    assert again.returncode == 1
    assert "cannot make the run directory" in again.stderr
    assert site.run(bundle, SLURM_RESTART_COUNT="1").returncode == 0  # a requeued job
    assert sorted(path.name for path in (run_dir / "attempts").iterdir()) == ["1", "2"]
    assert [path.name for path in (site.runs / "job").iterdir()] == ["4711"]


def test_with_a_run_directory_nothing_is_unpacked_or_registered(site: BatchSite) -> None:
    bundle = rendered(site.plan(nodes=2))
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, run_dir.name).returncode == 0  # relative, and found by every node
    assert site.got("python.agent.1.args")[-4:-2] == [os.fsencode(run_dir), b"1"]
    assert not site.runs.exists()
    assert not (run_dir / "job.json").exists()
    done = site.run(bundle, str(site.workdir))
    assert done.returncode == 1
    assert f": {site.workdir} is not a run directory: it has no node.sh\n" in done.stderr


def test_every_node_runs_the_agent_in_the_working_directory(site: BatchSite) -> None:
    bundle = rendered(site.plan(nodes=2))
    run_dir = site.run_dir(bundle)
    site.run(bundle, str(run_dir))
    for node in (0, 1):
        *words, port = site.got(f"python.agent.{node}.args")
        assert words[:-1] == [b"-m", b"clusterrun.node", b"agent", os.fsencode(run_dir), b"1"]
        assert (words[-1], port.isdigit()) == (os.fsencode(socket.gethostname()), True)
        assert (site.stubs / f"python.agent.{node}.cwd").read_text() == str(site.workdir)
        # srun --input=none leaves a pipe there, on which a reader would wait
        assert (site.stubs / f"python.agent.{node}.stdin").read_text() == "/dev/null\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("(exit 7)", "setup line 2 failed with status 7: (exit 7)"),
        ("no-such-command x", "setup line 2 failed with status 127: no-such-command x"),
        ("echo 'unclosed", "setup line 2 failed with status 2: echo 'unclosed"),
        ("exit 0", "a setup line exited the shell\n"),
    ],
)
def test_a_failing_setup_line_ends_the_job_and_is_named(
    site: BatchSite, line: str, said: str
) -> None:
    bundle = rendered(site.plan(setup=("true", line, "touch canary")))
    run_dir = site.run_dir(bundle)
    done = site.run(bundle, str(run_dir), SLURMD_NODENAME="n7")
    assert done.returncode == UNFIT
    assert f"clusterrun: n7: {said}" in done.stderr
    assert ("source /etc/profile" in done.stderr) is ("127" in said)
    assert (end_of(run_dir)["state"], end_of(run_dir)["exit_code"]) == ("FAILED", UNFIT)
    assert site.canaries() == []
    assert not (site.stubs / "python.agent.0.args").exists()


def test_an_unfit_node_leaves_its_status_even_where_srun_says_less(site: BatchSite) -> None:
    bundle = rendered(site.plan(setup=("[[ -z ${SLURM_NODEID:-} ]]",), nodes=2))
    run_dir = site.run_dir(bundle)
    site.run(bundle, str(run_dir))
    assert (run_dir / "attempts" / "1" / "status").read_text() == f"{UNFIT}\n"
    assert end_of(run_dir)["exit_code"] == UNFIT


def test_setup_lines_and_the_scripts_own_variables_do_not_meet(site: BatchSite) -> None:
    setup = (
        "attempt=9 run_dir=/tmp state=COMPLETED status=0 python=x",
        "trap 'exit 0' EXIT",
        "fail() { :; }",
    )
    bundle = rendered(site.plan(setup=setup))
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, str(run_dir), STUB_PYTHON_STATUS="4").returncode == 4
    assert site.got("python.agent.0.args")[-4:-2] == [os.fsencode(run_dir), b"1"]
    assert (end_of(run_dir)["state"], end_of(run_dir)["exit_code"]) == ("FAILED", 4)


def test_setup_lines_are_bash_and_reach_the_agent(site: BatchSite) -> None:
    setup = ("cd /", "export FROM_SETUP='a b'", "shopt -s nullglob\nset -eu", 'PATH="$PATH:/x"')
    bundle = rendered(site.plan(setup=setup, pass_env=("MISSING",)))
    assert site.run(bundle, str(site.run_dir(bundle))).returncode == 0
    found = site.env_of("python.agent.0.env")
    assert found[b"FROM_SETUP"] == b"a b"
    assert found[b"PATH"].endswith(b":/x")
    assert (site.stubs / "python.agent.0.cwd").read_text() == str(site.workdir)


def test_a_missing_working_directory_or_interpreter_is_named(site: BatchSite) -> None:
    bundle = rendered(site.plan(python="/no/python"))
    run_dir = site.run_dir(bundle)
    done = site.run(bundle, str(run_dir))
    assert (done.returncode, "there is no /no/python here; set" in done.stderr) == (UNFIT, True)
    site.workdir.rmdir()
    done = site.run(bundle, str(run_dir))
    assert (done.returncode, "cannot enter the working directory" in done.stderr) == (UNFIT, True)


def test_a_secret_travels_by_name_and_a_missing_one_is_pointed_out(site: BatchSite) -> None:
    bundle = rendered(site.plan(pass_env=("HF_TOKEN", "WANDB_API_KEY")))
    run_dir = site.run_dir(bundle)
    done = site.run(bundle, str(run_dir), HF_TOKEN="s3cr3t it's")
    assert site.env_of("python.agent.0.env")[b"HF_TOKEN"] == b"s3cr3t it's"
    assert "WANDB_API_KEY is not set in the environment of the job" in done.stderr
    written = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert b"s3cr3t" not in written + (done.stdout + done.stderr).encode()


def test_the_signals_of_users_do_not_kill_the_launcher_on_its_way(site: BatchSite) -> None:
    plan = site.plan(env={"A": "b"})
    (site.stubs / "python").write_text("#!/bin/bash\ngrep SigIgn /proc/$$/status\n")
    bundle = rendered(plan)
    ignored = int(site.run(bundle, str(site.run_dir(bundle))).stdout.split()[1], 16)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        assert ignored & 1 << (number - 1)
    assert not ignored & 1 << (signal.SIGTERM - 1)


@pytest.mark.parametrize("taken", [False, True])
def test_a_node_whose_python_lacks_clusterrun_says_so_and_leaves_the_status(
    tmp_path: Path, taken: bool
) -> None:
    site = make_site(tmp_path)
    python = site.stubs / "python-of-the-node"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    bundle = rendered(site.plan(python=str(python)))
    for name, text in bundle.files.items():
        (tmp_path / name).write_text(text)
    status = tmp_path / "attempts/1/status"
    status.parent.mkdir(parents=True)
    if taken:
        status.write_text("3\n")
    environ = {**os.environ, "SLURMD_NODENAME": "n7"}
    done = finished(["bash", tmp_path / "node.sh", tmp_path, "1"], env=environ)
    assert (done.returncode, status.read_text()) == (UNFIT, "3\n" if taken else f"{UNFIT}\n")
    assert done.stderr == (
        f"clusterrun: n7: {sys.executable} cannot run clusterrun: ModuleNotFoundError: No module "
        "named 'clusterrun'; install clusterrun[train] there, or name another interpreter with "
        "--python\n"
    )


def test_a_job_that_is_none_or_heterogeneous_is_refused(site: BatchSite) -> None:
    for code, said, variables in (
        (1, "sbatch job.sbatch", {"SLURM_JOB_ID": ""}),
        (2, "heterogeneous", {"SLURM_HET_SIZE": "2"}),
    ):
        done = site.run(rendered(site.plan()), **variables)
        assert (done.returncode, said in done.stderr) == (code, True)
        assert not list(site.runs.glob("*/*/attempts/*"))


def test_no_script_starts_a_step_or_needs_a_client_of_slurm_or_a_home(site: BatchSite) -> None:
    """The conductor, outside of any container, asks Slurm."""
    files = rendered(site.plan(nodes=2, gpus_per_node=4)).files
    lines = "".join(files[name] for name in ("env.sh", "node.sh", "job.sbatch")).splitlines()
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    assert re.findall(r"\b(?:scontrol|squeue|sacct|sinfo|scancel)\b(?! *\()", code) == []
    assert re.findall(r"\$\{?HOME\b|(?<![\w.])~/", code) == []
    starts = [name for name, text in files.items() if re.search(r"^\s*srun\b", text, re.MULTILINE)]
    assert starts == []


def test_the_agent_is_the_task_itself(site: BatchSite) -> None:
    """A cgroup's processes end with the task's own: no shell may stand in its place."""
    python = site.stubs / "python"
    python.write_text(f'#!/bin/bash\necho "$$" > "{site.root}/pid"\n')
    run_dir = site.run_dir(rendered(site.plan(nodes=1)))
    argv = ["bash", str(run_dir / "node.sh"), str(run_dir), "1"]
    task = subprocess.Popen(argv, env=site.environment(), stdin=subprocess.DEVNULL)
    assert task.wait(timeout=30 * patience()) == 0
    assert (site.root / "pid").read_text() == f"{task.pid}\n"


def test_every_leftover_of_a_launcher_around_the_job_is_unset_on_the_node(site: BatchSite) -> None:
    """A job's own environment may hold them where Slurm itself or the site put them there."""
    leftovers = {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("PET_X", "TORCHELASTIC_X", "PMI_X", "PMIX_X", "OMPI_COMM_X", "MV2_COMM_X"),
        *("SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND"),  # of another srun
        *("ACCELERATE_X", "FSDP_X", "PARALLELISM_CONFIG_X", "MEGATRON_LM_X"),
    }
    bundle = rendered(site.plan(nodes=1, cpus_per_task=4))
    kept = {"KEPT": "7", "SLURM_CONF": "/etc/slurm.conf"}  # and what tells a node who it is
    done = site.run(bundle, str(site.run_dir(bundle)), **dict.fromkeys(leftovers, "7"), **kept)
    assert done.returncode == 0, done.stderr
    seen = {name.decode() for name in site.env_of("python.agent.0.env")}
    assert seen & leftovers == set()
    assert {*kept, "SLURM_NODEID", "SLURM_JOB_ID"} <= seen
    assert b"--cpus-per-task=4" in site.got("srun.args")
