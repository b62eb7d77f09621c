"""The batch script in real bash: what it does after an attempt, and with signals meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterrun.errors import NodeExit
from clusterrun.rendering.bundle import Bundle
from tests.rendering.job import Site, end_of, make_site, rendered

pytestmark = pytest.mark.timeout(120)
CANCELLED, INTERRUPTED = int(NodeExit.CANCELLED), int(NodeExit.INTERRUPTED)
LOST = int(NodeExit.NODE_LOST)


class Run:
    """A run directory and the batch script that runs it."""

    def __init__(self, site: Site, **asked: object) -> None:
        self.site = site
        self.bundle = rendered(site.plan(**{"nodes": 2, **asked}))
        self.path = site.run_dir(self.bundle)
        self.started: list[subprocess.Popen[str]] = []

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.site.run(self.bundle, str(self.path), *args, **variables)

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """Start the script with a srun that stays."""
        given = {"STUB_SRUN_SLEEP": "60", **variables}
        self.started.append(self.site.start(self.bundle, str(self.path), **given))
        wait_for(self.site.stubs / "srun.up")
        return self.started[-1]

    def attempt(self, number: int = 1) -> Path:
        return self.path / "attempts" / str(number)

    def attempts(self) -> list[str]:
        return sorted(path.name for path in (self.path / "attempts").iterdir())

    def srun(self, number: int) -> list[str]:
        return [os.fsdecode(arg) for arg in self.site.got(f"srun.{number}.args")]

    def successor(self) -> list[str]:
        return [os.fsdecode(arg) for arg in self.site.got("python.successor.batch.args")]

    def left(self, name: str) -> bool:
        return (self.site.stubs / name).exists()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(make_site(tmp_path))
    yield run
    for process in run.started:
        end(process)


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def wait_for(path: Path) -> None:
    wait_until(path.exists)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def end(process: subprocess.Popen[str]) -> None:
    """End a batch script and its srun."""
    for child in children(process.pid):
        for pid in (*children(child), child):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)


def test_a_relaunch_is_the_next_attempt_in_the_same_allocation(run: Run) -> None:
    run.site.decide("relaunch")
    assert run.run(STUB_SRUN_STATUS="137 0").returncode == 0
    assert run.attempts() == ["1", "2"]
    assert [run.srun(number)[-1] for number in (1, 2)] == ["1", "2"]
    again = run.srun(2)[:-1]
    again.remove("--immediate=60")  # nodes that are lost are not waited for
    assert run.srun(1)[:-1] == again
    assert end_of(run.path)["state"] == "COMPLETED"


def paced(run: Run, slow: str, quick: str) -> None:
    """Make the batch script wait for less, or for more."""
    script = run.bundle.script.replace(slow, quick)
    assert script != run.bundle.script
    run.bundle = Bundle(files={**run.bundle.files, "job.sbatch": script})


def refuse_attempts(run: Run, refusals: int, *, pause: str) -> Path:
    """Have the disk refuse the second attempt some times; return what has a line for each."""
    paced(run, "sleep 10", pause)
    refused = run.site.stubs / "refused"
    mkdir = run.site.stubs / "mkdir"
    mkdir.write_text(
        "#!/bin/bash\n"
        f'[[ $2 == */2 ]] && echo >> "{refused}" && (($(wc -l < "{refused}") <= {refusals})) &&'
        ' exit 1\nexec /bin/mkdir "$@"\n'
    )
    mkdir.chmod(0o755)
    return refused


@pytest.mark.parametrize(("refusals", "code"), [(3, 0), (99, 1)])
def test_a_relaunch_waits_for_a_disk_that_takes_its_attempt(
    run: Run, refusals: int, code: int
) -> None:
    refuse_attempts(run, refusals, pause="sleep 0.01")
    run.site.decide("relaunch")
    done = run.run(STUB_SRUN_STATUS="137 0")
    assert done.returncode == code
    assert done.stderr.count("attempts cannot be written to") == 1 + code


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_job_that_is_ended_while_its_disk_is_full_waits_no_more(
    run: Run, is_elsewhere: bool
) -> None:
    refused = refuse_attempts(run, 99, pause="sleep 1")
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="0.1", STUB_SRUN_STATUS="137")
    wait_for(refused)
    time.sleep(0.3)  # in its sleep
    if is_elsewhere:
        run.attempt(2).mkdir()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert refused.read_text().count("\n") <= 2
    assert (run.path / "end.json").exists() is not is_elsewhere
    assert is_elsewhere or end_of(run.path)["state"] == "CANCELLED"


def test_a_job_that_is_ended_as_it_takes_its_next_attempt_has_the_last_word(run: Run) -> None:
    """What it has just taken itself is nobody else's."""
    taken = run.site.stubs / "taken"
    mkdir = run.site.stubs / "mkdir"
    mkdir.write_text(f'#!/bin/bash\n/bin/mkdir "$@" && touch "{taken}" && sleep 0.5\n')
    mkdir.chmod(0o755)
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="0.1", STUB_SRUN_STATUS="137")
    wait_until(lambda: run.attempt(2).exists() and taken.exists())
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert "elsewhere" not in said
    assert end_of(run.path)["state"] == "CANCELLED"
    assert not run.left("srun.2.args")


