"""The environment as one file, and a node's copy of it: `launch.stage`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clusterrun.backends.slurm import stage
from clusterrun.config.choices import Stage
from clusterrun.errors import ClusterrunError
from clusterrun.rundir.paths import RunPaths
from tests.launch.samples import on_slurm
from tests.namespaces import small_disk
from tests.patience import finished, patience

MODULE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages/weights.py"
IMPORT = "-c 'import weights; print(weights.__file__)'"
START = 'clusterrun_python="{python}"; source "$1"; exec "$clusterrun_python" {then}'


@dataclass
class Node:
    """One node: what its job packed and sends, and what node.sh would run."""

    tmp: Path
    env: Path
    job: str = "7"
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.run_dir = self.tmp / "runs" / "train" / "1"
        self.run_dir.mkdir(parents=True)
        self.home = self.tmp / "disk" / "clusterrun-stage-0"
        self.home.parent.mkdir(exist_ok=True)

    def prepare(self) -> stage.Pack:
        """Pack, and write the script, as the batch host does."""
        pack = stage.ensure_pack(self.tmp / "runs" / ".stage-0", self.env)
        stage.write_script(RunPaths(root=self.run_dir), str(self.home), pack)
        self.home.mkdir(mode=0o700, exist_ok=True)
        return pack

    def send(self, pack: stage.Pack) -> Path:
        target = self.home / f"{Path(pack.path).stem}.{self.job}.tar"
        shutil.copy(pack.path, target)
        return target

    def look(self, act: str = "look") -> str:
        done = self._bash(f'bash "$1" {act}')
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    def start(self, then: str = IMPORT) -> tuple[str, str]:
        """Return the module's file that a rank would import, and what the node prints."""
        done = self._bash(START.format(python=self.env / "bin" / "python", then=then))
        return done.stdout.strip(), done.stderr

    def _bash(self, text: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "SLURM_JOB_ID": self.job, "SLURMD_NODENAME": "n1"}
        argv = ["bash", "-c", text, "bash", str(self.run_dir / "stage.sh")]
        return finished(argv, env=environ)

    def copies(self) -> list[Path]:
        return [path for path in self.home.iterdir() if path.is_dir()]


@pytest.fixture(name="node")
def _node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    env = tmp_path / "an env's"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    (env / MODULE).write_text("SIZE = 1\n")
    monkeypatch.setattr(sys, "prefix", str(env))
    monkeypatch.setattr(sys, "executable", str(env / "bin" / "python"))
    return Node(tmp=tmp_path, env=env)


def test_a_rank_imports_the_same_module_from_the_nodes_disk_and_later_jobs_reuse_it(
    node: Node,
) -> None:
    pack = node.prepare()
    assert node.look() == "lacks"
    tar = node.send(pack)
    assert node.look("unpack") == ""
    assert not tar.exists()
    found, said = node.start()
    (copy,) = node.copies()
    assert (found, said) == (str(copy / "env" / MODULE), "")
    assert oct(copy.stat().st_mode)[-3:] == oct(node.home.stat().st_mode)[-3:] == "700"
    assert os.stat(pack.path).st_mode & 0o777 == 0o600
    # Its own bytecode does not make a copy look damaged.
    assert (copy / "env" / MODULE).parent.joinpath("__pycache__").exists()
    node.job = "8"
    written = os.stat(pack.path).st_mtime_ns
    assert node.prepare() == pack
    assert os.stat(pack.path).st_mtime_ns == written
    assert node.look() == ""
    assert node.start() == (found, "")


def test_the_path_is_the_same_and_nothing_is_read_from_the_original(node: Node) -> None:
    config = node.env / "pyvenv.cfg"
    config.write_text(config.read_text().replace("packages = false", "packages = true"))
    project = node.tmp / "project"
    project.mkdir()
    (project / "edited.py").write_text("SIZE = 1\n")
    (node.env / MODULE).with_name("editable.pth").write_text(f"{project}\n")
    show = "import sys; print(*sys.path, sep=chr(10))"
    argv = [str(node.env / "bin" / "python"), "-c", show]
    before = subprocess.run(argv, capture_output=True, text=True).stdout.strip()
    node.send(node.prepare())
    node.look("unpack")
    (copy,) = node.copies()
    (node.env / "lib").rename(node.env / "gone")
    assert node.start(f"-c '{show}'")[0] == before.replace(str(node.env), str(copy / "env"))
    (project / "edited.py").write_text("SIZE = 22\n")
    assert node.start("-c 'import weights, edited; print(edited.SIZE)'") == ("22", "")


