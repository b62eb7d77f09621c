"""Scripts that save in their own handlers: which signal, which ranks, and how the attempt ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from clusterrun.config.choices import Launcher
from clusterrun.errors import NodeExit
from clusterrun.node.watch.own_signals import choose, named_signals
from clusterrun.rundir.request import Reason, write_request
from tests.node.jobs import AgentJob
from tests.node.test_interrupted_agents import ask, outcome, started
from tests.road import SCRIPTS

Make = Callable[..., AgentJob]
TERM, USR1, USR2 = int(signal.SIGTERM), int(signal.SIGUSR1), int(signal.SIGUSR2)
SCRIPT = (SCRIPTS / "own_handler.py").read_text()
STACKS = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
print("ready", flush=True)
while True:
    signal.pause()
"""
LONG = "4.5"  # ranks without a handler have three seconds


@pytest.mark.parametrize(
    ("handled", "option", "chosen"),
    [
        ((), "USR1@90", 0),
        ((USR1, TERM), "", TERM),
        ((USR1, TERM), "BR:sigusr1@90", USR1),
        ((TERM,), "10", TERM),
    ],
)
def test_sigterm_warns_a_rank_that_handles_several_signals(
    handled: tuple[int, ...], option: str, chosen: int
) -> None:
    assert choose(handled, named_signals(option)) == chosen


@pytest.mark.agents
@pytest.mark.timeout(120)
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
    job = started(stub_job(SCRIPT, names, LONG, *status_and_rank, launcher=launcher))
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


@pytest.mark.agents
@pytest.mark.timeout(60)
def test_a_handler_that_only_prints_stacks_is_not_waited_for(stub_job: Make) -> None:
    job = started(stub_job(STACKS))
    write_request(job.paths.request(1), Reason.END)
    os.kill(job.agent_pid("local1"), signal.SIGTERM)
    assert job.wait() == [NodeExit.CANCELLED] * 2
    assert "signal handler" not in job.text()
