"""Hosts that have neither the project nor its environment get both from the submitting machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.hosts import Hosts
from tests.hosts.machine import PYTHON

pytestmark = pytest.mark.ssh

RUN = ("--cluster", "ssh", "--hosts", "h1,h2", "--nproc-per-node", "1", "--device", "cpu")
# A lock of one package, whose only file leads to the packages of this checkout: no index is needed.
SMALL_LOCK = """\
import sys
from importlib.metadata import Distribution
from pathlib import Path
from clusterrun.backends.hosts import environment
from clusterrun.cli.main import main
package = Distribution.at(Path("../package/here-1.dist-info"))
environment.lock_environment = lambda: environment.lock_of([package])
sys.exit(main())
"""
SCRIPT = """\
import os, sys
from torch import distributed
distributed.init_process_group("gloo")
print("of", distributed.get_world_size(), sys.prefix, os.getcwd(), sorted(os.listdir()))
sys.exit(3 if os.environ["CLUSTERRUN_ATTEMPT"] == "1" else 0)
"""


def clusterrun(hosts: Hosts, *words: str, timeout_s: float = 60) -> tuple[int, str]:
    """Run a command in the project on the laptop; return its exit status and all its output."""
    argv = ["python", "-m", "clusterrun", *words]
    done = hosts.laptop.run(argv, cwd="/home/ann/proj", timeout_s=timeout_s)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(name="apart")
def _apart(hosts: Hosts) -> Hosts:
    hosts.share()
    hosts.laptop.write("proj/train.py", SCRIPT)
    hosts.laptop.write("proj/lib/a.py", "")
    return hosts


def test_a_project_that_hosts_cannot_use_is_refused_before_it_is_sent(apart: Hosts) -> None:
    code, said = clusterrun(
        apart, "submit", *RUN, "train.py", "--config", "/home/ann/proj/lib/a.py"
    )
    assert code == 2
    assert "error: --config: /home/ann/proj/lib/a.py exists only on this machine" in said
    assert apart.leftovers(r"/home/ann/proj/(train\.py|lib/a\.py)") == []


def package(hosts: Hosts) -> None:
    """Write the installed package of `SMALL_LOCK` on the laptop."""
    info = "package/here-1.dist-info"
    files = {
        "here.pth": "\n".join(path for path in sys.path if path.endswith("-packages"))
        + f"\n{Path(__file__).resolve().parents[2]}\n",
        "here-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: here\nVersion: 1\n",
        "here-1.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "here-1.dist-info/direct_url.json": json.dumps({"url": "file:///gone", "dir_info": {}}),
    }
    for name, text in files.items():
        hosts.laptop.write(f"package/{name}", text)
    names = (*files, "here-1.dist-info/RECORD")
    hosts.laptop.write(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))


@pytest.mark.long
def test_hosts_build_the_environment_once_and_a_resumed_run_uses_it(apart: Hosts) -> None:
    package(apart)
    apart.laptop.write("proj/.env", "")
    apart.laptop.write("submit.py", SMALL_LOCK)
    words = ["submit", *RUN, "--environment", "copy", "--max-restarts", "0", "train.py"]
    done = apart.laptop.run(
        [str(PYTHON), "../submit.py", *words], cwd="/home/ann/proj", timeout_s=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: .env is not copied: it may hold a secret\n" in done.stderr
    for host in ("h1", "h2"):
        assert f"note: {host}: building the environment (1 packages)\n" in done.stderr
    assert "state      FAILED" in clusterrun(apart, "status", "--wait", timeout_s=120)[1]
    code, said = clusterrun(apart, "resume", "--from", "scratch", "--max-restarts", "1")
    assert code == 0, said
    assert "building" not in said
    assert "state      COMPLETED" in clusterrun(apart, "status", "--wait", timeout_s=120)[1]
    lines = [line for line in clusterrun(apart, "logs", "-a")[1].splitlines() if " of 2 " in line]
    assert len(lines) == 2
    for host, line in zip(("h1", "h2"), sorted(lines), strict=True):
        home = apart[host].accounts["ann"].home
        assert f"of 2 {home}/.cache/clusterrun/envs/" in line
        assert f"{home}/clusterrun/runs/train/" in line
        assert line.endswith("/project ['lib', 'train.py']")
    assert apart.leftovers(r"file /home/") == []
