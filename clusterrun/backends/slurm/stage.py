"""Copy the environment to the disk of each node, then become srun (`launch.stage`).

The environment is packed into `<runs>/.stage-<uid>/<key>.tar`, once for all jobs with these runs
until a file of the environment changes. `sbcast` sends the file to the nodes, unless all have a
copy, and templates/stage.sh unpacks it. If anything fails, the nodes use the environment where it
is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import stat
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, NoReturn, cast

from clusterrun.config.choices import Stage
from clusterrun.errors import ClusterrunError, NodeExit, describe
from clusterrun.health.paths import LOCAL, file_system
from clusterrun.launch.plan import Plan
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.plan import read_plan
from clusterrun.rundir.request import Reason, read_request
from clusterrun.rundir.startup import STAGED_AT
from clusterrun.shared import assets, files, shell
from clusterrun.shared.locks import locked
from clusterrun.shared.wording import count

PACK_S = 900.0  # also for another job that packs
ASK_S, SEND_S = 120.0, 600.0
KEPT_PACKS = 3
THREADS = 16  # that read a directory each: a shared file system answers slowly
STEP_WORDS = 4  # bash node.sh RUN_DIR ATTEMPT, at the end of srun's command
SPARE_KIB = 1 << 20  # of a node's disk, for everything else


class _UnstagedError(ClusterrunError):
    """Why the nodes use the environment on the shared file system."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A packed environment: the file, its hash, and the files in it."""

    path: str
    sha: str
    size: int
    files: int

    @property
    def kib(self) -> int:
        """Return the space that a node needs: the file, what it contains, and some spare."""
        return (2 * self.size + 4096 * self.files) // 1024 + SPARE_KIB


def main(argv: Sequence[str]) -> NoReturn:
    """Stage the environment for the attempt of an srun, and become it."""
    run_dir, attempt, *srun = argv
    paths = RunPaths(root=Path(run_dir))
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's warnings, for the conductor
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(NodeExit.CANCELLED))
    request = paths.request(int(attempt))
    threading.Thread(target=_end_when_asked, args=(request,), daemon=True).start()
    try:
        paths.stage_script.unlink(missing_ok=True)
        _stage(paths, read_plan(paths), srun)
    except Exception as error:  # noqa: BLE001 - staging must not fail a training
        with contextlib.suppress(OSError):
            paths.stage_script.unlink()
        why = describe(error) if isinstance(error, ClusterrunError) else str(error)
        say_on_stderr(f"the nodes use {sys.prefix} where it is: {why}")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.environ[STAGED_AT] = f"{time.time():.3f}"
    os.execvp(srun[0], srun)


def _end_when_asked(request: Path) -> None:
    while read_request(request) is not Reason.END:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def _stage(paths: RunPaths, plan: Plan, srun: Sequence[str]) -> None:
    """Write stage.sh, and send the environment to nodes that lack it. Raises ClusterrunError."""
    prefix = Path(sys.prefix)
    if why := unstageable(prefix, plan.stage):
        raise _UnstagedError(why)
    root = node_directory(plan, os.environ)
    begin = time.monotonic()
    key = key_of(prefix)
    pack = ensure_pack(paths.root.parents[1] / f".stage-{os.getuid()}", prefix, key)
    packed = time.monotonic()
    _write_script(paths, root, key, pack)
    lacking, unfit = _answers(_on_nodes(srun, paths, "look", ASK_S))
    if unfit:
        raise _UnstagedError(unfit)
    if lacking:
        target = f"{root}/{key}.{os.environ['SLURM_JOB_ID']}.tar"
        try:
            _output(["sbcast", "--force", pack.path, target], SEND_S)
        except _UnstagedError:
            _on_nodes(srun, paths, "unpack", SEND_S)  # some nodes have the file
            raise
        _, unfit = _answers(_on_nodes(srun, paths, "unpack", SEND_S))
    what = f"staged {prefix} ({pack.size >> 20} MiB) in {root}; {count(lacking, 'node')} lacked it"
    took = f"{packed - begin:.1f} s to pack, {time.monotonic() - packed:.1f} s to send and unpack"
    say_on_stderr(f"{what}; {took}{unfit and f'; not on {unfit}'}")


def unstageable(prefix: Path, stage: Stage) -> str:
    """Return why an environment is not staged; "" if it is."""
    if not any((prefix / name).exists() for name in ("pyvenv.cfg", "conda-meta")):
        return f"{prefix} is neither a virtual environment nor one of conda"
    if not Path(sys.executable).is_relative_to(prefix):
        return f"{sys.executable} is not in {prefix}"
    kind = file_system(prefix)
    if stage is Stage.AUTO and kind in LOCAL:
        return f"{prefix} is on {kind}, a local file system ('stage: tar' copies it anyway)"
    return ""


def node_directory(plan: Plan, environ: Mapping[str, str]) -> str:
    """Return the directory for copies on the nodes. Raises ClusterrunError if it is not on a disk.

    A copy in memory would take it from later jobs, so a user must name that directory.
    """
    place = os.path.realpath(plan.stage_dir or environ.get("TMPDIR") or "/tmp")
    kind = file_system(Path(place))
    if kind not in LOCAL or (kind in ("tmpfs", "ramfs") and not plan.stage_dir):
        where = f"{place} is on {kind or 'an unknown file system'}"
        raise _UnstagedError(f"{where}; name a directory on the nodes' disks: launch.stage_dir")
    return f"{place}/clusterrun-stage-{os.getuid()}"


