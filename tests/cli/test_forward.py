"""Commands about a run whose directory is on another host: an ssh that starts them there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import clusterrun
from clusterrun.errors import ElsewhereError, Exit
from clusterrun.rundir import create, record
from clusterrun.rundir.paths import RunsDir, directory_name
from clusterrun.rundir.record import Home, JobRecord
from tests.backends.builders import make_bundle, make_plan
from tests.cli.runs import ended
from tests.logs.corpus import T0, raw, write_log
from tests.logs.runs import controlled_by
from tests.patience import patience

SSH = r"""#!/usr/bin/env python3
import os, sys
root = os.path.dirname(os.path.abspath(__file__))
args = sys.argv[1:]
at = args.index("--")
host, command = args[at - 1], args[at + 1]
with open(f"{root}/asked", "a") as file:
    tty = "-t" if "-t" in args else "-T"
    file.write(f"{host} {tty}\n")
if not os.path.isdir(f"{root}/{host}"):
    log = args[args.index("-E") + 1] if "-E" in args else "/dev/stderr"
    with open(log, "a") as file:
        file.write(f"ssh: connect to host {host} port 22: No route to host\r\n")
    sys.exit(255)
os.chdir(f"{root}/{host}")
kept = {name: os.environ[name] for name in ("PATH",)}
os.execve("/bin/sh", ["sh", "-c", command], {**kept, "HOME": os.getcwd()})
"""


@dataclass(frozen=True, kw_only=True)
class Here:
    """The submitting machine: a project, and hosts as directories beside its ssh."""

    root: Path

    @property
    def runs(self) -> RunsDir:
        return RunsDir(root=self.root / "project" / "runs")

    @property
    def environ(self) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("CLUSTERRUN", "XDG_"))}
        path = f"{self.root / 'hosts'}:{os.environ['PATH']}"
        return {**kept, "HOME": str(self.root / "laptop"), "PATH": path}

    def run(self, host: str, job_id: str, name: str = "demo", **changes: Any) -> JobRecord:
        """Make a run on a host, and its record here."""
        home = RunsDir(root=self.root / "hosts" / host / "runs")
        plan = make_plan(home.root.parent, name=name)
        there = create.create_run(home, name, f"run-{job_id}", make_bundle(plan))
        made = record.new_record(plan, there, argv=(), now=float(job_id[1:]))
        made = dataclasses.replace(made, job_id=job_id, **changes)
        record.write(made)
        record.link_job(there, job_id)
        paths = self.runs.run(directory_name(name), there.root.name)
        paths.root.mkdir(parents=True)
        at = Home(host=host, run_dir=str(there.root), python=sys.executable)
        here = dataclasses.replace(made, run_dir=str(paths.root), home=at)
        record.write(here)
        record.remember_home(here)
        record.link_job(paths, job_id)
        return made

    def popen(self, *args: str, **settings: Any) -> subprocess.Popen[bytes]:
        """Start clusterrun in the project."""
        argv = [sys.executable, "-m", "clusterrun", *args]
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        environ = {**self.environ, **settings.pop("env", {})}
        cwd = self.root / "project"
        return subprocess.Popen(argv, cwd=cwd, env=environ, **{**pipes, **settings})

    def __call__(self, *args: str, **settings: Any) -> tuple[int, str, str]:
        process = self.popen(*args, stdin=subprocess.DEVNULL, **settings)
        out, err = process.communicate(timeout=60 * patience())
        return process.returncode, out.decode(), err.decode()

    @property
    def asked(self) -> list[str]:
        path = self.root / "hosts" / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(name="here")
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "laptop/.local/state"))
    for name in ("project", "laptop", "hosts/gpu1", "hosts/gpu2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "hosts" / "ssh").write_text(SSH)
    (tmp_path / "hosts" / "ssh").chmod(0o755)
    return Here(root=tmp_path)


def end(made: JobRecord, state: str = "COMPLETED", code: int = 0) -> None:
    ended(made.paths.root, state, code)


def start(made: JobRecord) -> subprocess.Popen[bytes]:
    """Let a process that sleeps stand for the controller of a job."""
    sleeper = subprocess.Popen(["sleep", "600"])
    made.paths.attempt(1).mkdir(parents=True, exist_ok=True)
    controlled_by(sleeper.pid, made.paths)
    return sleeper


HOSTILE = ("a'b\"c", "two\nlines", "$(touch /tmp/never)", "-x `id` ; ls", "~", "\\", "caf\u00e9")


@pytest.mark.parametrize("word", ["L1", "demo", "run-L1", "DIR", None])
def test_every_name_of_a_run_means_it_there(here: Here, word: str | None) -> None:
    made = here.run("gpu1", "L1")
    end(made)
    # what these names would mean on the host itself
    (here.root / "hosts/gpu1/L1").touch()
    (here.root / "hosts/gpu1/clusterrun.yaml").write_text("run_dir: [no")
    directory = str(here.runs.run("demo", "run-L1").root)
    words = [directory if word == "DIR" else word] if word else []
    code, out, err = here("status", *words, "--json")
    assert (code, json.loads(out)["run_dir"]) == (0, made.run_dir), err
    said = "" if word else "using job L1 (demo, newest run in runs)\n"
    assert err == said


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_arrives_as_it_is(here: Here, name: str) -> None:
    end(here.run("gpu1", "L1", name=name))
    code, out, err = here("status", "--json", "--", name)
    assert (code, json.loads(out)["name"]) == (0, name), err


def test_the_answer_is_that_of_the_home_byte_for_byte(here: Here) -> None:
    made = here.run("gpu1", "L1")
    write_log(made.paths, 1, "gpu1", [raw(T0, 0, "o", b"caf\xe9 \xff\x00 end")])
    end(made, "FAILED", 3)
    home = {**here.environ, "HOME": str(here.root / "hosts/gpu1")}
    for args in (("logs", "-o", "raw"), ("diagnose", "--json"), ("status", "--exit-status")):
        argv = [sys.executable, "-m", "clusterrun", args[0], made.run_dir, *args[1:]]
        there = subprocess.run(argv, env=home, cwd="/", capture_output=True, check=False)
        process = here.popen(args[0], "L1", *args[1:], stdin=subprocess.DEVNULL)
        out, err = process.communicate(timeout=60 * patience())
        assert (process.returncode, out) == (there.returncode, there.stdout), err
        assert err == there.stderr
    assert there.returncode == Exit.NO
    for variables, is_coloured in (({}, 0), ({"FORCE_COLOR": "1"}, 1)):
        assert ("\x1b[" in here("status", "L1", env=variables)[1]) is bool(is_coloured)
        assert "\x1b[" not in here("status", "L1", env={**variables, "NO_COLOR": "1"})[1]


def test_a_run_that_is_gone_and_a_host_that_is_unreachable(here: Here) -> None:
    made = here.run("gpu1", "L1")
    shutil.rmtree(made.run_dir)
    code, _, err = here("status", "L1")
    assert code == Exit.NOT_FOUND
    assert f"the run directory {made.run_dir} is gone from" in err
    shutil.rmtree(here.root / "hosts/gpu1")
    code, out, err = here("status", "L1")
    assert (code, out) == (Exit.UNREACHABLE, "")
    assert "gpu1 does not answer: connect to host gpu1 port 22: No route to host" in err
    assert "hint: jobs on gpu1 are not affected" in err
    code, out, _ = here("status", "L1", "--json")
    assert json.loads(out)["exit_code"] == code == Exit.UNREACHABLE


def test_ctrl_c_ends_the_command_on_both_machines(here: Here) -> None:
    made = here.run("gpu1", "L1")
    write_log(made.paths, 1, "gpu1", [raw(T0, 0, "o", "hello")])
    sleeper = start(made)
    try:
        following = here.popen("logs", "-f", "L1", stdin=subprocess.DEVNULL)
        assert following.stdout
        assert b"hello" in following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=20 * patience())
        assert following.returncode == Exit.INTERRUPTED, err
        assert not others(made.run_dir)
    finally:
        sleeper.kill()
        sleeper.wait()


def others(word: str) -> list[str]:
    """List the processes that this run's directory was handed to."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = place.read_bytes()
        except OSError:
            continue
        if b"CLUSTERRUN_FORWARDED" in text and word.encode() in text:
            found.append(place.parent.name)
    return found


