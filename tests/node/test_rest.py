"""The head at rest: whether it may wait for the conductor, and which of the two decides."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterrun.node.agent import leader
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.link.handshake import Realm
from clusterrun.node.link.head import Head
from clusterrun.rundir.claims import pass_on, passed_on
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import here
from tests.node.test_link import PORTS, decide, own
from tests.patience import patience

WAITS = "import signal; signal.sigwait([signal.SIGURG])"


@pytest.fixture
def conductor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start what is a conductor by its command line, and ends once it is woken."""
    block = "import signal; signal.pthread_sigmask(0, [signal.SIGURG])"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{block}; print(flush=True); {WAITS}", str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def attempt(path: Path) -> Attempt:
    paths = RunPaths(root=path)
    paths.attempt(1).mkdir(parents=True)
    return Attempt(plan=here(nodes=1, nproc_per_node=1), paths=paths, number=1, who=own(0, 1))


def test_the_head_rests_only_beside_the_conductor_of_its_own_run(
    tmp_path: Path, conductor: subprocess.Popen[bytes]
) -> None:
    one, pid = attempt(tmp_path), str(conductor.pid)
    assert leader.conductor_pid(one, {"CLUSTERRUN_BATCH_PID": pid}) == conductor.pid
    assert leader.conductor_pid(one, {}) == 0
    assert leader.conductor_pid(one, {"CLUSTERRUN_BATCH_PID": str(os.getpid())}) == 0
    on_slurm = dataclasses.replace(one, who=dataclasses.replace(one.who, is_local=False))
    for nodes, found in (("n[0-3]", conductor.pid), ("m1,n0", 0), ("", 0)):
        env = {"CLUSTERRUN_BATCH_PID": pid, "SLURM_JOB_NODELIST": nodes}
        assert leader.conductor_pid(on_slurm, env) == found


@pytest.mark.parametrize(("given", "is_over"), [(2, False), (None, False), (2, True)])
async def test_the_first_of_conductor_and_head_decides_whether_agents_continue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    conductor: subprocess.Popen[bytes],
    given: int | None,
    is_over: bool,
) -> None:
    monkeypatch.setenv("CLUSTERRUN_BATCH_PID", str(conductor.pid))
    monkeypatch.setattr(leader, "WORD_S", 0.2 if given is None else 60.0)
    one = attempt(tmp_path)

    disk, place = SharedDisk(), Realm(paths=one.paths, attempt=1)
    head = Head(one.who, place, PORTS, 10, decide, disk)
    resting = asyncio.ensure_future(leader.rest(head, one, disk, lambda: is_over))
    assert await asyncio.to_thread(conductor.wait) == 0  # it was woken
    if given is not None:
        pass_on(one.paths, 1, given)
    assert await resting == (0 if is_over else given or 0)
    assert one.paths.rests(1).exists()
    assert passed_on(one.paths, 1) in ((0, 2) if is_over else (given or 0,))
    assert pass_on(one.paths, 1, 3) == passed_on(one.paths, 1) != 3


SPARED = """
import subprocess
from clusterrun.node.base.processes import has_children, kill_descendants
lasting, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
assert has_children([lasting.pid])
assert kill_descendants((), [lasting.pid]) == []
assert not has_children([lasting.pid]), "the other one is killed"
assert has_children() and lasting.poll() is None
assert kill_descendants() == []
assert not has_children()
"""


def test_a_process_that_outlives_an_attempt_is_spared() -> None:
    subprocess.run([sys.executable, "-c", SPARED], check=True, timeout=60 * patience())
