"""What `pass_env` passes is in no command line and in no file, on any machine."""

from __future__ import annotations

import hashlib

import pytest

from tests.hosts import LAPTOP, Hosts
from tests.patience import finished, patience, wait_for
from tests.ssh.submitting import nothing_left, start

pytestmark = [pytest.mark.ssh, pytest.mark.long]

TOKEN = "hf_5ecret-with 'quotes' and $(spaces)"
SHOWS = """\
import hashlib, os, sys, time
print('passed', hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)
print('got', sys.argv[1:], os.getcwd(), flush=True)
time.sleep(float(os.environ.get('SLEEP', 0)))
"""


def found(hosts: Hosts, word: str) -> list[str]:
    """Return the files in which a word stands, in all that runs can write."""
    tops = [hosts.shared]
    for machine in hosts.machines.values():
        tops += [machine.home(), *map(machine.path, ("/tmp", "/var/tmp", "/dev/shm"))]
    argv = ["grep", "--recursive", "--files-with-matches", "--text", "--fixed-strings", word]
    return finished([*argv, *map(str, tops)]).stdout.splitlines()


@pytest.mark.parametrize("shared", [True, False])
def test_a_token_reaches_the_ranks_and_nothing_else(hosts: Hosts, shared: bool) -> None:
    """So do a job's name, directory and arguments, as they are."""
    if not shared:
        hosts.share(LAPTOP)
    cwd, odd = "/shared/my project's", ["$(touch /tmp/ran)", "it's", 'a "b"', "two  spaces"]
    options = ["--hosts", "h1,h2", "--pass-env", "TOKEN", "--job-name", "my 'first' job"]
    options += ["--set", "launch.world_contract=false", "hello.py"]
    with hosts.all_command_lines() as lines:
        process = start(hosts, *options, *odd, cwd=cwd, script=SHOWS, env={"TOKEN": TOKEN})
        out, err = process.communicate(timeout=120 * patience())
        assert process.returncode == 0, err
        wait_for(lambda: not hosts.processes(), "the end of the run")
    logs = hosts.laptop.run(["clusterrun", "logs", "-a", "-n", "all", out.split()[3]], cwd=cwd)
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    assert logs.stdout.count(f"passed {digest}") == 2, logs
    assert logs.stdout.count(f"got {odd}") == 2, logs
    for part in ("hf_5ecret", "5ecret-with"):
        assert not [line for line in lines if part in line]
        assert found(hosts, part) == []
    assert hosts.leftovers(r"/runs/|roots\.|/homes/|local-job-id|clusterrun/key|/hello\.py$") == []


@pytest.mark.parametrize("ending", ["cancel", "failure", "refusal"])
def test_nothing_is_left_after_any_end(hosts: Hosts, ending: str) -> None:
    hosts.share(LAPTOP)
    environ = {"TOKEN": TOKEN, "SLEEP": "600"}
    script = "raise SystemExit(3)" if ending == "failure" else SHOWS
    names = "h1,h9" if ending == "refusal" else "h1,h2"
    options = ["--hosts", names, "--pass-env", "TOKEN", "hello.py"]
    out, err = start(hosts, *options, script=script, env=environ).communicate(
        timeout=120 * patience()
    )
    if ending == "cancel":
        job_id = out.split()[3]
        logs = ["clusterrun", "logs", job_id]
        wait_for(lambda: "got" in hosts.laptop.run(logs, cwd="/shared/project").stdout, "a rank")
        hosts.laptop.run(["clusterrun", "cancel", "-y", job_id], cwd="/shared/project", check=True)
    wait_for(lambda: not hosts.processes(), f"the end of the run: {err}")
    assert found(hosts, "hf_5ecret") == []
    nothing_left(hosts, r"/runs/|roots\.|/homes/|clusterrun/key")
