"""The real controller from attempt to attempt, with nodes that leave outcomes made by hand.

What the conductor in it does, and when, is held by tests/node/test_conductor.py.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clusterrun.backends.local.backend import LocalBackend
from clusterrun.rundir.outcome import Cause, Next, Outcome, Reason
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared.state import JobState
from tests.patience import wait_for

from .builders import kill_all, make_bundle, make_plan, make_run

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]

# Each node leaves the outcome that the test put down for the attempt, and ends with its status.
NODE = """
outcome={root}/outcome.$2
[[ -f $outcome ]] || exit 0
[[ $CLUSTERRUN_LOCAL_NODE_RANK == 0 ]] && cp "$outcome" "$1/attempts/$2/outcome.json"
exit "$(< {root}/code.$2)"
"""
# The head waits until it is asked, and says what for; the other node waits until that is done.
ASKED = """
if [[ $CLUSTERRUN_LOCAL_NODE_RANK == 0 ]]; then
  trap 'cp "$1/attempts/$2/request" "$1/heard.$2"; touch {root}/done.$2; exit 0' USR2
  echo $$ > "$1/head.pid" && mv "$1/head.pid" "$1/attempts/$2/head.pid"
fi
while [[ ! -e {root}/done.$2 ]]; do sleep 0.05; done
"""
KILLED = {"code": 137, "cause": Cause.SIGNAL, "reason": "rank 1 on local1: killed by SIGKILL"}
PREEMPTED = {
    "code": 125,
    "cause": Cause.INTERRUPTED,
    "interruption": Reason.PREEMPT,
    "reason": "preempted",
}
CANCELLED = {"code": 124, "cause": Cause.INTERRUPTED, "reason": "cancelled, after a checkpoint"}


class RestartingSite:
    """Runs on this machine, and what their attempts shall come to."""

    is_output_full = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.backend = LocalBackend(runs_dir=RunsDir(root=root / "runs"))

    def ends(self, number: int, what: dict[str, Any], checkpoint: int | None = None) -> None:
        about = {"attempt": number, "job_id": "L1", "started_at": 1.0, "ended_at": 2.0}
        outcome = Outcome(**about, nodes=("local0", "local1"), checkpoint=checkpoint, **what)
        (self.root / f"outcome.{number}").write_text(outcome.to_json())
        (self.root / f"code.{number}").write_text(f"{what['code']}\n")

    def start(self, node: str = NODE, **changes: Any) -> tuple[str, RunPaths]:
        plan = make_plan(self.root, **changes)
        paths = make_run(self.root, plan, make_bundle(plan, node.format(root=self.root)))
        if self.is_output_full:
            paths.batch_output.symlink_to("/dev/full")
        return self.backend.submit(plan, paths).job_id, paths

    def end(self, job_id: str) -> tuple[JobState, int | None]:
        wait_for(lambda: self.backend.query([job_id])[job_id].state.is_terminal, "the end", 60)
        job = self.backend.query([job_id])[job_id]
        return job.state, job.exit_code

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and str(self.root) in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[RestartingSite]:
    site = RestartingSite(tmp_path)
    yield site
    kill_all(site.processes())


def outcome(paths: RunPaths, number: int) -> Outcome:
    return Outcome.from_json(paths.outcome(number).read_text())


def attempts(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.attempts_dir.iterdir())


def test_a_failure_with_a_checkpoint_is_followed_by_another_attempt(site: RestartingSite) -> None:
    site.ends(1, KILLED, checkpoint=100)
    site.ends(2, PREEMPTED, checkpoint=200)
    job_id, paths = site.start()
    assert site.end(job_id) == (JobState.COMPLETED, 0)
    assert attempts(paths) == ["1", "2", "3"]
    assert [outcome(paths, number).next for number in (1, 2)] == [Next.RELAUNCH] * 2
    assert "attempt 1: relaunch: rank 1 on local1" in paths.batch_output.read_text()
    site.is_output_full = True  # a disk that takes no word of it does not end the run
    job_id, paths = site.start()
    assert site.end(job_id) == (JobState.COMPLETED, 0)


def test_what_the_nodes_of_an_attempt_leave_behind_does_not_run_beside_the_next(
    site: RestartingSite,
) -> None:
    """An agent that is killed ends nothing that its ranks have started."""
    site.ends(1, KILLED, checkpoint=100)
    lock = "{root}/lock.$CLUSTERRUN_LOCAL_NODE_RANK"
    is_free = f"flock --nonblock {lock} true || exit 9"
    hold = f"setsid --fork flock {lock} sh -c 'touch {lock}.held; sleep 60'"
    wait = f"until [[ -e {lock}.held ]]; do sleep 0.05; done"
    job_id, _ = site.start("\n".join(["", is_free, hold, wait, NODE]))
    assert site.end(job_id) == (JobState.COMPLETED, 0)


def test_a_job_that_is_cancelled_is_not_started_again(site: RestartingSite) -> None:
    site.ends(1, KILLED, checkpoint=100)
    on_term = "trap 'cp {root}/outcome.1 \"$1/attempts/$2/outcome.json\"; exit 137' TERM\n"
    wait = "touch {root}/up.$CLUSTERRUN_LOCAL_NODE_RANK\nwhile :; do sleep 0.05; done\n"
    job_id, paths = site.start(on_term + wait)
    for node in range(2):
        wait_for((site.root / f"up.{node}").exists)
    site.backend.cancel([job_id])
    assert site.end(job_id) == (JobState.CANCELLED, 137)
    assert attempts(paths) == ["1"]
    assert paths.request(1).read_text() == "end\n"


def test_a_request_is_passed_on_to_the_heads_agent(site: RestartingSite) -> None:
    job_id, paths = site.start(ASKED)
    wait_for(paths.head_pid(1).exists)
    paths.request(1).write_text("cancel\n")
    os.kill(int(json.loads(paths.controller.read_text())["pid"]), signal.SIGUSR2)
    wait_for((site.root / "done.1").exists)
    assert site.end(job_id) == (JobState.COMPLETED, 0)
    assert (paths.root / "heard.1").read_text() == "cancel\n"