# The environment


def key_of(prefix: Path) -> str:
    """Return a hash of the names, sizes and times of all files but those that imports write."""
    digest = hashlib.sha256(f"1 {prefix}".encode(errors="surrogateescape"))
    level = [str(prefix)]
    with ThreadPoolExecutor(THREADS) as pool:
        while level:
            found = list(pool.map(_read_directory, level))
            for lines, _ in found:
                digest.update("\n".join(lines).encode(errors="surrogateescape"))
            level = [below for _, directories in found for below in directories]
    return digest.hexdigest()[:24]


def _read_directory(path: str) -> tuple[list[str], list[str]]:
    """Return what identifies the files of a directory, and the directories in it."""
    lines, directories = [path], []
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                if not _is_left_out(path, entry.name):
                    directories.append(entry.path)
                continue
            found = entry.stat(follow_symlinks=False)
            lines.append(f"{entry.name} {found.st_mode} {found.st_size} {found.st_mtime_ns}")
    return lines, directories


def _is_left_out(directory: str, name: str) -> bool:
    """Return whether a directory is no part of the key: bytecode, or conda's other environments."""
    is_conda = name in ("envs", "pkgs") and os.path.isdir(f"{directory}/conda-meta")
    return name == "__pycache__" or is_conda


# The file


def ensure_pack(cache: Path, prefix: Path, key: str) -> Pack:
    """Return the packed environment, and make it if needed. Raises ClusterrunError and OSError."""
    cache.mkdir(mode=0o700, exist_ok=True)
    found = cache.lstat()  # in a directory of several users
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise _UnstagedError(f"{cache} is not a private directory of this user")
    with locked(cache / "lock", PACK_S):
        return _kept(cache / f"{key}.json") or _make(cache, prefix, key)


def _kept(record: Path) -> Pack | None:
    """Return a pack that is there and has its size, and note that it is used."""
    try:
        pack = Pack(**(files.read_json(record) or {}))
    except TypeError:
        return None
    if files.size_of(Path(pack.path)) != pack.size:
        return None
    os.utime(record)
    return pack


def _make(cache: Path, prefix: Path, key: str) -> Pack:
    say_on_stderr(f"packing {prefix} for the nodes, once for all jobs of this directory of runs")
    for left in cache.glob(".*.tmp"):  # of a job that was killed while it held the lock
        left.unlink()
    # Make room for another pack: keep those that were used last.
    records = sorted(cache.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for record in records[KEPT_PACKS - 1 :]:
        record.unlink()
        record.with_suffix(".tar").unlink(missing_ok=True)
    path = cache / f"{key}.tar"
    with files.replacing(path) as temporary:
        with files.open_new(temporary) as file:
            stream = _Hashed(file)
            number = _write_tar(stream, prefix)
        if key_of(prefix) != key:
            raise _UnstagedError(f"{prefix} changed while it was packed")
    size = files.size_of(path)
    pack = Pack(path=str(path), sha=stream.digest.hexdigest(), size=size, files=number)
    files.write_whole(path.with_suffix(".json"), json.dumps(asdict(pack)))
    return pack


class _Hashed:
    """A file that is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _write_tar(stream: _Hashed, prefix: Path) -> int:
    """Write the environment, with its bytecode; return how many files it has."""
    number = 0

    def counted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal number
        number += 1
        above, name = os.path.split(entry.name)
        is_other = above == "env" and _is_left_out(str(prefix), name)
        return None if is_other and entry.isdir() else entry

    with tarfile.open(fileobj=cast(Any, stream), mode="w|", format=tarfile.GNU_FORMAT) as tar:
        tar.add(prefix, "env", filter=counted)
    return number


# The nodes


def _write_script(paths: RunPaths, root: str, key: str, pack: Pack) -> None:
    values = {
        "root": root,
        "key": key,
        "python": sys.executable,
        "inside": os.path.relpath(sys.executable, sys.prefix),
        "sha": pack.sha,
        "kib": str(pack.kib),
    }
    lines = [f"clusterrun_stage_{name}={quote(value)}\n" for name, value in values.items()]
    text = "".join(lines) + (assets.template_directories()[0] / "stage.sh").read_text()
    files.write_whole(paths.stage_script, text)


def _on_nodes(srun: Sequence[str], paths: RunPaths, act: str, within_s: float) -> str:
    """Run stage.sh on all nodes of the job, spares included; return what it prints."""
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    whole = [*srun[:-STEP_WORDS], f"--nodes={nodes}", f"--ntasks={nodes}"]
    return _output([*whole, "bash", str(paths.stage_script), act], within_s)


def _answers(text: str) -> tuple[int, str]:
    """Return how many nodes lack the file, and which node is unfit and why; "" if none is."""
    lines = text.splitlines()
    unfit = [line for line in lines if line.startswith("unfit: ")]
    more = f" (and {len(unfit) - 1} more)" if len(unfit) > 1 else ""
    return lines.count("lacks"), unfit[0].removeprefix("unfit: ") + more if unfit else ""


def _output(argv: Sequence[str], within_s: float) -> str:
    done = shell.run_once(argv, within_s)
    if done.rc == shell.TIMED_OUT:
        raise _UnstagedError(f"{argv[0]} was still running after {within_s:.0f} s")
    if done.rc:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.rc}"]
        raise _UnstagedError(f"{argv[0]} failed: {lines[0]}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
