"""A machine is broken for real, in namespaces of its own, and `doctor` names what was broken.

Without the right to make namespaces, these tests are skipped; tests/test_health.py needs none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.test_doctor import Found, changed
from tests.patience import finished

UNSHARE = (
    *("unshare", "--map-root-user", "--mount", "--net"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
HEALTHY = """
set -e
for disk in runs scratch /dev/shm; do mount -t tmpfs -o size=20g,nr_inodes=100k t $disk; done
mount --rbind /sys/fs/cgroup groups
mount -t sysfs s /sys
mount --rbind groups /sys/fs/cgroup
ip link set lo up
"""
DOCTOR = (
    *(sys.executable, "-m", "clusterrun", "doctor", "--json", "--cluster", "local"),
    *("--device", "cpu", "--nproc-per-node", "2", "train.py"),
)
SERVER = (sys.executable, "-I", str(Path(__file__).with_name("file_server.py")), "runs")
INFINIBAND = """
mkdir -p class/infiniband/mlx5_0
mount --rbind class /sys/class
ulimit -l 64
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A directory that `doctor` runs in, on a machine that is healthy until it is broken."""

    path: Path

    def look(
        self,
        broken: str = "",
        under: tuple[str, ...] = (),
        setup: Callable[[], object] | None = None,
    ) -> Found:
        """Return what doctor finds after some lines of bash, started by the command `under`."""
        done = finished(
            [*UNSHARE, "bash", "-c", f'{HEALTHY}{broken}\nexec "$@"', "bash", *under, *DOCTOR],
            cwd=self.path,
            env=self.environ,
            preexec_fn=setup,
        )
        assert done.returncode in (0, 3), done.stderr
        return {each["id"]: each for each in json.loads(done.stdout)["checks"]}

    @property
    def environ(self) -> dict[str, str]:
        """The variables of a shell in which nothing is set."""
        here = {"HOME": str(self.path), "TMPDIR": str(self.path / "scratch")}
        return {"PATH": os.environ["PATH"], "CLUSTERRUN_SITE_CONFIG": "/dev/null", **here}


@pytest.fixture(scope="module", name="machine")
def _machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if os.geteuid() != 0:
        pytest.skip("only root may mount file systems anew")
    path = tmp_path_factory.mktemp("machine")
    for name in ("runs", "scratch", "groups"):
        (path / name).mkdir()
    (path / "train.py").write_text("print('hello')\n")
    argv = [*UNSHARE, "bash", "-c", HEALTHY]
    try:
        subprocess.run(argv, cwd=path, check=True, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no namespaces: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no namespaces with mounts and interfaces: {error.stderr.strip()}")
    return Machine(path=path)


@pytest.fixture(scope="module", name="before")
def _before(machine: Machine) -> Found:
    found = machine.look()
    assert {each["status"] for each in found.values()} == {"ok", "skip"}, found
    return found


class Break(NamedTuple):
    """A check, what it must find, and how the machine is broken."""

    id: str
    status: str
    hint: str
    how: str
    under: tuple[str, ...] = ()


BREAKS = [
    Break("path.runs", "fail", "--run-dir", "mount -o remount,ro runs"),
    Break("path.disk", "fail", "delete old runs", "mount -o remount,size=64m runs; {full}"),
    Break("path.disk", "note", "delete old runs", "mount -o remount,size=1g runs"),
    Break("path.inodes", "fail", "delete old runs", "mount -o remount,nr_inodes=900 runs; {many}"),
    Break("node.shm", "note", "--shm-size", "mount -o remount,size=64m /dev/shm"),
    Break("node.shm", "fail", "--shm-size", "mount -o remount,size=32m /dev/shm"),
    Break("node.shm", "fail", "ls -l /dev/shm", "{left}"),
    Break("node.files", "note", "ulimit -H -n", "ulimit -n 900"),
    Break("node.memlock", "note", "ulimit -H -l", INFINIBAND),
    Break("node.tmp", "fail", "--env TMPDIR", "mount -o remount,size=10m scratch"),
    Break("node.tmp", "fail", "--env TMPDIR", "mount -o remount,nr_inodes=100 scratch"),
    Break("node.tmp", "note", "--env TMPDIR", "mount -o remount,ro scratch"),
    Break("node.clock", "note", "chronyc tracking", "", (*SERVER, "0", "3600")),
    Break("node.clock", "note", "chronyc tracking", "", (*SERVER, "0", "-10")),
]
FILL = {
    "full": "fallocate -l 64m runs/full",
    "many": "(cd runs; seq 899 | xargs touch)",
    "left": "mount -o remount,size=1025m /dev/shm; fallocate -l 962m /dev/shm/left_over",
}


@pytest.mark.parametrize(
    "broken", BREAKS, ids=[f"{each.id}-{each.status}-{n}" for n, each in enumerate(BREAKS)]
)
def test_one_thing_is_broken(machine: Machine, before: Found, broken: Break) -> None:
    after = machine.look(broken.how.format(**FILL), broken.under)
    differs = changed(before, after)
    assert differs == {broken.id: broken.status}, {name: after[name] for name in differs}
    assert broken.hint in after[broken.id]["hint"]


@pytest.mark.long  # they wait until doctor gives up
@pytest.mark.parametrize(
    ("delay_s", "text"), [("0.3", "answered after "), ("inf", "does not answer")]
)
def test_a_file_system_that_is_slow_or_stuck(
    machine: Machine, before: Found, delay_s: str, text: str
) -> None:
    after = machine.look("", (*SERVER, delay_s, "0"))
    differs = changed(before, after)
    assert differs.pop("path.runs") == "note"
    assert text in after["path.runs"]["text"]
    assert "ls -d" in after["path.runs"]["hint"]
    assert set(differs.values()) <= {"skip"}, "nothing else is blamed"
    assert {name.partition(".")[0] for name in differs} <= {"path", "node"}
    assert after["node.shm"] == before["node.shm"]