def test_cancel_takes_several_jobs_of_one_host(here: Here) -> None:
    sleepers = [start(here.run("gpu1", job_id)) for job_id in ("L1", "L2")]
    here.run("gpu2", "L3")
    try:
        code, _, err = here("cancel", "-y", "L1", "L3")
        assert code == Exit.USAGE
        assert "the run directories are on several hosts: gpu1, gpu2" in err
        code, out, err = here("cancel", "-y", "L1", "L2")
        assert code == 0, err
        assert [line.split()[1] for line in out.splitlines()] == ["L1", "L2"]
        assert ", in " not in out
        assert [sleeper.wait(10 * patience()) for sleeper in sleepers] == [-signal.SIGTERM] * 2
    finally:
        for sleeper in sleepers:
            sleeper.kill()


def test_what_cannot_be_done_there_is_refused(here: Here) -> None:
    here.run("gpu1", "L1")
    code, _, err = here("diagnose", "L1", "--bundle=x.tgz")
    assert code == Exit.USAGE
    assert "writes a file here, but the run directory of job L1 is on gpu1" in err
    assert here.asked == []
    (found,) = record.list_records(here.runs)
    with pytest.raises(ElsewhereError) as caught:
        clusterrun.status(found)
    assert "clusterrun status L1" in caught.value.hint


