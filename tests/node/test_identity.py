"""Who an agent is, without any fallback to a world of its own."""

from __future__ import annotations

import pytest

from clusterrun.node.base.causes import NodeError
from clusterrun.node.base.identity import identity

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "a[01-04]",
    "SLURM_STEP_NODELIST": "a[02-03]",
    "SLURMD_NODENAME": "a03",
}


def test_the_node_rank_is_slurms_and_read_on_the_node() -> None:
    who = identity(SLURM, 2)
    assert (who.job_id, who.node, who.node_rank, who.is_head) == ("4711", "a03", 1, False)


def test_the_head_is_the_first_node_of_the_step() -> None:
    who = identity({**SLURM, "SLURM_NODEID": "0"}, 2)
    assert (who.head_host, who.nodes, who.is_head) == ("a02", ("a02", "a03"), True)
    whole = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert identity(whole, 4).head_host == "a01"


def test_simulated_nodes_are_numbered_and_on_loopback() -> None:
    env = {"CLUSTERRUN_LOCAL_NODE_RANK": "1", "CLUSTERRUN_LOCAL_JOB_ID": "L3"}
    who = identity({**SLURM, **env}, 2)
    assert (who.job_id, who.node, who.nodes) == ("L3", "local1", ("local0", "local1"))
    assert (who.head_host, who.is_local) == ("127.0.0.1", True)


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({}, "not a task of a job"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a02"}, "Slurm gave 1 nodes"),
        ({**SLURM, "SLURM_STEP_NODELIST": "a[02"}, "cannot read the node list"),
        ({**SLURM, "SLURM_NODEID": "7"}, "SLURM_NODEID is 7"),
        ({**SLURM, "SLURM_NODEID": ""}, "SLURM_NODEID is not set"),
        ({"SLURM_JOB_ID": "1", "SLURM_NODEID": "0"}, "cannot read the node list"),
    ],
)
def test_an_agent_that_cannot_know_the_head_fails_loudly(env: dict[str, str], text: str) -> None:
    with pytest.raises(NodeError, match=text) as caught:
        identity(env, 2)
    assert caught.value.code == 121
