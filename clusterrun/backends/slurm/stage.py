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
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import NoReturn

from clusterrun.config.choices import Stage
from clusterrun.errors import ClusterrunError, NodeExit, describe
from clusterrun.health.paths import LOCAL, file_system
from clusterrun.launch.plan import Plan
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.reading import read_plan
from clusterrun.shared import assets, files, shell
from clusterrun.shared.given import STAGED_AT
from clusterrun.shared.locks import locked
from clusterrun.shared.wording import count

PACK_S = 900.0  # also for another job that packs
ASK_S, SEND_S = 120.0, 600.0
KEPT_PACKS = 3
THREADS = 16  # that read a directory each: a shared file system answers slowly
STEP_WORDS = 6  # bash node.sh RUN_DIR ATTEMPT HOST PORT, at the end of srun's command
SPARE_KIB = 1 << 20  # of a node's disk, for everything else


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A packed environment: the file and its hash."""

    path: str
    sha: str
    size: int


def main(argv: Sequence[str]) -> NoReturn:
    """Stage the environment for the attempt of an srun, and become it."""
    run_dir, *srun = argv
    paths = RunPaths(root=Path(run_dir))
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm's warnings, for the conductor
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(NodeExit.CANCELLED))
    try:
        paths.stage_script.unlink(missing_ok=True)
        _stage(paths, read_plan(paths), srun)
    except Exception as error:  # noqa: BLE001 - staging must not fail a training
        with contextlib.suppress(OSError):
            paths.stage_script.unlink()
        say_on_stderr(f"the nodes use the original {sys.prefix}: {describe(error)}")
    # What is ignored here, the last two by Python, srun would ignore, too.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.environ[STAGED_AT] = f"{time.time():.3f}"
    os.execvp(srun[0], srun)


def _stage(paths: RunPaths, plan: Plan, srun: Sequence[str]) -> None:
    """Write stage.sh, and send the environment to nodes that lack it. Raises ClusterrunError."""
    prefix = Path(sys.prefix)
    if why := unstageable(prefix, plan.stage):
        raise ClusterrunError(why)
    root = node_directory(plan, os.environ)
    pack = ensure_pack(paths.root.parents[1] / f".stage-{os.getuid()}", prefix)
    write_script(paths, root, pack)
    lacking, unfit = _on_nodes(srun, paths, "look", ASK_S)
    if unfit:
        raise ClusterrunError(unfit)
    if lacking:
        target = f"{root}/{Path(pack.path).stem}.{os.environ['SLURM_JOB_ID']}.tar"
        _output(["sbcast", "--force", pack.path, target], SEND_S)
        _, unfit = _on_nodes(srun, paths, "unpack", SEND_S)
    what = f"staged {prefix} ({pack.size >> 20} MiB) in {root}; {count(lacking, 'node')} lacked it"
    say_on_stderr(f"{what}; not on {unfit}" if unfit else what)


def unstageable(prefix: Path, stage: Stage) -> str:
    """Return why an environment is not staged; "" if it is."""
    if not any((prefix / name).exists() for name in ("pyvenv.cfg", "conda-meta")):
        return f"{prefix} is neither a virtual environment nor a conda environment"
    if (prefix / "conda-meta").exists() and any((prefix / "envs").glob("*")):
        return f"{prefix} contains other conda environments"
    kind = file_system(prefix)
    if stage is Stage.AUTO and kind in LOCAL:
        return f"{prefix} is on {kind}, a local file system ('stage: tar' copies it anyway)"
    return ""


def node_directory(plan: Plan, environ: Mapping[str, str]) -> str:
    """Return the directory for copies on the nodes. Raises ClusterrunError if it is on no disk."""
    place = os.path.realpath(plan.stage_dir or environ.get("TMPDIR") or "/tmp")
    kind = file_system(Path(place))
    # A copy in memory would take it from later jobs, so a user must name that directory.
    if kind not in LOCAL or (kind in ("tmpfs", "ramfs") and not plan.stage_dir):
        where = f"{place} is on {kind or 'an unknown file system'}"
        raise ClusterrunError(f"{where}; set launch.stage_dir to a directory on the nodes' disks")
    return f"{place}/clusterrun-stage-{os.getuid()}"


def key_of(prefix: Path) -> str:
    """Return a hash of the names, modes, sizes and times of all files but imports' bytecode."""
    digest = hashlib.sha256(f"2 {prefix}".encode(errors="surrogateescape"))  # 2: key version
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
            if not entry.is_dir(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                lines.append(f"{entry.name} {found.st_mode} {found.st_size} {found.st_mtime_ns}")
            elif entry.name != "__pycache__":
                directories.append(entry.path)
    return lines, directories


def ensure_pack(cache: Path, prefix: Path) -> Pack:
    """Return the packed environment, and make it if needed. Raises ClusterrunError and OSError."""
    cache.mkdir(mode=0o700, exist_ok=True)
    status = cache.lstat()  # other users may also write to the directory that it is in
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o077:
        raise ClusterrunError(f"{cache} must be your own directory, with mode 700")
    key = key_of(prefix)
    path, record = cache / f"{key}.tar", cache / f"{key}.json"
    with locked(cache / "lock", PACK_S):
        known = files.read_json(record) or {}
        if path.exists() and known.get("size") == files.size_of(path):
            os.utime(record)  # the packs that were used last are kept
            return Pack(**known)
        text = f"packing {prefix} for the nodes; later jobs with the same --run-dir reuse it"
        say_on_stderr(text)
        by_use = sorted(cache.glob("*.json"), key=lambda each: each.stat().st_mtime)
        old = by_use[: -(KEPT_PACKS - 1)]  # with this one, KEPT_PACKS are left
        # A temporary file is of a job that was killed while it held the lock.
        for left in (*old, *(each.with_suffix(".tar") for each in old), *cache.glob(".*.tmp")):
            left.unlink(missing_ok=True)
        with files.replacing(path) as temporary:
            sha = _write_tar(temporary, prefix)
            if key_of(prefix) != key:
                raise ClusterrunError(f"{prefix} changed while it was packed")
        pack = Pack(path=str(path), sha=sha, size=files.size_of(path))
        files.write_whole(record, json.dumps(asdict(pack)))
        return pack


def _write_tar(path: Path, prefix: Path) -> str:
    """Write the environment, with its bytecode; return the file's hash."""
    with files.open_new(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
        tar.format = tarfile.GNU_FORMAT
        tar.add(prefix, "env")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def write_script(paths: RunPaths, root: str, pack: Pack) -> None:
    """Write stage.sh, which unpacks into `root` on each node; `kib` is the space needed there."""
    values = {
        "root": root,
        "key": Path(pack.path).stem,
        "python": sys.executable,
        "inside": os.path.relpath(sys.executable, sys.prefix),  # its place in the copy
        "sha": pack.sha,
        "kib": str(2 * pack.size // 1024 + SPARE_KIB),  # the packed file, the copy, and the rest
    }
    lines = [f"clusterrun_stage_{name}={quote(value)}\n" for name, value in values.items()]
    text = "".join(lines) + (assets.template_directories()[0] / "stage.sh").read_text()
    files.write_whole(paths.stage_script, text)


def _on_nodes(srun: Sequence[str], paths: RunPaths, act: str, within_s: float) -> tuple[int, str]:
    """Run stage.sh on all nodes of the job, spares included; `act` is "look" or "unpack".

    Return how many nodes lack the file, and which node is unfit and why; "" if none is.
    """
    nodes = os.environ["SLURM_JOB_NUM_NODES"]
    whole = [*srun[:-STEP_WORDS], f"--nodes={nodes}", f"--ntasks={nodes}"]  # without its command
    lines = _output([*whole, "bash", str(paths.stage_script), act], within_s).splitlines()
    unfit = [line.removeprefix("unfit: ") for line in lines if line.startswith("unfit: ")]
    return lines.count("lacks"), unfit[0] if unfit else ""


def _output(argv: Sequence[str], within_s: float) -> str:
    """Return what a command prints. Raises ClusterrunError if it fails or takes too long."""
    done = shell.run_once(argv, within_s)
    if done.rc == shell.TIMED_OUT:
        raise ClusterrunError(f"{argv[0]} was still running after {within_s:.0f} s")
    if done.rc:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.rc}"]
        raise ClusterrunError(f"{argv[0]} failed: {lines[0]}")
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
