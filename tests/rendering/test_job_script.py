"""The batch script in real bash: its run directory, attempts, end, and exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from clusterrun.errors import NodeExit
from tests.rendering.job import Site, end_of, make_site, mode, rendered

UNFIT, CANCELLED = int(NodeExit.NODE_UNFIT), int(NodeExit.CANCELLED)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_site(tmp_path)


def test_by_hand_it_unpacks_a_run_directory_of_its_own(site: Site) -> None:
    bundle = rendered(site.plan(nodes=2, gpus_per_node=4, setup=("true",), env={"A": "b\nc"}))
    done = site.run(bundle)
    run_dir = site.runs / "job" / "4711"
    assert (done.returncode, done.stderr) == (0, "")
    assert {name: (run_dir / name).read_text() for name in bundle.files} == bundle.files
    assert site.got("python.register.batch.args") == [
        *(b"-m", b"clusterrun.backends", b"register", os.fsencode(run_dir))
    ]
    assert (site.stubs / "python.register.batch.cwd").read_text() == str(site.workdir)


def test_by_hand_the_run_is_private(site: Site) -> None:
    site.run(rendered(site.plan(env={"A": "b"})))
    run_dir = site.runs / "job" / "4711"
    assert [mode(path) for path in (run_dir, run_dir / "attempts")] == [0o700, 0o700]
    assert {mode(path) for path in run_dir.glob("*.*") if path.name != "end.json"} == {0o600}


def test_two_submissions_by_hand_do_not_share_a_directory(site: Site) -> None:
    bundle = rendered(site.plan())
    assert site.run(bundle).returncode == 0
    again = site.run(bundle)
    assert again.returncode == 1
    assert "cannot be made" in again.stderr


def test_by_hand_a_requeued_job_is_the_next_attempt_of_its_run(site: Site) -> None:
    bundle = rendered(site.plan())
    assert site.run(bundle).returncode == 0
    assert site.run(bundle, SLURM_RESTART_COUNT="1").returncode == 0
    attempts = site.runs / "job" / "4711" / "attempts"
    assert sorted(path.name for path in attempts.iterdir()) == ["1", "2"]
    assert [path.name for path in (site.runs / "job").iterdir()] == ["4711"]


def test_with_a_run_directory_nothing_is_unpacked_or_registered(site: Site) -> None:
    bundle = rendered(site.plan(nodes=2))
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, str(run_dir)).returncode == 0
    assert not site.runs.exists()
    assert not (site.stubs / "python.register.batch.args").exists()


def test_the_status_that_the_agents_agreed_on_beats_that_of_srun(site: Site) -> None:
    bundle = rendered(site.plan(nodes=2))
    run_dir = site.run_dir(bundle)
    (run_dir / "env.sh").write_text('echo 3 > "$clusterrun_dir/attempts/1/status"\n')
    done = site.run(bundle, str(run_dir), STUB_SRUN_STATUS="137")
    assert done.returncode == 3
    assert end_of(run_dir)["exit_code"] == 3


def test_a_relative_run_directory_is_found_by_every_node(site: Site) -> None:
    bundle = rendered(site.plan())
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, run_dir.name).returncode == 0
    assert site.got("python.agent.0.args")[-2:] == [os.fsencode(run_dir), b"1"]


def test_what_is_no_run_directory_is_refused(site: Site) -> None:
    done = site.run(rendered(site.plan()), str(site.workdir))
    assert done.returncode == 1
    assert done.stderr == f"clusterrun: {site.workdir} is no run directory: it has no node.sh\n"


def test_outside_of_a_job_it_says_how_to_submit(site: Site) -> None:
    done = site.run(rendered(site.plan()), SLURM_JOB_ID="")
    assert (done.returncode, site.runs.exists()) == (1, False)
    assert "sbatch job.sbatch" in done.stderr


def test_every_node_runs_the_agent_in_the_working_directory(site: Site) -> None:
    bundle = rendered(site.plan(nodes=2))
    run_dir = site.run_dir(bundle)
    site.run(bundle, str(run_dir))
    for node in (0, 1):
        assert site.got(f"python.agent.{node}.args") == [
            *(b"-m", b"clusterrun.node", b"agent", os.fsencode(run_dir), b"1")
        ]
        assert (site.stubs / f"python.agent.{node}.cwd").read_text() == str(site.workdir)
        # srun --input=none leaves a pipe there, on which a reader would wait
        assert (site.stubs / f"python.agent.{node}.stdin").read_text() == "/dev/null\n"


def test_p7_p15_srun_gets_one_task_a_node_and_its_cpus(site: Site) -> None:
    bundle = rendered(site.plan(nodes=2, gpus_per_node=4, cpus_per_task=6))
    run_dir = site.run_dir(bundle)
    site.run(bundle, str(run_dir))
    assert [arg.decode() for arg in site.got("srun.args")] == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--export=ALL"),
        *("--no-kill", "--wait=0", "--unbuffered", "--input=none"),
        *("bash", f"{run_dir}/node.sh", str(run_dir), "1"),
    ]


@pytest.mark.parametrize(
    ("given", "cpus"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "16(x2)"}, b"--cpus-per-task=16"),
        ({"SLURM_JOB_CPUS_PER_NODE": "64,8(x3),32"}, b"--cpus-per-task=8"),
        ({"SLURM_JOB_CPUS_PER_NODE": "64", "SLURM_CPUS_PER_TASK": "4"}, b"--cpus-per-task=4"),
    ],
)
def test_p7_cpus_that_the_site_chose_are_read_from_the_job(
    site: Site, given: dict[str, str], cpus: bytes
) -> None:
    bundle = rendered(site.plan(gpus_per_node=4))
    site.run(bundle, str(site.run_dir(bundle)), **given)
    assert [arg for arg in site.got("srun.args") if arg.startswith(b"--cpus")] == [cpus]


def test_p28_the_status_of_srun_is_the_status_of_the_job(site: Site) -> None:
    bundle = rendered(site.plan())
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, str(run_dir), STUB_SRUN_STATUS="3").returncode == 3
    end = end_of(run_dir)
    assert isinstance(end.pop("ended_at"), int)
    assert end == {"schema": "clusterrun.end/1", "state": "FAILED", "exit_code": 3}


@pytest.mark.parametrize(
    ("status", "state"), [(0, "COMPLETED"), (1, "FAILED"), (137, "FAILED"), (124, "FAILED")]
)
def test_the_end_says_how_it_ended(site: Site, status: int, state: str) -> None:
    bundle = rendered(site.plan())
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, str(run_dir), STUB_SRUN_STATUS=str(status)).returncode == status
    assert (end_of(run_dir)["state"], end_of(run_dir)["exit_code"]) == (state, status)
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("srun", "agreed", "status"),
    [("143", "3", 3), ("143", None, 143), ("1", "nonsense", 1), ("0", "3", 0), ("1", "0", 1)],
)
def test_the_status_that_the_agents_agreed_on_explains_sruns(
    site: Site, srun: str, agreed: str | None, status: int
) -> None:
    plan = site.plan()
    if agreed is not None:
        agent = f'#!/bin/bash\necho {agreed} > "${{@: -2:1}}/attempts/${{@: -1}}/status"\n'
        (site.stubs / "python").write_text(agent)
    bundle = rendered(plan)
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, str(run_dir), STUB_SRUN_STATUS=srun).returncode == status
    assert end_of(run_dir)["exit_code"] == status


def test_p21_p26_every_start_is_an_attempt_of_its_own(site: Site) -> None:
    bundle = rendered(site.plan())
    run_dir = site.run_dir(bundle)
    site.run(bundle, str(run_dir), STUB_SRUN_STATUS="1")
    assert site.run(bundle, str(run_dir)).returncode == 0
    assert sorted(path.name for path in (run_dir / "attempts").iterdir()) == ["1", "2"]
    assert site.got("python.agent.0.args")[-1] == b"2"
    assert end_of(run_dir)["state"] == "COMPLETED"


def test_a_running_attempt_has_no_end_of_an_earlier_one(site: Site) -> None:
    bundle = rendered(site.plan())
    run_dir = site.run_dir(bundle)
    site.run(bundle, str(run_dir), STUB_SRUN_STATUS="1")
    process = site.start(bundle, str(run_dir), STUB_SRUN_SLEEP="20")
    wait_for(site.stubs / "srun.up")
    assert not (run_dir / "end.json").exists()
    end(process)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> None:
    """End a batch script and its sleeping srun, as Slurm does in the end."""
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # some end by themselves meanwhile
            child.kill()
    process.communicate(timeout=30)


@pytest.mark.parametrize(
    ("asked", "variables", "state"),
    [
        ({}, {}, "CANCELLED"),
        ({"time_minutes": 60}, {}, "CANCELLED"),
        ({}, {"SLURM_JOB_END_TIME": "4000000000"}, "CANCELLED"),
        ({}, {"SLURM_JOB_END_TIME": "1000000000"}, "TIMEOUT"),
    ],
)
def test_when_slurm_ends_the_job_its_end_is_written_at_once(
    site: Site, asked: dict[str, int], variables: dict[str, str], state: str
) -> None:
    bundle = rendered(site.plan(**asked))
    run_dir = site.run_dir(bundle)
    process = site.start(bundle, str(run_dir), STUB_SRUN_SLEEP="60", **variables)
    wait_for(site.stubs / "srun.up")
    process.send_signal(signal.SIGTERM)
    wait_for(run_dir / "end.json")
    assert (run_dir / "attempts" / "1" / "request").read_text() == "end\n"
    assert process.poll() is None  # it waits for srun: agents may still be saving
    end(process)
    assert process.returncode == CANCELLED
    assert (end_of(run_dir)["state"], end_of(run_dir)["exit_code"]) == (state, CANCELLED)


def test_p27_a_warning_signal_does_not_end_the_batch_shell(site: Site) -> None:
    bundle = rendered(site.plan(signal="B:USR2@300"))
    run_dir = site.run_dir(bundle)
    process = site.start(bundle, str(run_dir), STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS="5")
    wait_for(site.stubs / "srun.up")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2):
        process.send_signal(number)
        time.sleep(0.05)
    process.communicate(timeout=30)
    assert process.returncode == 5
    assert end_of(run_dir)["state"] == "FAILED"


@pytest.mark.parametrize(
    ("line", "status"),
    [("false", 1), ("(exit 7)", 7), ("no-such-command x", 127), ("echo 'unclosed", 2)],
)
def test_a_failing_setup_line_ends_the_job_and_is_named(site: Site, line: str, status: int) -> None:
    bundle = rendered(site.plan(setup=("true", line, "touch canary")))
    run_dir = site.run_dir(bundle)
    done = site.run(bundle, str(run_dir), SLURMD_NODENAME="n7")
    assert done.returncode == UNFIT
    assert f"clusterrun: n7: setup line 2 ended with status {status}: {line}\n" in done.stderr
    assert (end_of(run_dir)["state"], site.canaries()) == ("FAILED", [])
    assert not (site.stubs / "python.agent.0.args").exists()


@pytest.mark.parametrize("line", ["exit 0", "exit 5"])
def test_a_setup_line_that_exits_is_no_success(site: Site, line: str) -> None:
    bundle = rendered(site.plan(setup=(line,)))
    run_dir = site.run_dir(bundle)
    done = site.run(bundle, str(run_dir), SLURMD_NODENAME="n7")
    assert (done.returncode, done.stderr) == (
        UNFIT,
        "clusterrun: n7: a setup line ended the shell\n",
    )
    assert (end_of(run_dir)["state"], end_of(run_dir)["exit_code"]) == ("FAILED", UNFIT)
    assert not (site.stubs / "python.agent.0.args").exists()


def test_an_unfit_node_leaves_its_status_even_where_srun_says_less(site: Site) -> None:
    bundle = rendered(site.plan(setup=("false",), nodes=2))
    run_dir = site.run_dir(bundle)
    site.run(bundle, str(run_dir))
    assert (run_dir / "attempts" / "1" / "status").read_text() == f"{UNFIT}\n"


def test_setup_lines_and_the_scripts_own_variables_do_not_meet(site: Site) -> None:
    setup = (
        "attempt=9 run_dir=/tmp state=COMPLETED status=0 python=x",
        "trap 'exit 0' EXIT",
        "fail() { :; }",
    )
    bundle = rendered(site.plan(setup=setup))
    run_dir = site.run_dir(bundle)
    assert site.run(bundle, str(run_dir), STUB_PYTHON_STATUS="4").returncode == 4
    assert site.got("python.agent.0.args")[-2:] == [os.fsencode(run_dir), b"1"]
    assert (end_of(run_dir)["state"], end_of(run_dir)["exit_code"]) == ("FAILED", 4)


def test_setup_lines_are_bash_and_reach_the_agent(site: Site) -> None:
    setup = ("cd /", "export FROM_SETUP='a b'", "shopt -s nullglob\nset -eu", 'PATH="$PATH:/x"')
    bundle = rendered(site.plan(setup=setup, pass_env=("MISSING",)))
    assert site.run(bundle, str(site.run_dir(bundle))).returncode == 0
    found = site.env_of("python.agent.0.env")
    assert found[b"FROM_SETUP"] == b"a b"
    assert found[b"PATH"].endswith(b":/x")
    assert (site.stubs / "python.agent.0.cwd").read_text() == str(site.workdir)


def test_what_a_setup_line_switches_on_does_not_change_the_script(site: Site) -> None:
    bundle = rendered(site.plan(setup=("set -euo pipefail",)))
    run_dir = site.run_dir(bundle)
    site.decide("stop CANCELLED")
    assert site.run(bundle, str(run_dir), STUB_SRUN_STATUS="124").returncode == CANCELLED
    assert end_of(run_dir)["state"] == "CANCELLED"


def test_a_missing_working_directory_or_interpreter_is_named(site: Site) -> None:
    bundle = rendered(site.plan(python="/no/python"))
    run_dir = site.run_dir(bundle)
    done = site.run(bundle, str(run_dir))
    assert (done.returncode, "there is no /no/python here" in done.stderr) == (UNFIT, True)
    site.workdir.rmdir()
    done = site.run(bundle, str(run_dir))
    assert (done.returncode, "working directory cannot be entered" in done.stderr) == (UNFIT, True)


def test_a_run_that_cannot_be_registered_runs_all_the_same(site: Site) -> None:
    done = site.run(rendered(site.plan()), STUB_REGISTER_STATUS="1")
    assert done.returncode == 0
    assert "could not be registered" in done.stderr


def test_a_run_directory_that_cannot_be_written_to_is_no_endless_loop(site: Site) -> None:
    bundle = rendered(site.plan())
    run_dir = site.run_dir(bundle)
    (run_dir / "attempts").mkdir()
    (run_dir / "attempts" / "1").write_text("what is no directory, as a failed mkdir leaves none")
    done = site.run(bundle, str(run_dir))
    assert (done.returncode, "cannot be written to" in done.stderr) == (1, True)


def test_p14_leftovers_of_other_launchers_are_scrubbed(site: Site) -> None:
    leaked = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "PET_STANDALONE"), "9"),
        **dict.fromkeys(("TORCHELASTIC_RUN_ID", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"), "9"),
        **dict.fromkeys(("ACCELERATE_USE_FSDP", "FSDP_VERSION", "SRUN_CPUS_PER_TASK"), "9"),
        **dict.fromkeys(("SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_MEM_BIND"), "9"),
    }
    bundle = rendered(site.plan(nodes=2))
    site.run(bundle, str(site.run_dir(bundle)), SLURM_CONF="/etc/slurm.conf", **leaked)
    found = site.env_of("python.agent.1.env")
    assert sorted(name for name in leaked if name.encode() in found) == []
    # what tells a node who it is stays
    kept = {b"SLURM_NODEID": b"1", b"SLURM_JOB_ID": b"4711", b"SLURM_CONF": b"/etc/slurm.conf"}
    assert kept.items() <= found.items()


def test_p18_a_secret_travels_by_name_and_a_missing_one_is_pointed_out(site: Site) -> None:
    bundle = rendered(site.plan(pass_env=("HF_TOKEN", "WANDB_API_KEY")))
    run_dir = site.run_dir(bundle)
    done = site.run(bundle, str(run_dir), HF_TOKEN="s3cr3t it's")
    assert site.env_of("python.agent.0.env")[b"HF_TOKEN"] == b"s3cr3t it's"
    assert "WANDB_API_KEY is not set in the environment of the job" in done.stderr
    written = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert b"s3cr3t" not in written + (done.stdout + done.stderr).encode()


def test_the_signals_of_users_do_not_kill_the_launcher_on_its_way(site: Site) -> None:
    plan = site.plan(env={"A": "b"})
    (site.stubs / "python").write_text("#!/bin/bash\ngrep SigIgn /proc/$$/status\n")
    bundle = rendered(plan)
    done = site.run(bundle, str(site.run_dir(bundle)))
    ignored = int(done.stdout.split()[1], 16)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        assert ignored & 1 << (number - 1)
    assert not ignored & 1 << (signal.SIGTERM - 1)