def test_what_is_concluded_is_asked_with_the_attempt_and_its_status(run: Run) -> None:
    run.site.decide("stop")
    agree = '[[ -z ${clusterrun_dir:-} ]] || echo 3 > "$clusterrun_dir/attempts/1/status"\n'
    (run.path / "env.sh").write_text(agree)
    assert run.run(STUB_SRUN_STATUS="137").returncode == 3
    asked = [os.fsdecode(arg) for arg in run.site.got("python.conclude.batch.args")]
    assert asked == ["-m", "clusterrun.node", "conclude", str(run.path), "1", "3"]
    assert (run.site.stubs / "python.conclude.batch.cwd").read_text() == str(run.site.workdir)


def test_lost_nodes_are_left_out_of_the_next_step(run: Run) -> None:
    run.site.decide("relaunch FAILED n2,n5", "relaunch")
    assert run.run(STUB_SRUN_STATUS="123 137 0").returncode == 0
    assert "--exclude" not in "".join(run.srun(1))
    assert "--exclude=n2,n5" in run.srun(2)
    assert "--exclude" not in "".join(run.srun(3))


def test_a_good_end_needs_no_conclusion(run: Run) -> None:
    run.site.decide("relaunch")
    assert run.run().returncode == 0
    assert not run.left("python.conclude.batch.args")


def test_where_nothing_can_be_concluded_the_status_stands(run: Run) -> None:
    assert run.run(STUB_SRUN_STATUS="7", STUB_PYTHON_STATUS="1").returncode == 1
    assert run.attempts() == ["1"]
    assert end_of(run.path)["state"] == "FAILED"


def test_a_requeued_job_has_no_end(run: Run) -> None:
    run.site.decide("requeue")
    assert run.run(STUB_SRUN_STATUS=str(INTERRUPTED)).returncode == INTERRUPTED
    assert run.site.got("scontrol.args") == [b"requeue", b"4711"]
    assert not (run.path / "end.json").exists()
    assert not run.left("python.successor.batch.args")


def test_where_slurm_does_not_requeue_another_job_goes_on(run: Run) -> None:
    run.site.decide("requeue")
    done = run.run(STUB_SRUN_STATUS=str(INTERRUPTED), STUB_SCONTROL_STATUS="1")
    assert done.returncode == INTERRUPTED
    assert run.successor() == ["-m", "clusterrun.backends", "successor", str(run.path)]
    assert "Slurm does not requeue this job" in done.stderr
    assert not (run.path / "end.json").exists()


@pytest.mark.parametrize(
    "silence", ["slurm_requeue error: Unable to contact slurm controller", "Socket timed out"]
)
def test_a_requeue_that_slurmctld_did_not_hear_is_asked_again(run: Run, silence: str) -> None:
    silence_slurmctld(run).unlink()
    run.site.decide("requeue")
    done = run.run(STUB_SRUN_STATUS=str(INTERRUPTED), STUB_SCONTROL_SAYS=silence)
    assert done.returncode == INTERRUPTED
    assert "does not requeue" not in done.stderr
    assert not run.left("python.successor.batch.args")


def test_a_successor_is_told_which_nodes_to_leave_out(run: Run) -> None:
    run.site.decide("successor FAILED n2,n5")
    assert run.run(STUB_SRUN_STATUS=str(LOST)).returncode == INTERRUPTED
    assert run.successor()[-1] == "n2,n5"
    assert not run.left("scontrol.args")
    assert not (run.path / "end.json").exists()


