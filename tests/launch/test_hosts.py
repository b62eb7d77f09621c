"""Hosts without Slurm: their lists, the allocation they come from, and the plan made for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from clusterrun.config.choices import Cluster, Device, Starter
from clusterrun.config.hosts import (
    SOURCES,
    HostList,
    allocation_hosts,
    allocation_source,
    choose_starter,
    parse_hostfile,
    split_hosts,
    without_excluded,
)
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from tests.launch.samples import here, on_slurm, slurm_facts


def listed(*hosts: str, slots: tuple[int, ...] = ()) -> HostList:
    """List hosts as `--hosts` does, or with the slots of a hostfile."""
    return HostList(hosts=hosts, slots=slots or (0,) * len(hosts), source="--hosts")


def host_facts(hosts: HostList, cluster: Cluster = Cluster.SSH) -> Facts:
    """Describe a submission to hosts."""
    return slurm_facts(cluster=cluster, hosts=hosts)


def on_hosts(hosts: HostList, **asked: Any) -> Plan:
    """Plan a job of train.py for hosts over ssh, on CPUs unless GPUs are asked for."""
    asked.setdefault("device", Device.CPU if "gpus_per_node" not in asked else Device.AUTO)
    return make_plan(JobSpec(**{"script": "train.py", **asked}), host_facts(hosts))


def test_every_form_of_a_hostfile_is_read() -> None:
    for text, hosts, slots in [
        ("gpu1\n\n# two\nann@gpu2:2222  # mine\n", ("gpu1", "ann@gpu2:2222"), (0, 0)),
        ("gpu1 slots=4\ngpu2 slots=4\n", ("gpu1", "gpu2"), (4, 4)),  # DeepSpeed
        ("gpu1 slots=8 max_slots=8\r\ngpu2:2222 slots=8", ("gpu1", "gpu2:2222"), (8, 8)),
        ("gpu1:4\ngpu[2-3]:4\n", ("gpu1", "gpu2", "gpu3"), (4, 4, 4)),  # MPICH
        ("gpu1:22\n[2001:db8::1]:8\n", ("gpu1:22", "[2001:db8::1]"), (0, 8)),
        ("n1\nn1\nn1\nn2\nn2\n", ("n1", "n2"), (0, 0)),  # PBS
        ("node[01-03]", ("node01", "node02", "node03"), (0, 0, 0)),
    ]:
        found = parse_hostfile(text, shown="hosts.txt")
        assert (found.hosts, found.slots) == (hosts, slots)


def test_a_bad_line_of_a_hostfile_is_named() -> None:
    for text, line, words in [
        ("gpu1\ngpu2 slots=many\n", "hosts.txt:2", "not a valid hostfile line"),
        ("gpu1 slots=0", "hosts.txt:1", "not a valid hostfile line"),
        ("gpu1 4", "hosts.txt:1", "not a valid hostfile line"),
        ("gpu1\n# fine\n-oProxyCommand=x\n", "hosts.txt:3", "not a host"),
        ("gpu1:99999", "hosts.txt:1", "not a host"),
        ("gpu[3-1]", "hosts.txt:1", "runs backwards"),
        ("# none\n", "hosts.txt", "lists no hosts"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            parse_hostfile(text, shown="hosts.txt")
        assert caught.value.where == line
        assert caught.value.hints
        assert "\n" not in caught.value.message


def test_one_text_may_contain_many_hosts() -> None:
    assert split_hosts("gpu[1,3],b:2222 [::1]") == ["gpu1", "gpu3", "b:2222", "[::1]"]


def test_an_allocation_lists_its_nodes() -> None:
    for variable, text in {
        "PBS_NODEFILE": "n1\nn1\nn2\nn2\n",
        "LSB_DJOB_HOSTFILE": "n1\nn2\nn2\n",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "FLUX_URI": "n[1-2]\n",
    }.items():
        source = allocation_source({variable: "x", "PATH": "/bin"})
        assert source == variable
        found = allocation_hosts(source, text)
        assert (found.hosts, found.slots) == (("n1", "n2"), (0, 0))  # CPUs are no GPUs
        assert found.source == f"${variable}"


def test_without_an_allocation_the_variables_are_listed() -> None:
    with pytest.raises(UsageError) as caught:
        allocation_source({"PBS_NODEFILE": ""})
    assert all(f"${source}" in caught.value.message for source in SOURCES)
    assert "--hostfile" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("environ", "programs", "starter"),
    [
        ({"LSB_JOBID": "1"}, {"blaunch", "ssh"}, Starter.BLAUNCH),
        ({"SLURM_JOB_ID": "1"}, {"srun", "ssh"}, Starter.SRUN),
        ({"FLUX_URI": "local:"}, {"flux", "ssh"}, Starter.FLUX),
        ({"PBS_JOBID": "1"}, {"ssh"}, Starter.SSH),
        ({}, {"flux", "srun", "ssh"}, Starter.SSH),
    ],
)
def test_the_starter_follows_the_allocation(
    environ: dict[str, str], programs: set[str], starter: Starter
) -> None:
    has = programs.__contains__
    assert choose_starter(Starter.AUTO, Cluster.ALLOCATION, environ, has) is starter
    assert choose_starter(Starter.AUTO, Cluster.SSH, environ, has) is Starter.SSH


def test_a_starter_that_cannot_start_is_refused() -> None:
    asked = Starter.BLAUNCH
    with pytest.raises(UsageError, match="blaunch was not found"):
        choose_starter(asked, Cluster.ALLOCATION, {}, {"ssh"}.__contains__)
    with pytest.raises(UsageError, match="needs an allocation"):
        choose_starter(asked, Cluster.SSH, {}, {"ssh", "blaunch"}.__contains__)


def test_all_hosts_are_used_in_their_order() -> None:
    plan = on_hosts(listed("b", "a", "c"), gpus_per_node=2)
    assert (plan.hosts, plan.nodes, plan.world_size) == (("b", "a", "c"), 3, 6)
    assert (plan.device, plan.gpus_per_node, plan.starter) == (Device.CUDA, 2, "ssh")
    assert (plan.hosts_dir, plan.wait_for_hosts_s) == ("~/clusterrun", 600)
    assert Plan.from_json(plan.to_json()) == plan


def test_spares_are_last_and_unused_hosts_are_noted() -> None:
    plan = on_hosts(listed("a", "b", "c", "d"), spare_nodes=1)
    assert (plan.nodes, plan.hosts) == (3, ("a", "b", "c", "d"))
    plan = on_hosts(listed("a", "b", "c", "d"), spare_nodes=1, nodes=2)
    assert (plan.nodes, plan.hosts) == (2, ("a", "b", "c"))
    assert "not used: d (--nodes 2)" in plan.notes


def test_the_slots_of_a_hostfile_are_gpus() -> None:
    hosts = listed("a", "b", slots=(4, 4))
    assert on_hosts(hosts, device=Device.AUTO).gpus_per_node == 4
    cpu = on_hosts(hosts)
    assert (cpu.gpus_per_node, cpu.procs_per_node, cpu.device) == (0, 4, Device.CPU)
    assert on_hosts(listed("a", "b", slots=(4, 8)), gpus_per_node=2).world_size == 4


def test_without_gpus_each_host_has_as_many_ranks_as_asked_for() -> None:
    assert on_hosts(listed("a", "b")).procs_per_node == 1
    assert on_hosts(listed("a", "b"), nproc_per_node=3).world_size == 6
    both = on_hosts(listed("a", "b"), gpus_per_node=2, device=Device.CPU)
    assert (both.procs_per_node, both.gpus_per_node) == (2, 0)
    assert on_hosts(listed("a", "b", slots=(4, 8)), nproc_per_node=2).world_size == 4


def test_a_request_that_the_hosts_cannot_meet_is_refused() -> None:
    wrong: list[tuple[HostList, dict[str, Any], str]] = [
        (listed("a", "b"), {"device": Device.AUTO}, "GPUs per host is unknown"),
        (listed("a", "b"), {"device": Device.CUDA}, "GPUs per host is unknown"),
        (listed("a", "b", slots=(4, 8)), {}, "--hosts have different numbers of slots"),
        (listed("a", "b"), {"nodes": 3}, "3 nodes and 0 spare nodes requested, but --hosts"),
        (listed("a", "b"), {"spare_nodes": 2}, "lists 2 hosts"),
        (listed("a", "ann@a"), {}, "a host more than once: a, ann@a"),
        (listed("a", "A:22"), {}, "a host more than once"),
        (listed("a", "b"), {"gpu_ids": "0"}, "--gpu-ids"),
        (listed("a", "b"), {"device": Device.MPS}, "on a Mac"),
    ]
    for hosts, asked, words in wrong:
        with pytest.raises(UsageError, match=words) as caught:
            on_hosts(hosts, **asked)
        assert caught.value.hints
        assert "\n" not in caught.value.message
    assert on_hosts(listed("a:2221", "a:2222")).nodes == 2  # two ports of an address


def test_excluded_hosts_are_left_out_by_either_name() -> None:
    hosts = listed("ann@gpu1", "gpu2:2222", "gpu2:2223", "gpu3", slots=(1, 2, 3, 4))
    left = without_excluded(hosts, "gpu[1,3],gpu2-2223")
    assert (left.hosts, left.slots) == (("gpu2:2222",), (2,))
    with pytest.raises(UsageError, match="leaves none of the hosts"):
        without_excluded(hosts, "gpu[1-3]")


def test_hosts_without_their_cluster_are_refused() -> None:
    with pytest.raises(UsageError, match="--hosts is given, but the job would run on Slurm"):
        on_slurm(hosts=("a",))
    with pytest.raises(UsageError, match=r"--hostfile is given, but .* this machine"):
        here(hostfile="hosts.txt")
    plan = here(hosts=("a",), cluster=Cluster.LOCAL)
    assert "--hosts has no effect on this machine" in plan.notes
    assert plan.hosts == ()


def test_what_only_the_host_knows_is_left_to_it() -> None:
    plan = on_hosts(listed("a", "b"))
    assert plan.threads_per_process == 0
    gpus = on_hosts(listed("a", "b"), gpus_per_node=2)
    assert not [note for note in gpus.notes if "Slurm" in note]


def test_the_home_of_an_interpreter_is_that_of_the_host() -> None:
    facts = dataclasses.replace(host_facts(listed("a")), python="~/env/bin/python")
    asked = JobSpec(script="train.py", device=Device.CPU, python="~/env/bin/python")
    assert make_plan(asked, facts).python == "~/env/bin/python"
