"""Whole agents that are asked, warned, ended or left waiting, with ranks that can save."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from clusterrun.config.choices import Launcher
from clusterrun.errors import NodeExit
from clusterrun.node.conductor.agents import Agents, AgentsState
from clusterrun.node.conductor.leader import Leader
from clusterrun.node.link import head
from clusterrun.node.watch import hangs
from clusterrun.rundir.end import Reason, write_request
from tests.node.jobs import ROOT, STUB, AgentJob
from tests.patience import patience, wait_for
from tests.road import SCRIPTS

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]
Make = Callable[..., AgentJob]

# The ranks of a real training meet in every step; these meet nowhere, so that only the page
# of shared memory can bring them to one step.
TRAIN = """
import glob, os, time
from clusterrun import runtime
rank = int(os.environ["RANK"])
open(f"here-{rank}", "w").close()
while len(glob.glob("here-*")) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
for step in range(1, 3000):
    time.sleep(0.02 + 0.005 * rank)
    saves = runtime.should_checkpoint()
    if step == 1:
        print("ready", flush=True)
    if rank == 0 and step % 5 == 0:
        runtime.step(step, 3000)
    if saves:
        print(f"saved at {step}", flush=True)
        if rank == 0:
            runtime.checkpoint("nowhere", step)
    if runtime.should_stop():
        break
