"""The first process of one machine: it builds what the machine sees, starts sshd, and reaps.

Started in new namespaces, by its path and without this package. argv: the machine's plan, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1, 32, 4096, 16384
# What a machine has for itself of the first level; the rest is the real machine's.
OWN = {"home", "lost+found", "proc", "root", "run", "shared", "tmp"}
MEMORY_DIRECTORIES = {"tmp": "1777", "var/tmp": "1777", "dev/shm": "1777", "var/log": "755"}
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

_libc = ctypes.CDLL(None, use_errno=True)


def main(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    home = Path(plan["state_dir"]) / plan["name"]
    plug(plan)
    socket.sethostname(plan["name"])
    pid = os.readlink("/proc/self")  # as the real machine counts
    build_root(home / "root", home, plan)
    (home / "pid.new").write_text(pid)
    (home / "pid.new").rename(home / "pid")
    enter(home / "root")
    if plan["sshd"]:
        subprocess.Popen(["/usr/sbin/sshd", "-D"], env=ENVIRONMENT, start_new_session=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.1)


def plug(plan: dict[str, Any]) -> None:
    """Lay a cable to the switch. The peers' addresses are fixed: a lost peer is only silent."""
    name, peer_netns = plan["name"], f"/proc/{plan['switch']}/ns/net"
    lines = [
        "link set lo up",
        f"link add eth0 address {plan['mac']} type veth peer name {name} netns {peer_netns}",
        f"addr add {plan['address']}/24 dev eth0",
        "link set eth0 up",
    ]
    for peer in plan["peers"].values():
        lines.append(f"neigh add {peer['address']} lladdr {peer['mac']} dev eth0 nud permanent")
    ip(["ip"], lines)
    ip(["nsenter", f"--net={peer_netns}", "ip"], [f"link set {name} master br0 up"])


def ip(argv: list[str], lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    subprocess.run([*argv, "-batch", "-"], input=text, text=True, check=True)


def build_root(root: Path, home: Path, plan: dict[str, Any]) -> None:
    """Build the tree of files that the machine sees."""
    mount("tmpfs", root, "tmpfs", options="mode=755")
    for entry in os.scandir("/"):
        there = root / entry.name
        if entry.is_symlink():
            there.symlink_to(os.readlink(entry.path))
        elif entry.is_dir() and entry.name not in OWN:
            there.mkdir()
            mount(entry.path, there, flags=MS_BIND | MS_REC)
    for name in ("home", "proc", "root", "run", "tmp", *(["shared"] if plan["shared"] else [])):
        (root / name).mkdir()
    for name, mode in MEMORY_DIRECTORIES.items():
        mount("tmpfs", root / name, "tmpfs", options=f"mode={mode}")
    mount("proc", root / "proc", "proc")
    mount(home / "home", root / "home", flags=MS_BIND)
    if plan["shared"]:
        mount(plan["shared"], root / "shared", flags=MS_BIND)
    build_etc(root, home)
    build_terminals(root)
    (root / "run" / "sshd").mkdir()
    (root / "run" / "lock").mkdir()
    boot_id = root / "run" / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    mount(boot_id, root / "proc/sys/kernel/random/boot_id", flags=MS_BIND)
    for path in plan["needed"]:
        expose(root, Path(path))


def build_etc(root: Path, home: Path) -> None:
    for path in (home / "etc").iterdir():
        if (root / "etc" / path.name).exists():
            mount(path, root / "etc" / path.name, flags=MS_BIND)


def build_terminals(root: Path) -> None:
    mount("devpts", root / "dev/pts", "devpts", options="newinstance,ptmxmode=0666,mode=620,gid=5")
    if not (root / "dev/ptmx").is_symlink():
        mount(root / "dev/pts/ptmx", root / "dev/ptmx", flags=MS_BIND)


def expose(root: Path, path: Path) -> None:
    """Let every user reach `path`, which may lie below a directory that only root can enter."""
    if all(open_to_all(root / parent.relative_to("/")) for parent in (path, *path.parents)):
        return
    for parent in (*reversed(path.parents[:-1]), path):
        here = root / parent.relative_to("/")
        here.mkdir(exist_ok=True)
        if not open_to_all(here):
            mount("tmpfs", here, "tmpfs", options="mode=755")
    bind_all(path, root / path.relative_to("/"))


def bind_all(path: Path, here: Path) -> None:
    """Show a directory that is not the machine's own, so that nothing here can change it."""
    if open_to_all(path):
        bind_readonly(path, here)
        return
    for child in path.iterdir():
        there = here / child.name
        if child.is_symlink():
            there.symlink_to(os.readlink(child))
        else:
            there.mkdir() if child.is_dir() else there.touch()
            bind_readonly(child, there)


def bind_readonly(path: Path, here: Path) -> None:
    mount(path, here, flags=MS_BIND | MS_REC)
    mount("none", here, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


def open_to_all(path: Path) -> bool:
    return path.exists() and path.stat().st_mode & 0o5 == 0o5


def enter(root: Path) -> None:
    """Make `root` the root directory, and let go of the old one."""
    (root / "old").mkdir()
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "old"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/old"], check=True)
    os.rmdir("/old")


def mount(
    source: str | Path, target: Path, kind: str = "", *, flags: int = 0, options: str = ""
) -> None:
    arguments = [os.fsencode(text) for text in (source, target, kind)]
    if _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"{source} on {target}")


if __name__ == "__main__":
    main(sys.argv[1])
