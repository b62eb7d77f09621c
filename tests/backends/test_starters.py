"""What starts a shell on the hosts of an allocation, and the call back of one without input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.backends.hosts import starters
from clusterrun.config.hosts import HostList
from clusterrun.config.spec import Cluster, Device, JobSpec, Starter
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.own_modules import RUN_MODULE
from tests.launch.samples import slurm_facts
from tests.patience import patience

HOSTS = ("n1", "n2", "n3")
# As documented: it passes no input on, and the output goes to the output of the batch job.
PBSDSH = """\
#!/bin/bash
[[ $1 == -h && $2 == localhost && $3 == -- ]] || exit 1
shift 3; "$@" < /dev/null > /dev/null 2>&1
"""


def plan_with(starter: Starter) -> Plan:
    hosts = HostList(hosts=HOSTS, slots=(0, 0, 0), source="$SLURM_JOB_NODELIST")
    facts = slurm_facts(cluster=Cluster.ALLOCATION, hosts=hosts, starter=starter)
    return make_plan(JobSpec(script="train.py", device=Device.CPU), facts)


def command(starter: Starter, tmp_path: Path) -> str:
    paths = RunPaths(root=tmp_path)
    return " ".join(starters.host_command(plan_with(starter), paths, 2, is_here=False))


def test_srun_gets_all_that_the_allocation_has_on_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "8(x2),4")
    assert command(Starter.SRUN, tmp_path) == (
        "srun --overlap --nodes=1 --ntasks=1 --nodelist=n3 --mem=0 --unbuffered --quiet "
        "--cpus-per-task=4 --gres=none bash -s"
    )


def test_blaunch_and_pbsdsh_get_the_host(tmp_path: Path) -> None:
    assert command(Starter.BLAUNCH, tmp_path) == "blaunch n3 bash -s"
    assert command(Starter.PBSDSH, tmp_path).endswith(f"{tmp_path} n3 pbsdsh -h n3 --")


def test_flux_gets_the_rank_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starters, "_flux_hosts", lambda: ("n9", "n1", "n3"))
    assert command(Starter.FLUX, tmp_path) == "flux exec --rank=2 --dir=/ bash -s"


def test_srun_sees_its_job_and_not_the_sizes_of_its_steps() -> None:
    given = {"SLURM_JOB_ID": "1", "SLURM_GPUS": "4", "SLURM_NTASKS": "4", "RANK": "0", "HOME": "/"}
    kept = starters.starters_environ(plan_with(Starter.SRUN), given)
    assert kept == {"SLURM_JOB_ID": "1", "HOME": "/"}


def call_back(tmp_path: Path, script: bytes, pbsdsh: str = PBSDSH) -> subprocess.CompletedProcess:
    program = tmp_path / "pbsdsh"
    program.write_text(pbsdsh)
    program.chmod(0o755)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    module = "clusterrun.backends.hosts.call_back"
    relay = [sys.executable, "-c", RUN_MODULE, module, str(run_dir), "localhost"]
    return subprocess.run(
        [*relay, str(program), "-h", "localhost", "--"],
        input=script,
        capture_output=True,
        timeout=60 * patience(),
        check=False,
    )


def test_a_shell_without_input_connects_back(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    done = call_back(tmp_path, b"ls -A run* >&2; exec cat\n" + data)
    assert done.stdout == data
    assert b".call-" not in done.stderr
    assert not list((tmp_path / "run").iterdir())


def test_nobody_connects_back_without_the_secret(tmp_path: Path) -> None:
    forged = """sed -i "s/' [0-9a-f]* /' 0 /" $2; """
    done = call_back(tmp_path, b"echo in >&2\n", PBSDSH.replace('"$@"', f'{forged}"$@"'))
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"in\n" not in done.stderr


def test_a_starter_that_fails_is_quoted(tmp_path: Path) -> None:
    fails = "#!/bin/bash\necho 'pbsdsh: not executing under PBS' >&2; exit 1\n"
    done = call_back(tmp_path, b"", fails)
    assert (done.returncode, done.stderr) == (1, b"pbsdsh: not executing under PBS\n")