print("left", flush=True)
"""
WAIT = "import time; print('ready', flush=True); time.sleep(100)"


def saves(job: AgentJob) -> list[tuple[str, int]]:
    """Read which rank saved at which step."""
    lines = [line for node in ("local0", "local1") for line in job.log(node)]
    found = [(rank, re.fullmatch(r"saved at (\d+)", text)) for _, rank, _, text in lines]
    return sorted((rank, int(match[1])) for rank, match in found if match)


def outcome(job: AgentJob) -> dict[str, Any]:
    return dict(json.loads(job.paths.outcome(1).read_text()))


def ranks(job: AgentJob) -> int:
    return job.plan.nodes * job.plan.procs_per_node


def started(job: AgentJob) -> AgentJob:
    job.start().wait_for("ready", ranks(job))
    return job


def ask(job: AgentJob, reason: Reason) -> None:
    """Interrupt the attempt, as the conductor and `cancel` do."""
    write_request(job.paths.request(1), reason)


def assert_all_saved_at_one_step(job: AgentJob) -> None:
    steps = {step for _, step in saves(job)}
    assert saves(job) == sorted((str(rank), step) for rank in range(ranks(job)) for step in steps)
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("a request", "the time limit"),
        ("SIGTERM for one agent", "preempted"),
        # with proctrack/linuxproc, or scancel --full
        ("SIGTERM for launchers and ranks, too", "preempted"),
    ],
)
def test_ranks_save_at_one_step_and_leave(stub_job: Make, how: str, reason: str) -> None:
    job = started(stub_job(TRAIN))
    agent = psutil.Process(job.agent_pid("local1"))
    if how == "a request":
        ask(job, Reason.TIME_LIMIT)
    else:
        for process in [agent] if "one" in how else job.processes():
            process.send_signal(signal.SIGTERM)
    assert job.wait() == [NodeExit.INTERRUPTED] * 2
    assert_all_saved_at_one_step(job)
    assert job.text().count("left") == ranks(job)
    left = outcome(job)
    assert (left["code"], left["cause"]) == (NodeExit.INTERRUPTED, "interrupted")
    assert (left["reason"], left["checkpoint"]) == (reason, saves(job)[0][1])
    assert job.events("failed") == []
    job.assert_clean()


def test_sigterm_while_the_nodes_still_meet_is_no_failure(stub_job: Make) -> None:
    job = stub_job(WAIT)
    job.start_node(0)
    wait_for(lambda: bool(job.paths.attempt_record(1).exists() and job.events("started")))
    os.kill(job.agent_pid("local0"), signal.SIGTERM)
    assert job.wait() == [NodeExit.CANCELLED]
    assert (outcome(job)["cause"], outcome(job)["reason"]) == ("cancelled", "cancelled")


@pytest.fixture(name="hurried")
def _hurried(monkeypatch: pytest.MonkeyPatch) -> Callable[[AgentJob], None]:
    """Start agents whose patience is short, by a module that Python runs at its start."""
    seconds = 0.5 * patience()
    monkeypatch.setattr(hangs, "AGAIN_S", seconds)

    def start(job: AgentJob) -> None:
        change = f"from clusterrun.node.watch import hangs; hangs.ANSWER_S = {seconds}"
        job.start(**changed_agents(job, change)).wait_for("ready", ranks(job))

    return start


def changed_agents(job: AgentJob, change: str) -> dict[str, str]:
    """Have agents change something in themselves as they start."""
    site = job.paths.root.parents[2] / "changed"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import sys\nif 'clusterrun.node' in sys.orig_argv:\n    {change}\n"
    )
    return {"PYTHONPATH": f"{site}:{STUB}:{ROOT}"}


def test_a_rank_that_is_stopped_is_found_and_named(
    stub_job: Make, hurried: Callable[[AgentJob], None]
) -> None:
    job = stub_job(TRAIN, hang_timeout_s=round(2 * patience()))
    hurried(job)
    pids = [job.rank_pid(rank) for rank in range(4)]
    wait_for(lambda: job.events("step"))
    # In a real training all others wait for one; here all of the head's ranks must come to a halt.
    for pid in pids[:2]:
        os.kill(pid, signal.SIGSTOP)
    assert job.wait() == [NodeExit.HUNG] * 2
    left = outcome(job)
    assert (left["code"], left["cause"], left["rank"]) == (NodeExit.HUNG, "halted", 0)
    assert "2 ranks (e.g. rank 0) stopped by a signal" in left["reason"]
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    job.assert_clean()


def test_ranks_that_do_not_follow_those_that_ended_are_named(
    stub_job: Make, hurried: Callable[[AgentJob], None]
) -> None:
    """A rank may hang in the teardown of NCCL or gloo when all others have left."""
    job = stub_job(LEAVES_EARLY, nproc_per_node=1, nodes=3, hang_timeout_s=round(2 * patience()))
    hurried(job)
    assert job.wait() == [NodeExit.HUNG] * 3
    left = outcome(job)
    assert (left["cause"], left["node"], left["rank"]) == ("hung", "local2", 2)
    assert left["reason"].startswith("rank 2 on local2: other ranks have ended; no progress")
    job.assert_clean()


ORPHANS = (
    "from clusterrun.node.recovery import lost\n"
    "    lost.see_to_run = lambda attempt, loss, say: say('what follows is asked here')"
)


@pytest.mark.parametrize("have_met", [False, True])
def test_a_node_that_loses_the_conductor_sees_to_what_follows(
    stub_job: Make, have_met: bool
) -> None:
    job = stub_job(WAIT)
    environ = changed_agents(job, ORPHANS)
    job.start_node(1, **environ)
    if have_met:
        job.start_node(0, **environ)
        job.wait_for("ready", ranks(job))
    else:
        wait_for(lambda: job.link._leader and job.link._leader.head.peers)
    job.link.close()
    code = NodeExit.NODE_LOST if have_met else NodeExit.RENDEZVOUS_FAILED
    assert [agent.wait(60 * patience()) for agent in job.agents] == [code] * (1 + have_met)
    assert "what follows is asked here" in [text for *_, text in job.log("local1")]


def test_a_node_that_is_lost_is_the_conductors_to_see_to(stub_job: Make) -> None:
    job = stub_job(WAIT)
    job.start(**changed_agents(job, ORPHANS)).wait_for("ready", ranks(job))
    os.kill(job.agent_pid("local0"), signal.SIGKILL)
    assert job.wait()[1] == NodeExit.NODE_LOST
    assert (outcome(job)["cause"], outcome(job)["node"]) == ("node_lost", "local0")
    assert "what follows is asked here" not in [text for *_, text in job.log("local1")]


LEAVES_EARLY = """
import os, time
print("ready", flush=True)
while int(os.environ["RANK"]) > 1:
    time.sleep(1)
