"""One machine: run programs there, look at it, and do it harm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests import namespaces
from tests.hosts.access import HOSTS, MACHINES, Account, accounts, address, mac
from tests.namespaces import ClusterError, Process, run, whole_path
from tests.patience import patience, wait_for

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.prefix) / "bin" / "python"
SSH_PATH = "/usr/local/bin:/usr/bin:/bin"
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
LISTENS_AT_22 = ":0016 00000000:0000 0A"


class Machine:
    """One machine, up or down."""

    def __init__(self, name: str, state_dir: Path) -> None:
        self.name = name
        self.directory = state_dir / name
        self.accounts = accounts(name)
        self.address = address(name)
        self._state_dir = state_dir
        self._unshare: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[str]] = []
        self._small_disks: list[str] = []

    # -- what happens there

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "ann",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str = "",
        timeout_s: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as one of the people, to its end. On time-out it is killed."""
        process = self.start(argv, user=user, env=env, cwd=cwd)
        try:
            out, err = process.communicate(stdin, timeout=timeout_s * patience())
        except subprocess.TimeoutExpired:
            self.signal(process, signal.SIGKILL)
            process.communicate()
            raise
        if check and process.returncode:
            raise ClusterError(f"{self.name}: {argv} ended with {process.returncode}: {out}{err}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def start(
        self,
        argv: Sequence[str],
        *,
        user: str = "ann",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program as one of the people, in a session of its own, with pipes."""
        account = self.accounts[user]
        process = subprocess.Popen(
            self.enter(as_person(account, argv, cwd)),
            env={**environment(account), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def signal(self, process: subprocess.Popen[str], number: int) -> None:
        """Send a signal to what `start` started and to its group, as a terminal does."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with suppress(OSError):  # it ended meanwhile
            for child in children.read_text().split():
                os.killpg(int(child), number)

    def write(self, path: str, text: str, *, user: str = "ann") -> None:
        """Write a file as one of the people; a relative path is below their home."""
        argv = ["sh", "-c", 'mkdir -p "$(dirname "$0")" && cat > "$0"', path]
        self.run(argv, user=user, stdin=text, check=True)

    def as_root(self, argv: Sequence[str], *, check: bool = True) -> str:
        """Run a short program as root; return its output."""
        return run(self.enter(["--", *argv]), check=check).stdout

    def enter(self, argv: Sequence[str]) -> list[str]:
        """Return the argv that starts a program on this machine."""
        program = shutil.which("nsenter", path=whole_path()) or "nsenter"
        return [program, f"--target={self.pid}", *NAMESPACES, *argv]

    # -- what is there

    @property
    def pid(self) -> int:
        """The first process, as the real machine counts."""
        try:
            pid = int((self.directory / "pid").read_text())
        except FileNotFoundError:
            raise ClusterError(f"{self.name} is down") from None
        return pid

    @property
    def is_up(self) -> bool:
        return (self.directory / "pid").exists() and namespaces.read(
            Path(f"/proc/{self.pid}")
        ) is not None

    def path(self, there: str | Path) -> Path:
        """Return where the real machine finds a file of this one, which must be up."""
        return Path(f"/proc/{self.pid}/root") / str(there).lstrip("/")

    def home(self, user: str = "ann") -> Path:
        """Return where the real machine finds a home directory, also when this one is down."""
        return self.directory / self.accounts[user].home[1:]

    def processes(self) -> list[Process]:
        """Return what runs there besides the system; no zombies."""
        return [p for p in self.all_processes() if p.pid != 1 and p.name != "sshd"]

    def all_processes(self) -> list[Process]:
        return namespaces.all_in(self.path("/proc")) if self.is_up else []

    # -- what is done to it

    def boot(self, *, shared: Path | None, switch: int) -> None:
        """Start it; return when sshd listens."""
        (self.directory / "pid").unlink(missing_ok=True)
        plan = {
            "name": self.name,
            "address": self.address,
            "mac": mac(self.name),
            "peers": {
                m: {"address": address(m), "mac": mac(m)} for m in MACHINES if m != self.name
            },
            "state_dir": str(self._state_dir),
            "switch": switch,
            "shared": str(shared) if shared else None,
            "sshd": self.name in HOSTS,
            "needed": needed_directories(),
        }
        (self.directory / "plan.json").write_text(json.dumps(plan))
        init = [sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py"))]
        with (self.directory / "console").open("w") as console:
            self._unshare = subprocess.Popen(
                ["unshare", *NAMESPACES, "--fork", *init, str(self.directory / "plan.json")],
                env={**os.environ, "PATH": whole_path(), namespaces.MARK: mark(self._state_dir)},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it is up."""
        wait_for(self._ready, f"{self.name} to be up", timeout_s=30, every_s=0.01)

    def _ready(self) -> bool:
        if self._unshare is not None and self._unshare.poll() is not None:
            raise ClusterError(f"{self.name}: {(self.directory / 'console').read_text()}")
        if not self.is_up:
            return False
        listening = Path(f"/proc/{self.pid}/net/tcp").read_text()
        return self.name not in HOSTS or LISTENS_AT_22 in listening

    def kill(self) -> None:
        """End everything on it at once."""
        if self.is_up:
            namespaces.kill([self.pid])
        (self.directory / "pid").unlink(missing_ok=True)
        if self._unshare is not None:
            self._unshare.wait()
        self._small_disks.clear()
        self._reap()

    def kill_programs(self) -> None:
        """End everything besides the system; sessions of ssh end with it."""
        for _ in range(20):
            found = [p for p in self.all_processes() if p.pid != 1 and not self._is_daemon(p)]
            if not found:
                self._reap()
                return
            self.as_root(["kill", "-9", *(str(p.pid) for p in found)], check=False)

    def _reap(self) -> None:
        for process in self._started:
            with suppress(OSError, ValueError):  # its pipes may be closed or broken
                process.communicate(timeout=10 * patience())
        self._started.clear()

    @staticmethod
    def _is_daemon(program: Process) -> bool:
        return program.name == "sshd" and program.parent == 1

    def reload_sshd(self) -> None:
        """Let sshd read its files again."""
        for program in self.all_processes():
            if self._is_daemon(program):
                self.as_root(["kill", "-HUP", str(program.pid)])

    def small_disk(self, directory: str, mib: int, *, user: str = "ann") -> None:
        """Put a disk of this size on a directory, which is then empty."""
        owner = f"uid={self.accounts[user].uid},gid={self.accounts[user].uid}"
        self.as_root(["mkdir", "-p", directory])
        self.as_root(["mount", "-t", "tmpfs", "-o", f"size={mib}m,{owner}", "none", directory])
        self._small_disks.append(directory)

    def restore_disks(self) -> None:
        """Undo `small_disk`."""
        while self._small_disks:
            self.as_root(["umount", "--lazy", self._small_disks.pop()])

    def freeze(self) -> None:
        """Stop every process, sshd included; the kernel still answers for them."""
        self.as_root(["kill", "-STOP", "--", "-1"])

    def thaw(self) -> None:
        """Undo `freeze`."""
        self.as_root(["kill", "-CONT", "--", "-1"], check=False)


CD = 'cd "$0" && exec "$@"'


def as_person(account: Account, argv: Sequence[str], cwd: str | None = None) -> list[str]:
    """Return the arguments of nsenter that start `argv` as a person, in a session of its own."""
    who = [f"--setgid={account.uid}", f"--setuid={account.uid}"]
    return [*who, "--", "setsid", "sh", "-c", CD, cwd or account.home, *argv]


def mark(state_dir: Path) -> str:
    """Return the value by which the processes of these machines are found again."""
    return f"hosts:{state_dir}"


def environment(account: Account) -> dict[str, str]:
    """Return the environment of a person who has logged in and activated the environment."""
    return {
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": "/bin/bash",
        "PATH": f"{PYTHON.parent}:{SSH_PATH}",
        "LANG": "C.UTF-8",
    }


def needed_directories() -> list[str]:
    """Return what every user must be able to read to run this checkout's Python, parents first."""
    found = {ROOT, Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent}
    found |= {Path(path) for path in sys.path if os.path.isdir(path)}
    found |= {path.resolve() for path in found}
    return sorted(map(str, found), key=len)