def test_a_changed_file_makes_another_copy_and_the_last_ones_are_kept(node: Node) -> None:
    found, packs = [], []
    for number in range(stage.KEPT_PACKS + 1):
        (node.env / MODULE).write_text(f"SIZE = {number}\n")
        os.utime(node.env / MODULE, (number, number))
        pack = node.prepare()
        packs.append(Path(pack.path))
        os.utime(packs[-1].with_suffix(".json"), (number, number))
        node.send(pack)
        assert node.look("unpack") == ""
        size, said = node.start("-c 'import weights; print(weights.SIZE)'")
        assert (size, said) == (str(number), "")
        (newest,) = set(node.copies()) - set(found)
        found.append(newest)
        os.utime(newest, (number, number))
    assert set(node.copies()) == set(found[-2:])
    assert [path.exists() for path in packs] == [False, *[True] * stage.KEPT_PACKS]
    (node.env / MODULE).parent.joinpath("__pycache__").mkdir()
    packs[-1].write_bytes(b"short")  # a damaged one is made again
    pack = node.prepare()
    assert pack.path == str(packs[-1])  # bytecode does not count
    assert os.path.getsize(pack.path) == pack.size > 5
    packs[-1].parent.chmod(0o770)
    with pytest.raises(ClusterrunError, match="must be your own directory, with mode 700"):
        node.prepare()


def test_a_file_that_did_not_arrive_whole_is_not_used(node: Node) -> None:
    def flip(tar: Path) -> None:
        tar.write_bytes(tar.read_bytes().replace(b"SIZE = 1", b"SIZE = 2"))

    cut = f"cannot unpack the copy; check the space in {node.home}"
    harms: dict[str, Callable[[Path], None]] = {
        cut: lambda tar: os.truncate(tar, tar.read_bytes().index(b"SIZE = 1")),
        "the copy on this node is damaged": flip,
        "the packed environment did not arrive": Path.unlink,
    }
    for why, harm in harms.items():
        harm(node.send(node.prepare()))
        assert node.look("unpack") == f"unfit: n1: {why}"
        assert list(node.home.iterdir()) == []
        found, said = node.start()
        assert found == str(node.env / MODULE)
        prefix = "clusterrun: n1: uses the environment on the shared file system: "
        assert said.startswith(f"{prefix}there is no undamaged copy in {node.home}/")
        assert said.count("\n") == 1


def test_a_damaged_copy_is_replaced_unless_a_job_uses_it(node: Node) -> None:
    node.send(node.prepare())
    node.look("unpack")
    (copy,) = node.copies()
    user = subprocess.Popen(
        ["flock", "-s", str(copy), "sh", "-c", "echo held; read end"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert user.stdout is not None
    assert user.stdout.readline() == b"held\n"
    damaged = copy / "env" / MODULE
    damaged.write_text("")
    assert node.look() == "lacks"
    node.send(node.prepare())
    assert node.look("unpack") == "unfit: n1: the copy on this node is damaged and in use"
    assert node.start()[0] == str(node.env / MODULE)
    user.communicate(b"\n")
    node.send(node.prepare())
    assert node.look("unpack") == ""
    assert node.start() == (str(damaged), "")


def test_an_agent_holds_its_copy_until_it_exits(node: Node) -> None:
    node.send(node.prepare())
    node.look("unpack")
    held = "import subprocess, sys; p = sys.prefix[:-4]; " + (
        "print(subprocess.run(['flock', '-n', '-x', p, 'true']).returncode)"
    )
    assert node.start(f'-c "{held}"') == ("1", "")
    (copy,) = node.copies()
    assert subprocess.run(["flock", "-n", "-x", str(copy), "true"]).returncode == 0


def test_two_jobs_at_once_unpack_one_copy(node: Node) -> None:
    node.send(pack := node.prepare())
    environ = {**os.environ, "SLURMD_NODENAME": "n1"}
    shutil.copy(pack.path, node.home / f"{Path(pack.path).stem}.8.tar")
    jobs = [
        subprocess.Popen(
            ["bash", str(node.run_dir / "stage.sh"), "unpack"],
            env={**environ, "SLURM_JOB_ID": job},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in ("7", "8")
    ]
    answers = [job.communicate(timeout=60 * patience()) for job in jobs]
    (copy,) = node.copies()
    assert answers == [("", None)] * 2
    assert [path.name for path in node.home.iterdir()] == [copy.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_node_without_room_refuses_the_file(node: Node) -> None:
    with small_disk(node.home.parent, 16):
        node.prepare()
        assert re.match(rf"unfit: n1: {node.home} has no room for \d+ MiB", node.look())


def test_what_is_not_staged(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage.unstageable(node.env, Stage.TAR) == ""
    assert " is on " in stage.unstageable(node.env, Stage.AUTO)
    monkeypatch.setattr(stage, "file_system", lambda _: "lustre")
    assert stage.unstageable(node.env, Stage.AUTO) == ""
    (node.env / "pyvenv.cfg").unlink()
    assert stage.unstageable(node.env, Stage.TAR).endswith(
        "neither a virtual environment nor a conda environment"
    )


def test_copies_go_to_a_disk_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = on_slurm(stage_dir=str(tmp_path))
    assert stage.node_directory(given, {}) == f"{tmp_path}/clusterrun-stage-{os.getuid()}"
    monkeypatch.setattr(stage, "file_system", lambda _: "tmpfs")
    assert stage.node_directory(given, {}).startswith(str(tmp_path))
    with pytest.raises(ClusterrunError, match=f"{tmp_path} is on tmpfs; set launch.stage_dir to "):
        stage.node_directory(on_slurm(), {"TMPDIR": str(tmp_path)})
    monkeypatch.setattr(stage, "file_system", lambda _: "nfs4")
    with pytest.raises(ClusterrunError, match=f"{tmp_path} is on nfs4"):
        stage.node_directory(given, {})