def test_where_nothing_can_be_submitted_from_a_node_the_job_is_requeued(run: Run) -> None:
    run.site.decide("successor")
    done = run.run(STUB_SRUN_STATUS="137", STUB_SUCCESSOR_STATUS="1")
    assert done.returncode == INTERRUPTED
    assert "this job is requeued instead" in done.stderr
    assert run.site.got("scontrol.args") == [b"requeue", b"4711"]
    assert not (run.path / "end.json").exists()


@pytest.mark.parametrize("decision", ["requeue", "successor"])
def test_where_nobody_goes_on_the_run_has_failed_and_says_how_to(run: Run, decision: str) -> None:
    run.site.decide(decision)
    done = run.run(STUB_SRUN_STATUS="137", STUB_SCONTROL_STATUS="1", STUB_SUCCESSOR_STATUS="1")
    assert done.returncode == 137
    assert "continue it: clusterrun resume 4711" in done.stderr
    assert (end_of(run.path)["state"], end_of(run.path)["exit_code"]) == ("FAILED", 137)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_slurms_warning_goes_to_the_heads_agent_with_its_reason(run: Run, number: int) -> None:
    process = run.start()
    heard = run.site.root / "heard"
    agent = 'trap "touch $0; exit" USR2; touch $0.up; while :; do sleep 0.05; done'
    head = subprocess.Popen(["bash", "-c", agent, str(heard)])
    wait_for(heard.with_name("heard.up"))
    (run.attempt() / "head.pid").write_text(f"{head.pid}\n")
    process.send_signal(number)
    wait_for(heard)
    head.wait(30)
    assert (run.attempt() / "request").read_text() == "time-limit\n"
    assert process.poll() is None


def test_a_warning_is_not_sent_to_a_pid_of_another_node(run: Run) -> None:
    run.site.decide("relaunch FAILED n1")
    process = run.start(STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS="123 0")
    wait_for(run.attempt(2))
    other = subprocess.Popen(["sleep", "30"])
    (run.attempt(2) / "head.pid").write_text(f"{other.pid}\n")
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=30)
    assert (run.attempt(2) / "request").read_text() == "time-limit\n"
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_warning_is_told_to_the_attempt_that_follows(run: Run) -> None:
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS="137 0")
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=30)
    assert (run.attempt(2) / "request").read_text() == "time-limit\n"


def test_a_warning_does_not_talk_over_who_interrupted_before(run: Run) -> None:
    process = run.start(STUB_SRUN_SLEEP="0.5")
    (run.attempt() / "request").write_text("cancel\n")
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert (run.attempt() / "request").read_text() == "cancel\n"


def test_once_the_agents_have_left_a_step_that_stays_is_killed(run: Run) -> None:
    """Slurm waits for a lost node for minutes; here the moment that srun is given is short."""
    paced(run, "sleep 0.2", "sleep 0.01")
    run.site.decide("stop")
    assert lose_node(run, status=LOST) == LOST


def test_a_step_whose_node_is_known_to_be_gone_is_killed_at_once(run: Run) -> None:
    """The moment that srun would be given otherwise is made longer than the test may take."""
    paced(run, "sleep 0.2", "sleep 60")
    run.site.decide("stop FAILED node2")
    assert lose_node(run, status=LOST) == LOST


def lose_node(run: Run, status: int) -> int:
    """Tell the script that the agents have left; its step must be gone when it ends."""
    process = run.start()
    (run.attempt() / "status").write_text(f"{status}\n")
    (step,) = [pid for pid in children(process.pid) if b"node.sh" in command(pid)]
    wait_until(lambda: any(b"sleep" in command(pid) for pid in children(step)))
    left = children(step)
    process.send_signal(signal.SIGURG)
    process.wait(30)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert run.site.got("python.conclude.batch.args")[-1] == str(status).encode()
    assert not Path(f"/proc/{step}").exists()
    return process.returncode


def test_a_warning_after_a_lost_node_does_not_end_the_next_attempt(run: Run) -> None:
    run.site.decide("relaunch FAILED n2")
    process = run.start(STUB_SRUN_SLEEP="3")
    process.send_signal(signal.SIGURG)
    wait_for(run.site.stubs / "srun.2.args")
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert run.attempts() == ["1", "2"]


