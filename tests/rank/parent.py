"""A parent that has imported modules, and forks what would else be started with a new Python.

An import of torch takes seconds of a processor, a fork takes none: so does the forge of a job.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.patience import patience
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("torch", "torch.distributed.fsdp", "torch.multiprocessing")
WORKER = ("clusterrun.rank.worker", "multiprocessing.spawn")
TRAINER = ("transformers.trainer", "transformers.training_args", "accelerate")


class Forked:
    """A process that a parent forked."""

    def __init__(self, home: Path, request: Mapping[str, Any]) -> None:
        self.returncode: int | None = None
        self._files = [Path(tempfile.mkstemp(dir=home)[1]) for _ in range(2)]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(home / "socket"))
        self._answers = self._connection.makefile("r")
        asked = {**request, "files": list(map(str, self._files))}
        self._connection.sendall(json.dumps(asked).encode() + b"\n")
        self.pid = int(self._answers.readline())

    def wait(self, timeout: float) -> int:
        """Return the exit status; kill what takes longer."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._answers.readline())
            except TimeoutError:
                self.kill()
                raise
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return what was written to stdout and stderr."""
        self.wait(timeout)
        out, err = (file.read_text() for file in self._files)
        return out, err

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork(
    argv: list[str], *, cwd: Path, env: Mapping[str, str], modules: tuple[str, ...] = TORCH
) -> Forked:
    """Start Python with arguments as a fork of a parent that has imported some modules."""
    return Forked(_parent(modules), {"argv": argv, "cwd": str(cwd), "env": dict(env)})


def ranks(
    argv: list[str],
    folders: Sequence[Path],
    *,
    modules: tuple[str, ...] = TORCH,
    own: Callable[[int], Mapping[str, str]] = lambda _: {},
    **env: str,
) -> list[tuple[str, str]]:
    """Run Python as ranks that end well, one in each folder; return what each wrote."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "CLUSTERRUN"))}
    size, port = len(folders), str(free_port())
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), **env}
    started = []
    for rank, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), **own(rank)}
        started.append(fork(argv, cwd=folder, env={**clean, **env, **mine}, modules=modules))
    try:
        told = [each.communicate(timeout=200 * patience()) for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * size, told
    return told


@functools.cache
def _parent(modules: tuple[str, ...]) -> Path:
    """Start a parent, which ends with this process; return its directory."""
    home = Path(tempfile.mkdtemp(prefix="clusterrun-parent-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.rank.parent", str(home / "socket"), *modules],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    return home


def serve(path: str, modules: list[str]) -> dict[str, Any] | None:
    """Fork for each request until stdin ends; return the request, in the process for it."""
    for module in modules:
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection = listener.accept()[0]
            if not os.fork():
                return attend(connection)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    return None


def attend(connection: socket.socket) -> dict[str, Any]:
    """Fork what was asked for, and tell its pid and its exit status."""
    with connection.makefile("r") as requests:
        request: dict[str, Any] = json.loads(requests.readline())
    pid = os.fork()
    if not pid:
        connection.close()
        return request
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{pid}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def run(argv: list[str], cwd: str, env: Mapping[str, str], files: list[str]) -> None:
    """Do what a new Python does with these arguments."""
    for descriptor, file in enumerate((os.devnull, *files)):
        os.dup2(os.open(file, os.O_RDWR), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[1:2] = env["PYTHONPATH"].split(":") if "PYTHONPATH" in env else []
    if argv[0] == "-m":
        sys.argv, sys.path[0] = argv[1:], cwd
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *argv[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(argv[1], vars(main))
    else:
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    if (asked := serve(sys.argv[1], sys.argv[2:])) is not None:
        run(**asked)
