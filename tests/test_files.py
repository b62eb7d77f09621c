"""Files are written whole or not at all, locks never hold for ever, and limits are raised."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.errors import ClusterrunError
from clusterrun.shared import files, locks
from clusterrun.shared.locks import locked
from clusterrun.shared.state import JobState, parse_slurm_state


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_and_private_and_a_write_that_fails_leaves_nothing(
    tmp_path: Path,
) -> None:
    target = tmp_path / "a"
    target.write_text("old")
    files.write_whole(target, "new \udce9")
    assert target.read_bytes() == b"new \xe9"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write_whole(tmp_path / "taken", "text")
    assert names(tmp_path) == ["a", "taken"]


def test_the_first_to_create_a_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.create(tmp_path / "claim", "node1\n")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "claim", "node2\n")
    assert (tmp_path / "claim").read_text() == "node1\n"
    link = os.link

    def repeated(*args: Path) -> None:
        link(*args)
        raise FileExistsError

    monkeypatch.setattr(os, "link", repeated)
    files.create(tmp_path / "lost", "node1\n")  # the answer to the link was, and it is ours
    assert names(tmp_path) == ["claim", "lost"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "\ud800", "[" * 100_000, "1" * 5000])
def test_what_is_no_json_object_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert files.read_json(path) is None
    assert files.read_json(tmp_path / "missing") is None


HOLDER = """\
import sys, time, pathlib
from clusterrun.shared.locks import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_that_is_never_released_is_an_error_that_names_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".lock"
    argv = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(locks, "WAIT_S", 0.2)
        with pytest.raises(ClusterrunError, match=f"process {holder.pid} on "), locked(path):
            pass
        holder.kill()
    with locked(path):
        assert os.listdir(tmp_path) == [".lock"]


def test_a_file_system_without_locks_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked(tmp_path / ".lock"), locked(tmp_path / ".lock"):
        pass


RAISE = """
import resource
from clusterrun.shared.files import raise_descriptor_limit
found = raise_descriptor_limit({wanted})
assert found <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print(found, *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_soft_limit_is_raised_as_far_as_the_hard_one_allows() -> None:
    for soft, wanted, limits in (
        (256, "", "1000 1000 1000"),
        (256, "500", "500 500 1000"),
        (600, "500", "600 600 1000"),
        (256, "5000", "1000 1000 1000"),
    ):
        code = RAISE.format(wanted=wanted)
        shell = f"ulimit -Sn {soft} && ulimit -Hn 1000 && exec {sys.executable} -c '{code}'"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == limits


# As Slurm writes them, and ours, by name.
WORDS = {
    **{" RUNNING \n": "RUNNING", "CANCELLED by 60001": "CANCELLED", "CANCELLED+": "CANCELLED"},
    **{"REQUEUE_HOLD": "PENDING", "STOPPED": "SUSPENDED", "STAGE_OUT": "COMPLETING"},
    **dict.fromkeys(("", " ", "+", "COMPLET+", "HIBERNATING", "LAUNCH_FAILED", "0"), "UNKNOWN"),
    **{each.value: each.value for each in JobState},
}


def test_states_are_read_in_each_form_that_slurm_writes() -> None:
    assert {text: parse_slurm_state(text).name for text in WORDS} == WORDS


def test_states_split_into_ended_and_active() -> None:
    active = {each.value for each in JobState if not each.is_terminal}
    assert active == {*("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "UNKNOWN")}
    assert [each for each in JobState if each.is_success] == [JobState.COMPLETED]