def test_a_step_that_ends_by_itself_is_not_killed(run: Run) -> None:
    run.site.decide("stop")
    process = run.start(STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS="5")
    process.send_signal(signal.SIGURG)
    process.communicate(timeout=30)
    assert process.returncode == LOST
    assert run.left("python.agent.1.args"), "srun came no further"


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "FAILED"])
def test_the_state_of_a_run_that_stops_is_what_was_concluded(run: Run, state: str) -> None:
    """The statuses that clusterrun gives these states are also what a script may end with."""
    run.site.decide(f"stop {state}")
    assert run.run(STUB_SRUN_STATUS=str(CANCELLED)).returncode == CANCELLED
    assert end_of(run.path)["state"] == state


def test_a_job_that_slurm_starts_again_leaves_a_run_that_another_goes_on_with(run: Run) -> None:
    done = run.run(SLURM_RESTART_COUNT="1", STUB_SUPERSEDED="yes")
    assert done.returncode == 0
    assert "another job goes on with the run" in done.stderr
    assert not (run.path / "attempts").exists()


def test_a_setup_line_that_ends_the_shell_does_not_say_so(tmp_path: Path) -> None:
    run = Run(make_site(tmp_path), setup=("exit 0",))
    done = run.run(SLURM_RESTART_COUNT="1")
    assert done.returncode != 0
    assert end_of(run.path)["state"] == "FAILED"


def test_what_follows_is_taken_in_hand_before_it_is_decided(run: Run) -> None:
    run.site.decide("stop")
    assert run.run(STUB_SRUN_STATUS="5").returncode == 5
    assert (run.attempt() / "followed").read_text() == ""


def test_a_node_that_took_this_one_for_lost_is_let_have_its_way(run: Run) -> None:
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS="123")
    (run.attempt() / "followed").write_text("node2\n")
    process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert run.attempts() == ["1"]
    assert not run.left("python.conclude.batch.args")
    assert not (run.path / "end.json").exists()


def test_a_node_that_is_quicker_by_a_moment_is_let_have_its_way(run: Run) -> None:
    look = "  is_followed && return 1\n"
    assert look in run.bundle.script
    late = run.bundle.script.replace(look, 'printf "node2\\n" > "$run_dir/attempts/1/followed"\n')
    run.bundle = Bundle(files={**run.bundle.files, "job.sbatch": late})
    run.site.decide("relaunch")
    assert run.run(STUB_SRUN_STATUS="123").returncode == INTERRUPTED
    assert not run.left("python.conclude.batch.args")


def test_a_job_that_such_a_node_cancels_has_not_the_last_word(run: Run) -> None:
    process = run.start(STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS="123")
    (run.attempt() / "followed").write_text("node2\n")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert not (run.path / "end.json").exists()


@pytest.mark.parametrize("status", ["0", "137"])
def test_where_slurm_has_started_the_job_elsewhere_this_one_has_not_the_last_word(
    run: Run, status: str
) -> None:
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS=status)
    run.attempt(2).mkdir()
    _, said = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert "attempt 2 of this run has begun elsewhere" in said
    assert run.attempts() == ["1", "2"]
    assert not (run.path / "end.json").exists()


def test_an_attempt_that_another_job_has_taken_is_not_jumped_over(run: Run) -> None:
    """Its ranks would see the next one, and save no more."""
    taken = '[[ -n ${clusterrun_dir:-} ]] || mkdir "$run_dir/attempts/2"\nreturn 0\n'
    (run.path / "env.sh").write_text(taken)  # while it is concluded
    run.site.decide("relaunch")
    assert run.run(STUB_SRUN_STATUS="137").returncode == INTERRUPTED
    assert run.attempts() == ["1", "2"]
    assert not run.left("srun.2.args")
    assert not (run.path / "end.json").exists()


def test_a_run_directory_that_takes_no_further_attempt_ends_the_run(run: Run) -> None:
    (run.path / "env.sh").write_text(
        '[[ -n ${clusterrun_dir:-} ]] || mv "$run_dir/attempts" "$run_dir/gone"\nreturn 0\n'
    )
    run.site.decide("relaunch")
    done = run.run(STUB_SRUN_STATUS="137")
    assert done.returncode == 1
    assert "attempts cannot be written to" in done.stderr


def silence_slurmctld(run: Run) -> Path:
    """Have slurmctld not answer; return what is to be written once it does."""
    hurried = run.bundle.script.replace("sleep 5\n", "sleep 0.1\n")
    run.bundle = Bundle(files={**run.bundle.files, "job.sbatch": hurried})
    ping = run.site.stubs / "ping"
    ping.write_text("Slurmctld(primary) at head is DOWN\n")
    return ping


