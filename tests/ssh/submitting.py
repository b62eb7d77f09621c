"""Submit from one of the machines, and look at what it answers and leaves."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.health.stand_in import GCC, build
from tests.hosts import LAPTOP, Hosts
from tests.hosts.machine import PYTHON
from tests.patience import patience, wait_for

QUICK_S = 15.0
PROJECT = "/shared/project"
SLEEPS = "import time\nprint('started', flush=True)\ntime.sleep(600)\n"
# The newest job id stays, so that no other job gets it.
KEPT = r"local-job-id|/project/\w+\.py$|/home/\w+/py$|/\.bashrc$|/shared/nvml/|/fake/"


def start(
    hosts: Hosts,
    *options: str,
    machine: str = LAPTOP,
    user: str = "ann",
    script: str = "print('hello', flush=True)\n",
    device: str = "cpu",
    cwd: str = PROJECT,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start `clusterrun submit` with a project that has one script."""
    hosts[machine].write(f"{cwd}/hello.py", script, user=user)
    submit = ["clusterrun", "submit", "--cluster", "ssh", "--device", device]
    return hosts[machine].start([*submit, *options], user=user, cwd=cwd, env=env)


def submit(hosts: Hosts, *options: str, **about: str) -> subprocess.CompletedProcess[str]:
    """Submit to the end; `about` is that of `start`."""
    process = start(hosts, *options, "hello.py", **about)  # type: ignore[arg-type]
    out, err = process.communicate(timeout=60 * patience())
    return subprocess.CompletedProcess(options, process.returncode, out, err)


def refusal(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    """Return the exit status, the error and its hint, which are all after the job's summary."""
    found = re.fullmatch(r"(?:  (?:world|launcher) .*\n)*error: (.*)\n  hint: (.*)\n", done.stderr)
    assert found, done
    assert "Submitted" not in done.stdout
    return done.returncode, found[1], found[2]


def refusals(hosts: Hosts, cases: Mapping[str, tuple[int, str]], *options: str) -> None:
    """Submit to each list of hosts: exit status and error are those of the case."""
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda names: submit(hosts, "--hosts", names, *options), cases))
    found = [refusal(each)[:2] for each in done]
    for (code, error), (expected, pattern) in zip(found, cases.values(), strict=True):
        assert code == expected, error
        assert re.fullmatch(pattern, error), error
    nothing_left(hosts)


def nothing_left(hosts: Hosts, *besides: str) -> None:
    """Wait until no process, lock or file of a run is left on any machine.

    A courier may start while its controller is killed; Python tries the directory of temporary
    files with one that it removes.
    """
    wait_for(lambda: not hosts.processes(), f"the end of {hosts.processes()}", timeout_s=10)
    if found := hosts.leftovers(KEPT, *besides):
        what = f"the end of {found}"
        wait_for(lambda: not (hosts.processes() or hosts.leftovers(KEPT, *besides)), what, 10)


def wrap(hosts: Hosts, names: tuple[str, ...], line: str, *users: str) -> None:
    """Have ~/py on machines run a line of sh, for users."""
    for name in names:
        for user in users or ("ann",):
            hosts[name].write("py", f"#!/bin/sh\n{line}\n", user=user)
            hosts[name].run(["chmod", "+x", "py"], user=user, check=True)


def gpus(hosts: Hosts, place: Path, names: tuple[str, ...], *users: str) -> None:
    """Give machines two GPUs each, which ~/py sees; /tmp/gpus there tells more about them."""
    if not GCC:
        pytest.skip("gcc was not found, which builds the stand-in for NVML")
    build(place)
    shutil.copytree(place, hosts.shared / "nvml", dirs_exist_ok=True)
    (hosts.shared / "nvml").chmod(0o755)
    driver = "LD_LIBRARY_PATH=/shared/nvml NVML_STAND_IN=/tmp/gpus"
    wrap(hosts, names, f'{driver} exec {PYTHON} "$@"', *users)
