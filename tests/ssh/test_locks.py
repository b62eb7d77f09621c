"""Two people submit to the same GPUs: one runs, the other learns who holds them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.hosts import LAPTOP, Hosts
from tests.patience import patience
from tests.ssh.submitting import SLEEPS, gpus, nothing_left, start

pytestmark = [pytest.mark.ssh, pytest.mark.long]

HOSTS = ("h1", "h2")
PEOPLE = ("ann", "bob")
RUN_FILES = r"/runs/|roots\.json"


@pytest.fixture
def shared_gpus(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    gpus(hosts, tmp_path_factory.mktemp("nvml"), HOSTS, *PEOPLE)
    for person in PEOPLE:
        hosts.laptop.run(["mkdir", f"/shared/{person}"], user=person, check=True)
    return hosts


def submitted(hosts: Hosts, person: str, names: str) -> subprocess.Popen[str]:
    options = ("--hosts", names, "--gpus-per-node", "2", "--python", "~/py", "hello.py")
    about = {"user": person, "cwd": f"/shared/{person}", "script": SLEEPS}
    return start(hosts, *options, device="cuda", **about)  # type: ignore[arg-type]


def answer(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120 * patience())
    return process.returncode, out, err


def kill_controllers(hosts: Hosts) -> None:
    for name in HOSTS:
        for program in hosts[name].processes():
            if "clusterrun.backends.hosts.controller" in program.argv:
                hosts[name].as_root(["kill", "-9", str(program.pid)])


def harmless(hosts: Hosts, stranger: str, run_dir: str, owner: str) -> None:
    """Let one person try to read, redirect and end the run of another, who then still has it."""
    tries = (
        *(["clusterrun", *verb, run_dir] for verb in (["status"], ["logs"], ["cancel", "-y"])),
        ["cat", f"{run_dir}/job.json"],
        ["ln", "-sfn", "/tmp", f"/shared/{owner}/runs/by-job/H1"],
        ["pkill", "-f", "clusterrun.backends.hosts"],
    )
    for argv in tries:
        for machine in (LAPTOP, *HOSTS):
            done = hosts[machine].run(argv, user=stranger, cwd="/")
            assert (done.returncode != 0, "started" in done.stdout) == (True, False), (argv, done)
    about = {"user": owner, "cwd": f"/shared/{owner}"}
    assert "RUNNING" in hosts.laptop.run(["clusterrun", "status"], check=True, **about).stdout


def test_of_two_people_one_runs_and_the_other_learns_of_it(shared_gpus: Hosts) -> None:
    """They race again and again, with the hosts in either order; then the holder is killed."""
    hosts = shared_gpus
    for turn in range(10):
        orders = ("h1,h2", "h2,h1" if turn % 2 else "h1,h2")
        racing = {p: submitted(hosts, p, o) for p, o in zip(PEOPLE, orders, strict=True)}
        answers = {person: answer(process) for person, process in racing.items()}
        assert sorted(code for code, _, _ in answers.values()) == [0, 1], answers
        loser = next(person for person, (code, _, _) in answers.items() if code)
        winner = next(person for person in PEOPLE if person != loser)
        run = re.search(r"runs/(hello/\S+)", "".join(answers[winner][1:]))
        assert run
        error = answers[loser][2]
        holder = rf"GPU \S+.* process \d+ of {winner}\d?"
        assert re.search(rf"^error: h[12]: .*{holder}", error, re.MULTILINE), error
        for name in HOSTS:
            assert "@clusterrun-" in hosts[name].as_root(["cat", "/proc/net/unix"])
        if turn == 0:
            harmless(hosts, loser, f"/shared/{winner}/runs/{run[1]}", winner)
        kill_controllers(hosts)
        nothing_left(hosts, RUN_FILES, "/hello.py$")
