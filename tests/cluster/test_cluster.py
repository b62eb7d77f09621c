"""The test cluster is a real Slurm: names, GPUs, accounting, faults and a clean end."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import processes
from tests.cluster.cluster import Cluster
from tests.cluster.commands import ClusterError, run
from tests.cluster.shape import Shape, default_state_dir, own_slot
from tests.patience import wait_for

pytestmark = pytest.mark.slurm

SPARE = 2
ALL_REDUCE = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['HEAD']}:29517",
        rank=int(os.environ["SLURM_PROCID"]),
        world_size=int(os.environ["SLURM_NTASKS"]),
    )
    value = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(value)
    print(os.environ["SLURMD_NODENAME"], int(value.item()))
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """Take down at the end what the tests brought up."""
    state_dir = default_state_dir(own_slot(SPARE))
    lent = Cluster(
        shape=Shape(state_dir=state_dir, slot=own_slot(SPARE), nodes=2, accounting=False)
    )
    yield lent
    lent.down()


@pytest.fixture
def spare(cluster: Cluster, small: Cluster) -> Cluster:
    """Have a small cluster up beside the shared one, to hurt."""
    small.up()
    return small


def _traces(shape: Shape) -> dict[str, object]:
    """Return everything that a cluster of this shape would leave on the machine."""
    links = run(["ip", "-o", "link"]).stdout.split()
    return {
        "processes": processes.marked(shape.bridge),
        "namespaces": sorted(Path("/run/netns").glob(f"{shape.bridge}-*")),
        "links": [
            word
            for word in links
            if word == f"{shape.bridge}:" or word.startswith(f"cr{shape.slot}n")
        ],
        "mounts": f"{shape.state_dir}/" in Path("/proc/self/mounts").read_text(),
        "names": f" {shape.bridge}-head\n" in Path("/etc/hosts").read_text(),
        "devices": shape.device_dir.exists(),
        "files": shape.state_dir.exists(),
    }


def _reaches_head(cluster: Cluster, node: str) -> bool:
    target = f"/dev/tcp/{cluster.shape.head_address}/{cluster.shape.ctld_port}"
    argv = ["timeout", "2", "bash", "-c", f"exec 3<>{target}"]
    return cluster.run_on(node, argv, check=False).returncode == 0


def _eventually(fact: Callable[[], bool], timeout_s: float = 20) -> None:
    wait_for(fact, timeout_s=timeout_s)


def test_two_nodes_have_host_names_of_their_own(cluster: Cluster) -> None:
    two = cluster.nodes[:2]
    done = cluster.run(["srun", "-w", ",".join(two), "hostname"])
    assert sorted(done.stdout.split()) == list(two)


def test_a_name_means_the_same_address_on_a_node_and_on_the_login_side(cluster: Cluster) -> None:
    one, other = cluster.nodes[:2]
    query = ["getent", "hosts", other]
    on_node, on_login = cluster.run_on(one, query).stdout, cluster.run(query).stdout
    assert on_node.split() == on_login.split() == [cluster.shape.address(other), other]


def test_a_job_sees_the_gpus_that_it_asked_for(cluster: Cluster) -> None:
    ask = ["srun", "-N2", "--gpus-per-node=4", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert cluster.run(ask).stdout.split() == ["0,1,2,3", "0,1,2,3"]


def test_two_jobs_on_one_node_get_different_gpus(cluster: Cluster, tmp_path: Path) -> None:
    where = ("-w", cluster.nodes[2], "--gpus-per-node=2", "-n1")
    first = cluster.sbatch(
        *where, "-o", str(tmp_path / "seen"), "--wrap=echo $CUDA_VISIBLE_DEVICES; sleep 60"
    )
    try:
        _eventually(lambda: (tmp_path / "seen").exists() and (tmp_path / "seen").read_text() != "")
        second = cluster.run(["srun", *where, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]).stdout
        gpus = f"{(tmp_path / 'seen').read_text().strip()},{second.strip()}".split(",")
        assert len(set(gpus)) == 4, gpus
    finally:
        cluster.run(["scancel", first])


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_sacct_knows_how_a_job_ended(cluster: Cluster, code: int, state: str) -> None:
    job_id = cluster.sbatch("-o", "/dev/null", f"--wrap=exit {code}")
    assert cluster.wait_job(job_id) == state
    argv = ["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "State,ExitCode"]
    # slurmctld tells slurmdbd in batches, so sacct learns of an end a little later.
    _eventually(lambda: cluster.run(argv).stdout.strip() == f"{state}|{code}:0")


@pytest.mark.torch
def test_gloo_all_reduce_crosses_nodes(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "all_reduce.py"
    script.write_text(textwrap.dedent(ALL_REDUCE))
    two = cluster.nodes[:2]
    ask = ["srun", "-w", ",".join(two), "--ntasks-per-node=1", f"--export=ALL,HEAD={two[0]}"]
    done = cluster.run([*ask, sys.executable, str(script)])
    assert sorted(done.stdout.splitlines()) == [f"{node} 11" for node in two]


@pytest.mark.long
def test_a_preempted_job_is_requeued(cluster: Cluster) -> None:
    where = ("-w", cluster.nodes[3], "--gpus-per-node=4", "-o", "/dev/null")
    # The batch shell outlives its step: Slurm 22.05 requeues only what it had to kill itself, a
    # job that ends within the grace time has just ended.
    low = cluster.sbatch("-p", "low", *where, "--wrap=srun sleep 300; sleep 300")
    try:
        cluster.wait_job(low, "RUNNING")
        high = cluster.sbatch("-p", "high", *where, "--wrap=exit 0")
        assert cluster.wait_job(high) == "COMPLETED"
        assert cluster.wait_job(low, "PENDING") == "PENDING"
        assert "Restarts=1 " in cluster.run(["scontrol", "-o", "show", "job", low]).stdout
    finally:
        cluster.run(["scancel", low], check=False)


def test_processes_on_a_node_are_seen_and_gone_after_cancel(cluster: Cluster) -> None:
    nap = "sleep 298.75"
    two = cluster.nodes[:2]
    job_id = cluster.sbatch("-w", ",".join(two), "-o", "/dev/null", f"--wrap=srun {nap}")

    def napping(node: str) -> bool:
        found = cluster.processes_on(node)
        return any(p.name == "sleep" and p.cmdline.endswith(nap) for p in found)

    try:
        cluster.wait_job(job_id, "RUNNING")
        _eventually(lambda: all(map(napping, two)))
    finally:
        cluster.run(["scancel", job_id], check=False)
    cluster.wait_job(job_id, "CANCELLED")
    _eventually(lambda: not any(map(napping, two)))
    assert "slurmd" not in {process.name for process in cluster.processes_on(two[0])}


def test_up_twice_changes_nothing(cluster: Cluster) -> None:
    cluster.heal()
    assert cluster.up() is False


def test_without_accounting_sacct_fails_and_jobs_run(cluster_no_accounting: Cluster) -> None:
    job_id = cluster_no_accounting.sbatch("-o", "/dev/null", "--wrap=true")
    assert cluster_no_accounting.wait_job(job_id) == "COMPLETED"
    done = run(["sacct", "-j", job_id], check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "accounting storage is disabled" in done.stderr


def test_sacct_fails_while_slurmdbd_is_stopped(cluster: Cluster) -> None:
    with cluster.slurmdbd_stopped():
        done = cluster.run(["sacct"], check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Connection refused" in done.stderr
    assert cluster.run(["sacct", "-n"]).stderr == ""


def test_a_cut_cable_is_cut_until_it_is_restored(spare: Cluster) -> None:
    node = spare.nodes[1]
    assert _reaches_head(spare, node)
    spare.cut(node)
    assert not _reaches_head(spare, node)
    spare.restore(node)
    _eventually(lambda: _reaches_head(spare, node))  # one try has 2 s


@pytest.mark.long
def test_a_powered_off_node_comes_back_and_works(spare: Cluster) -> None:
    node = spare.nodes[1]
    job_id = spare.sbatch("-N2", "-o", "/dev/null", "--wrap=srun sleep 299")
    spare.wait_job(job_id, "RUNNING")
    spare.power_off(node)
    assert spare.problems() == [f"slurmd-{node} does not run"]
    assert spare.processes(infrastructure=True)[node] == []
    spare.run(["scancel", job_id])
    time.sleep(12)  # MessageTimeout is 10 s: from here on Slurm has failed to end the lost job
    spare.heal()
    assert spare.run(["srun", "-w", node, "hostname"], timeout_s=15).stdout == f"{node}\n"


def test_slurmctld_restarts_and_still_knows_its_jobs(spare: Cluster) -> None:
    job_id = spare.sbatch("-o", "/dev/null", "--wrap=sleep 299")
    spare.wait_job(job_id, "RUNNING")
    spare.restart_slurmctld()
    assert spare.job_state(job_id) == "RUNNING"


def test_a_cluster_whose_processes_were_all_killed_is_made_anew(spare: Cluster) -> None:
    assert Cluster.running(spare.shape.state_dir) == spare
    processes.kill(processes.marked(spare.shape.bridge))
    assert Cluster.existing(spare.shape.state_dir) == spare
    assert Cluster.running(spare.shape.state_dir) is None
    assert spare.up()
    assert spare.run(["srun", "-w", spare.nodes[1], "hostname"]).stdout == f"{spare.nodes[1]}\n"


def test_down_leaves_nothing(spare: Cluster) -> None:
    job_id = spare.sbatch("-N2", "-o", "/dev/null", "--wrap=srun setsid sleep 299")
    spare.wait_job(job_id, "RUNNING")
    assert all(_traces(spare.shape).values())
    spare.down()
    assert not any(_traces(spare.shape).values()), _traces(spare.shape)


def test_down_never_deletes_a_directory_that_is_not_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    stranger = Cluster(shape=Shape(state_dir=tmp_path, slot=own_slot(SPARE)))
    with pytest.raises(ClusterError, match="holds other files"):
        stranger.up()
    stranger.down()
    assert (tmp_path / "thesis.tex").exists()