def test_nothing_is_decided_while_slurmctld_is_silent(run: Run) -> None:
    ping = silence_slurmctld(run)
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="0.1", STUB_SRUN_STATUS="137 0")
    time.sleep(1.5)
    assert process.poll() is None
    assert not (run.attempt() / "followed").exists()
    ping.write_text("Slurmctld(primary) at head is DOWN\nSlurmctld(backup) at other is UP\n")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said.count("what follows attempt 1 waits: slurmctld does not answer") == 1


def test_a_job_that_is_ended_while_slurmctld_is_silent_waits_no_more(run: Run) -> None:
    silence_slurmctld(run)
    process = run.start(STUB_SRUN_SLEEP="0.1", STUB_SRUN_STATUS="137")
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == CANCELLED
    assert end_of(run.path)["state"] == "CANCELLED"


def test_a_training_that_completed_does_not_wait_for_slurmctld(run: Run) -> None:
    silence_slurmctld(run)
    assert run.run().returncode == 0
    assert end_of(run.path)["state"] == "COMPLETED"


def test_a_node_that_has_lost_slurmctld_lets_another_go_on(run: Run) -> None:
    silence_slurmctld(run)
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="0.1", STUB_SRUN_STATUS="123")
    time.sleep(1)
    (run.attempt() / "followed").write_text("node2\n")
    process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert not run.left("python.conclude.batch.args")
    assert not (run.path / "end.json").exists()


def test_a_job_that_slurm_ends_is_not_started_again(run: Run) -> None:
    run.site.decide("relaunch")
    process = run.start(STUB_SRUN_SLEEP="1", STUB_SRUN_STATUS="143")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == CANCELLED
    assert run.attempts() == ["1"]
    assert (run.attempt() / "request").read_text() == "end\n"
    assert end_of(run.path)["state"] == "CANCELLED"
    assert not run.left("python.conclude.batch.args"), "there is little time left"


def cancel_while_submitting(run: Run, status: str) -> subprocess.CompletedProcess[str]:
    """End the job as Slurm does, each of its processes, while its successor is submitted."""
    run.site.decide("successor TIMEOUT")
    slow = {"STUB_SUCCESSOR_SLEEP": "2", "STUB_SUCCESSOR_STATUS": status}
    process = run.start(STUB_SRUN_SLEEP="0", STUB_SRUN_STATUS=str(INTERRUPTED), **slow)
    wait_for(run.site.stubs / "python.successor.batch.up")
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):  # it has ended since it was found
            os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def descendants(pid: int) -> list[int]:
    below = [found for child in children(pid) for found in descendants(child)]
    return [*below, pid]


def test_the_submission_of_a_successor_is_not_cut_short(run: Run) -> None:
    """Else the job may be in the queue, and nobody knows of it who could cancel it."""
    done = cancel_while_submitting(run, status="0")
    assert done.returncode == CANCELLED
    assert run.left("python.successor.batch.done")
    assert "clusterrun: \n" not in done.stderr, "nobody else is said to go on"
    assert not (run.path / "end.json").exists()


def test_a_job_that_is_ended_and_finds_no_successor_was_cancelled(run: Run) -> None:
    assert cancel_while_submitting(run, status="1").returncode == CANCELLED
    assert end_of(run.path)["state"] == "CANCELLED"


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED"])
def test_the_next_job_of_a_chain_has_nothing_to_do_where_the_run_has_ended(
    run: Run, state: str
) -> None:
    text = f'{{"state": "{state}"}}\n'
    (run.path / "end.json").write_text(text)
    done = run.run("chained")
    assert done.returncode == 0
    assert "the run in" in done.stderr
    assert not run.left("srun.args")
    assert (run.path / "end.json").read_text() == text


@pytest.mark.parametrize("before", ['{"state": "TIMEOUT"}\n', None])
def test_the_next_job_of_a_chain_goes_on_after_the_time_limit(run: Run, before: str | None) -> None:
    run.attempt(1).mkdir(parents=True)
    if before:
        (run.path / "end.json").write_text(before)
    assert run.run("chained").returncode == 0
    assert run.attempts() == ["1", "2"]
    assert end_of(run.path)["state"] == "COMPLETED"


def test_words_of_setup_lines_are_no_decision(tmp_path: Path) -> None:
    run = Run(make_site(tmp_path), setup=("echo hello from the module system",))
    run.site.decide("relaunch")
    assert run.run(STUB_SRUN_STATUS="137 0").returncode == 0
    assert run.attempts() == ["1", "2"]
