"""Build a locked environment on a host; sent to it as text, so this imports only Python's library.

It reads the lock from stdin and prints lines of JSON: notes, then the environment's key or an
error. If stdin closes before, it ends everything that it started.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SMALL_DISK = 2 << 30


class Unbuilt(Exception):
    """The environment cannot be built: what is wrong, and what to do."""


def main() -> int:
    """Build the environment, unless it exists, and report it."""
    stdin = sys.stdin.buffer
    lock = json.loads(stdin.read(int(stdin.readline())))
    with contextlib.suppress(OSError):  # sshd has done so
        os.setsid()
    threading.Thread(target=_end_with_sender, daemon=True).start()
    home = Path(os.path.expanduser("~/.cache/clusterrun/envs"))
    try:
        ensure(lock, home)
        _say(key=lock["key"])
    except Unbuilt as error:
        _say(error=error.args[0], hint=error.args[1])
    except OSError as error:
        _say(error=f"cannot build the environment in {home}: {error}", hint="make room there")
    return 0


def ensure(lock: dict[str, Any], home: Path) -> None:
    """Build an environment, unless it exists. Raises Unbuilt and OSError."""
    root = home / lock["key"]
    python, marker = root / "bin" / "python", root / "complete"
    if not (marker.exists() and python.exists()):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(home / f"{root.name}.lock", "w") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(note="waiting for another job that builds the environment")
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            if not (marker.exists() and python.exists()):
                _build(lock, root, str(python))
                (root / "lock.json").write_text(json.dumps(lock))  # to build it on other hosts
                marker.touch()


def _end_with_sender() -> None:
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _say(**fields: str) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _build(lock: dict[str, Any], root: Path, python: str) -> None:
    shutil.rmtree(root, ignore_errors=True)
    machine = f"{sys.platform}-{platform.machine()}"
    if machine != lock["platform"]:
        text = f"the environment is for {lock['platform']}, and this host is {machine}"
        raise Unbuilt(text, "name the hosts' own environment with 'python' or 'setup'")
    places = os.pathsep.join((os.environ.get("PATH", ""), os.path.expanduser("~/.local/bin")))
    uv = shutil.which("uv", path=places)
    base = _base_python(lock["python"], places, has_uv=uv is not None)
    _say(note=f"building the environment ({lock['packages']} packages)")
    try:
        _run([uv, "venv", "-p", base, root] if uv else [base, "-Im", "venv", root], root)
        for name, text in lock["files"].items():
            (root / name).write_bytes(base64.b64decode(text))
        pip = [uv, "pip"] if uv else [python, "-Im", "pip"]
        own = ["-p", python, "--index-strategy", "unsafe-best-match"] if uv else ["--no-input"]
        _run([*pip, "install", *own, "--no-deps", "-r", "lock.txt"], root, cwd=root)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _base_python(version: str, places: str, *, has_uv: bool) -> str:
    """Return an interpreter of this version that can make environments."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}" == version
    base = sys.executable if own else shutil.which(f"python{version}", path=places)
    if has_uv:
        return base or version
    if not base:
        text = f"there is no python{version}"
        raise Unbuilt(text, f"install python{version} or uv, or name the environment with 'python'")
    if subprocess.run([base, "-Ic", "import ensurepip, venv"], capture_output=True).returncode:
        text = f"{base} cannot make virtual environments"
        raise Unbuilt(text, f"install uv or Python's venv (on Debian: python{version}-venv)")
    return base


def _run(argv: list[Any], root: Path, cwd: Path | None = None) -> None:
    """Run a command that builds; its output is in the log beside the environment."""
    log = root.with_suffix(".log")
    environ = {n: value for n, value in os.environ.items() if not n.startswith("PYTHON")}
    environ["GIT_TERMINAL_PROMPT"] = "0"
    with log.open("wb") as file:
        done = subprocess.run(argv, stdout=file, stderr=file, stdin=-3, env=environ, cwd=cwd)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if line.lower().startswith("error")] or lines or ["no output"]
    hint = f"see {log} there; check that its package index is reachable and has these packages"
    if shutil.disk_usage(root.parent).free < SMALL_DISK:
        hint = f"make room below {root.parent}"
    raise Unbuilt(f"cannot build the environment: {named[-1]}", hint)


if __name__ == "__main__":
    sys.exit(main())