"""


@pytest.mark.parametrize("script", [TRAIN, LEAVES_EARLY])
def test_an_attempt_ends_once_a_later_one_has_begun(stub_job: Make, script: str) -> None:
    """Slurm starts a job elsewhere whose nodes it has lost touch with; these train on."""
    job = stub_job(script)
    job.start(**changed_agents(job, ORPHANS)).wait_for("ready", ranks(job))
    wait_for(lambda: script is TRAIN or len(job.events("rank_exit")) == 2)
    job.paths.attempt(2).mkdir()
    assert job.wait() == [int(NodeExit.NODE_LOST)] * 2
    assert "what follows is asked here" not in [text for *_, text in job.log("local0")]
    assert outcome(job)["reason"] == "local0: attempt 2 of this run has begun elsewhere"
    job.assert_clean()


def test_a_step_whose_node_was_left_behind_is_not_awaited(
    stub_job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For srun waits for that node as for a lost one."""
    monkeypatch.setattr(head, "LEAVE_S", 1.0)
    monkeypatch.setattr(head, "REST_S", 1.0)
    job = started(stub_job(WAIT))
    silent = job.agent_pid("local1")
    os.kill(silent, signal.SIGSTOP)
    os.kill(job.rank_pid(0), signal.SIGKILL)
    wait_for(lambda: job.link.state is AgentsState.LEFT)
    os.kill(silent, signal.SIGCONT)
    assert job.wait() == [137] * 2


def test_a_failed_leader_ends_all(stub_job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Leader) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(Leader, "_run", broken)
    job = stub_job(WAIT).start()
    assert job.wait() == [1, 1]
    assert job.link.state is AgentsState.LEFT
    assert "ready" not in job.text()
    job.assert_clean()


def test_a_failed_thread_is_replaced(stub_job: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    job = stub_job("print('ready')")
    with monkeypatch.context() as broken:
        broken.setattr(Agents, "_run", MagicMock(side_effect=OSError("no memory")))
        job.link.begin(1)
        job.link.serve()
        wait_for(lambda: job.link.state is AgentsState.LEFT)
    assert job.start().wait() == [0, 0]


# Scripts that save in their own handlers


OWN_HANDLER = (SCRIPTS / "own_handler.py").read_text()
STACKS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
print("ready", flush=True)
while True:
    signal.pause()
"""
LONG = "4.5"  # ranks without a handler have three seconds


@pytest.mark.parametrize(
    ("reason", "code", "words", "launcher"),
    [
        (Reason.PREEMPT, NodeExit.INTERRUPTED, ("SIGTERM+SIGUSR1", "0"), Launcher.FORGE),
        (Reason.TIME_LIMIT, NodeExit.INTERRUPTED, ("SIGUSR2", "143"), Launcher.DIRECT),
        (Reason.CANCEL, NodeExit.CANCELLED, ("SIGUSR1", "0", "0"), Launcher.ACCELERATE),
        (Reason.END, NodeExit.CANCELLED, ("SIGTERM", "0"), Launcher.FORGE),
    ],
)
def test_ranks_have_time_to_save_in_their_own_handlers(
    stub_job: Make, reason: Reason, code: int, words: tuple[str, ...], launcher: Launcher
) -> None:
    names, *status_and_rank = words
    job = started(stub_job(OWN_HANDLER, names, LONG, *status_and_rank, launcher=launcher))
    if reason is Reason.END:
        write_request(job.paths.request(1), reason)
    if reason in (Reason.PREEMPT, Reason.END):
        for name in ("local1", "local0")[: len(words) - 1]:
            os.kill(job.agent_pid(name), signal.SIGTERM)
    else:
        ask(job, reason)
    assert job.wait() == [code] * 2
    count = 1 if len(words) > 2 else 4  # of rank 0 alone, or of all
    text = job.text()
    assert text.count(f"handles {names[:7]}") == text.count("has saved") == count, text
    assert outcome(job)["is_handled"]
    job.assert_clean()


def test_a_handler_that_only_prints_stacks_is_not_waited_for(stub_job: Make) -> None:
    job = started(stub_job(STACKS))
    write_request(job.paths.request(1), Reason.END)
    os.kill(job.agent_pid("local1"), signal.SIGTERM)
    assert job.wait() == [NodeExit.CANCELLED] * 2
    assert "signal handler" not in job.text()
