"""The local backend with its real controller and a node.sh of our own in the place of the agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from clusterrun.backends.base import SchedulerJob
from clusterrun.backends.local import backend
from clusterrun.backends.local.backend import LocalBackend, take_job_id
from clusterrun.backends.local.controller import LocalStep
from clusterrun.backends.select import submit_or_remove
from clusterrun.config.choices import Device
from clusterrun.errors import SubmissionError
from clusterrun.rundir import record
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.rundir.record import state_dir
from clusterrun.shared.state import JobState
from tests.patience import patience, wait_for

from .builders import kill_all, make_bundle, make_plan, make_run

pytestmark = pytest.mark.agents
UNTIL_TOLD = 'while [[ ! -e "$1/go" ]]; do sleep 0.05; done\n'


class LocalSite:
    """A directory of runs on this machine, and what was started in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = RunsDir(root=root / "runs")
        self.backend = LocalBackend(runs_dir=self.runs)

    def submit(self, node_sh: str, **changes: object) -> tuple[str, RunPaths]:
        plan = make_plan(self.root, **changes)
        paths = make_run(self.root, plan, make_bundle(plan, node_sh))
        return submit_or_remove(self.backend, plan, paths).job_id, paths

    def job(self, job_id: str) -> SchedulerJob:
        return self.backend.query([job_id])[job_id]

    def wait(self, job_id: str, timeout_s: float = 20) -> SchedulerJob:
        wait_for(lambda: self.job(job_id).state.is_terminal, f"the end of {job_id}", timeout_s)
        return self.job(job_id)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that this site started: its path is in the argv or the environment."""
        mark = str(self.root)
        found = []
        for candidate in psutil.process_iter():
            try:
                if candidate.pid == os.getpid() or candidate.status() == psutil.STATUS_ZOMBIE:
                    continue
                where = [*candidate.cmdline(), candidate.cwd()]
            except (psutil.Error, FileNotFoundError):  # psutil 5.9 raises the second if it ends
                continue
            if any(mark in word for word in where):
                found.append(candidate)
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LocalSite]:
    site = LocalSite(tmp_path)
    yield site
    kill_all(site.processes())


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the controller's clock run 15 times as fast: its limits and graces are seconds here."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "real = time.monotonic\n"
        "begin = real()\n"
        "if 'clusterrun.backends.local.controller' in ' '.join(sys.orig_argv):\n"
        "    time.monotonic = lambda: begin + 15 * (real() - begin)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def controller_of(paths: RunPaths) -> dict[str, object]:
    return dict(json.loads(paths.controller.read_text()))


def no_process_left(site: LocalSite, timeout_s: float = 5) -> None:
    wait_for(lambda: not site.processes(), f"an end of {site.processes()}", timeout_s)


def test_every_node_runs_once_with_its_rank_in_the_users_directory(
    site: LocalSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "socket", "clusterrun"):  # beside the user's script
        (tmp_path / f"{name}.py").write_text("raise ImportError('the wrong one')\n")
    monkeypatch.chdir(tmp_path)
    script = 'echo "$1 $2 $CLUSTERRUN_LOCAL_JOB_ID $PWD" > "$1/node-$CLUSTERRUN_LOCAL_NODE_RANK"\n'
    job_id, paths = site.submit(f"{script}echo out; echo out >&2\n", nodes=3)
    job = site.wait(job_id)
    assert (job_id, job.state, job.exit_code) == ("L1", JobState.COMPLETED, 0)
    assert sorted(path.name for path in paths.root.glob("node-*")) == ["node-0", "node-1", "node-2"]
    assert (paths.root / "node-2").read_text() == f"{paths.root} 1 L1 {tmp_path}\n"
    assert paths.batch_output.read_text() == "out\n" * 6
    assert paths.batch_output.stat().st_mode & 0o777 == 0o600
    no_process_left(site)
    site.backend.cancel([job_id])  # an ended job
    assert site.job(job_id).state is JobState.COMPLETED
    second, second_paths = site.submit("exit 0\n")
    assert second == "L2"
    for each, at in ((job_id, paths), (second, second_paths)):
        assert site.runs.job_link(each).resolve() == at.root.resolve()
    site.wait(second)


def test_one_failing_node_ends_one_that_would_wait_for_ever(site: LocalSite, hasty: None) -> None:
    script = '[ "$CLUSTERRUN_LOCAL_NODE_RANK" = 0 ] && exit 121\nsleep 600\n'
    begin = time.monotonic()
    job_id, _ = site.submit(script)
    job = site.wait(job_id)
    assert (job.state, job.exit_code) == (JobState.FAILED, 121)  # not the 143 that we caused
    assert time.monotonic() - begin < 10 * patience()
    no_process_left(site)


def test_cancel_kills_what_does_not_listen_and_what_hides(site: LocalSite, hasty: None) -> None:
    # A grandchild in a session of its own, its parents gone: a subreaper still finds it.
    script = (
        "trap '' TERM\n"
        '(setsid bash -c \'trap "" TERM; echo $$ > "$0/hidden"; sleep 600\' "$1" &)\n'
        "sleep 600\n"
    )
    job_id, paths = site.submit(script, nodes=1)
    wait_for((paths.root / "hidden").exists)
    site.backend.cancel([job_id])
    assert site.wait(job_id).state is JobState.CANCELLED
    no_process_left(site)


def test_the_time_limit_ends_the_job_as_timeout(site: LocalSite, hasty: None) -> None:
    begin = time.monotonic()
    job_id, _ = site.submit("sleep 600\n", time_minutes=1)
    job = site.wait(job_id)
    assert time.monotonic() - begin > 3.5  # of the 4 s that are this minute
    assert (job.state, job.exit_code) == (JobState.TIMEOUT, 143)
    no_process_left(site)


def test_the_job_outlives_the_shell_that_submitted(site: LocalSite, tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    bundle = make_bundle(plan, 'sleep 1; touch "$1/done-$CLUSTERRUN_LOCAL_NODE_RANK"\n')
    paths = make_run(tmp_path, plan, bundle)
    code = (
        "import os, signal; from pathlib import Path\n"
        "from clusterrun.rundir.paths import RunPaths, RunsDir\n"
        "from clusterrun.launch.plan import Plan\n"
        "from clusterrun.backends.local.backend import LocalBackend\n"
        f"paths = RunPaths(root=Path({str(paths.root)!r}))\n"
        "plan = Plan.from_json(paths.plan.read_text())\n"
        f"backend = LocalBackend(runs_dir=RunsDir(root=Path({str(site.runs.root)!r})))\n"
        "backend.submit(plan, paths)\n"
        "os.killpg(0, signal.SIGKILL)\n"  # the shell, and all that shares its group, dies here
    )
    shell = subprocess.run([sys.executable, "-c", code], start_new_session=True)
    assert shell.returncode == -signal.SIGKILL
    os.kill(int(str(controller_of(paths)["pid"])), signal.SIGHUP)  # a lost terminal
    job = site.wait("L1")
    assert (job.state, job.exit_code) == (JobState.COMPLETED, 0)
    assert len(list(paths.root.glob("done-*"))) == 2
    # Nothing is lost although the shell never wrote the record.
    assert record.resolve_job("L1", [site.runs]).run_id == paths.root.name


def test_a_killed_controller_is_a_failed_job_and_takes_its_nodes_along(site: LocalSite) -> None:
    job_id, paths = site.submit('touch "$1/up-$CLUSTERRUN_LOCAL_NODE_RANK"\nexec sleep 600\n')
    wait_for(lambda: len(list(paths.root.glob("up-*"))) == 2)
    assert site.job(job_id).state is JobState.RUNNING
    os.kill(int(str(controller_of(paths)["pid"])), signal.SIGKILL)
    job = site.wait(job_id)
    assert job.state is JobState.FAILED
    assert "controller is gone" in job.reason
    no_process_left(site)
    paths.end.write_text("{")  # it may have completed
    assert (site.job(job_id).state, site.job(job_id).reason) == (
        *(JobState.UNKNOWN, "its end.json is damaged"),
    )
    huge = {**controller_of(paths), "pid": 1 << 40}
    for text in ("{", json.dumps(huge)):
        paths.controller.write_text(text)
        assert (site.job(job_id).state, site.job(job_id).reason) == (
            *(JobState.UNKNOWN, "its controller.json is damaged"),
        )
        site.backend.cancel([job_id])


def test_a_pid_that_belongs_to_another_program_is_left_alone(site: LocalSite) -> None:
    job_id, paths = site.submit("sleep 600\n", nodes=1)
    controller = controller_of(paths)
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        paths.controller.write_text(json.dumps({**controller, "pid": bystander.pid}))
        assert site.job(job_id).state is JobState.FAILED
        site.backend.cancel([job_id])
        time.sleep(0.2)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
        pid, identity = int(str(controller["pid"])), str(controller["identity"])
        backend.Controlling(pid=pid, identity=identity).signal(signal.SIGTERM)


def test_gpus_are_shared_out_between_the_nodes(site: LocalSite) -> None:
    wanted = {"device": Device.CUDA, "gpus_per_node": 2, "procs_per_node": 2}
    script = 'echo "$CUDA_VISIBLE_DEVICES" > "$1/gpus-$CLUSTERRUN_LOCAL_NODE_RANK"\n'
    job_id, paths = site.submit(script, **wanted, gpu_ids=("3", "GPU-8f", "2", "0"))
    site.wait(job_id)
    found = [path.read_text().strip() for path in sorted(paths.root.glob("gpus-*"))]
    assert found == ["3,GPU-8f", "2,0"]


def test_a_controller_that_cannot_start_is_told_and_nothing_is_left(
    site: LocalSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('this Python is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SubmissionError) as refused:
        site.submit("exit 0\n")
    assert "this Python is broken" in str(refused.value.cause)
    assert not site.runs.root.exists()


def test_an_interrupted_submission_leaves_neither_a_run_nor_a_process(
    site: LocalSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started_and_interrupted(*args: Any) -> None:
        start(*args)
        raise KeyboardInterrupt

    start = backend._start_controller
    monkeypatch.setattr(backend, "_start_controller", started_and_interrupted)
    with pytest.raises(KeyboardInterrupt):
        site.submit("sleep 600\n")
    no_process_left(site)
    assert not site.runs.root.exists()


def test_ids_that_are_taken_at_the_same_time_differ(site: LocalSite, tmp_path: Path) -> None:
    site.runs.root.mkdir()
    paths = RunPaths(root=site.runs.root / "demo" / "r1")
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: take_job_id(site.runs, paths), range(40)))
    assert sorted(taken, key=lambda job_id: int(job_id[1:])) == [f"L{n}" for n in range(1, 41)]


def test_no_two_projects_of_a_user_share_an_id(site: LocalSite, tmp_path: Path) -> None:
    places = [RunsDir(root=tmp_path / name / "runs") for name in ("one", "two", "three")]

    def take(place: RunsDir) -> str:
        place.root.mkdir(parents=True, exist_ok=True)
        return take_job_id(place, RunPaths(root=place.root / "demo" / "r1"))

    assert [take(places[i]) for i in (0, 1, 0)] == ["L1", "L2", "L3"]
    (state_dir() / "local-job-id").unlink()
    assert take(places[0]) == "L4"  # the counter is lost: an id is new within its project
    (state_dir() / "local-job-id").write_text("")
    assert take(places[0]) == "L5"


def test_a_job_whose_controller_never_came_is_not_pending_for_ever(site: LocalSite) -> None:
    plan = make_plan(site.root)
    paths = make_run(site.root, plan, make_bundle(plan))
    job_id = take_job_id(site.runs, paths)
    assert site.job(job_id).state is JobState.PENDING
    os.utime(paths.root, (1, 1))
    assert site.job(job_id).state is JobState.FAILED
    assert site.job(job_id).reason == "its controller never started"


def test_a_controller_on_another_machine_is_not_called_dead(site: LocalSite) -> None:
    job_id, paths = site.submit(UNTIL_TOLD, nodes=1)
    there = {**controller_of(paths), "host": "login2", "identity": "another:1"}
    paths.controller.write_text(json.dumps(there))
    job = site.job(job_id)
    assert job.state is JobState.UNKNOWN
    assert "login2" in job.reason
    with pytest.raises(Exception, match="runs on login2"):
        site.backend.cancel([job_id])
    (paths.root / "go").touch()
    assert site.wait(job_id).state is JobState.COMPLETED  # its files say so


def test_a_status_that_comes_just_before_the_end_is_kept(tmp_path: Path) -> None:
    paths = RunPaths(root=tmp_path)
    paths.attempt(1).mkdir(parents=True)
    node = subprocess.Popen(["bash", "-c", "exit 3"])
    os.waitid(os.P_PID, node.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody knows
    step = LocalStep(paths=paths, running={node.pid: node})
    step.end()
    assert step.poll() == 3