def test_list_asks_each_home_once(here: Here) -> None:
    for job_id, host in (("L1", "gpu1"), ("L2", "gpu1"), ("L3", "gpu2"), ("L4", "gpu3")):
        (here.root / "hosts" / host).mkdir(exist_ok=True)
        end(here.run(host, job_id))
    moved = here.root / "hosts/gpu1/runs/demo/run-L2"
    there = dataclasses.replace(
        record.read(record.RunPaths(root=moved)), job_id="L7", earlier_job_ids=("L2",)
    )
    record.write(there)
    shutil.rmtree(here.root / "hosts/gpu3")
    code, out, err = here("list")
    assert code == Exit.UNREACHABLE, err
    rows = [line.split() for line in out.splitlines()[1:]]
    states = {"L4": "UNKNOWN", "L3": "COMPLETED", "L7": "COMPLETED", "L1": "COMPLETED"}
    assert {row[0]: row[2] for row in rows} == states
    assert "gpu3 does not answer: connect to host gpu3 port 22: No route to host" in out
    assert err.count("gpu3 does not answer") == 1
    assert len(here.asked) == 3
    assert here("status", "L7", "--json")[0] == 0  # the new job's id names the run here too


def test_a_project_names_no_host_and_no_program_until_the_user_trusts_it(here: Here) -> None:
    end(here.run("gpu1", "H1"))
    shutil.rmtree(here.root / "laptop/.local/state")  # as if it had come with a repository
    config = here.root / "project/clusterrun.yaml"
    config.write_text("hosts: [gpu1]\nlaunch: {python: ./own}\n")
    code, out, err = here("list")
    assert (code, out.splitlines()[1].split()[:3]) == (0, ["H1", "demo", "UNKNOWN"])
    hint = f"if you trust {sys.executable} on gpu1: clusterrun status --adopt H1"
    assert "job H1 is on gpu1" in out
    assert f"according to its job.json, which is not trusted; {hint}" in err
    for verb in ("status", "logs", "diagnose", "cancel", "resume"):
        code, out, err = here(verb, "H1")
        assert (code, out) == (Exit.FAILED, ""), err
        assert f"hint: {hint}" in err
    assert here("config", "show")[0] == 0
    assert here.asked == []
    config.unlink()
    (homes := here.root / "laptop/.local/state/clusterrun/homes").parent.mkdir(
        parents=True, exist_ok=True
    )
    homes.touch()
    code, _, err = here("status", "--adopt", "H1")
    assert (code, "cannot remember the host of the run" in err) == (Exit.FAILED, True)
    homes.unlink()
    for words in (("--adopt", "H1"), ("H1",)):
        code, out, err = here("status", *words)
        assert (code, "COMPLETED" in out) == (0, True), err
        assert ("commands for this run are now executed on gpu1" in err) == ("--adopt" in words)
    assert here("list")[0] == 0
    assert here.asked == ["gpu1 -T"] * 3


def test_a_terminal_is_passed_on(here: Here) -> None:
    sleepers = [start(here.run("gpu1", job_id)) for job_id in ("L1", "L2")]
    end_of_terminal, terminal = os.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    env = {"TERM": "xterm"}
    try:
        asking = here.popen("cancel", "L1", "L2", env=env, **streams)
        shown = b""
        while b"Cancel 2 jobs" not in shown:
            shown += os.read(end_of_terminal, 1000)
        os.write(end_of_terminal, b"n\n")
        assert asking.wait(20 * patience()) == Exit.FAILED
        assert [sleeper.poll() for sleeper in sleepers] == [None, None]
        assert here.popen("status", "L1", env=env, **streams).wait(20 * patience()) == 0
        assert b"\x1b[" in os.read(end_of_terminal, 10_000).split(b"state")[1]
        assert here.asked == ["gpu1 -t", "gpu1 -t"]
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        os.close(terminal)
        os.close(end_of_terminal)
