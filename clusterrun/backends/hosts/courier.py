"""One host's part of a job: start, watch and end its node, as the controller demands.

It talks through stdin and stdout. When stdin ends or the controller is silent, it ends everything
that it started here, and exits.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import queue
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from clusterrun.backends.environment import scrubbed
from clusterrun.backends.hosts import judge, mirror
from clusterrun.backends.hosts.crew import ALIVE_S, ENVIRON_FD, Message, Pipe, take_streams
from clusterrun.backends.hosts.openssh import LINK_S
from clusterrun.backends.hosts.project import unpack
from clusterrun.backends.local.backend import VISIBLE, boot_id
from clusterrun.backends.local.controller import amend_controller, start_node
from clusterrun.errors import ClusterrunError
from clusterrun.health import paths as health_paths
from clusterrun.health.examine import Check, examine, side_by_side
from clusterrun.health.gpus import LONG_S, GpuAnswer, described, device_names
from clusterrun.health.machine import packages
from clusterrun.health.nvml import NO_DRIVER, NvmlGpu
from clusterrun.node.base.ports import free_port, listening_socket, why_closed
from clusterrun.node.base.processes import adopt_orphans, kill_descendants
from clusterrun.node.base.stderr import say_on_stderr
from clusterrun.rundir import record
from clusterrun.rundir.create import remove_run
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import link_job, remember_home, remember_root, user_name
from clusterrun.shared.finding import Severity
from clusterrun.shared.given import before_setup

POLL_S = 0.1
ASK_S = 0.25  # between two times that a host asks what the home lacks
SILENCE_S = float(LINK_S)  # after which the controller is considered lost
# From SIGTERM to SIGKILL, after the time that ranks have to save: an agent also writes its logs.
GRACE_S = 12.0
DRAIN_S = 20.0  # for the home to get the files of a node that has ended
CONNECT_S = 3.0
STUCK_S = 15.0  # after SILENCE_S, for a main thread that a dead connection may block
SEEN_S: Final = 1.0  # for a file server to show a new file
PAUSE_S: Final = 0.1
WAIT_S: Final = 1.0  # for a process that is about to hold a lock, or to give it up
DEADLINE_S: Final = LONG_S + 1.0
_CHECKS_S: Final = 2.0
_AMD: Final = Path("/dev/kfd")
_BACKLOG: Final = 1 << 12  # who asks for the holder of a lock waits in it, and is never answered
_CREDENTIALS: Final = struct.Struct("iII")  # pid, user and group


class Courier:
    """Handles the controller's messages; one node runs at a time."""

    def __init__(self, pipe: Pipe, environ: Mapping[str, str]) -> None:
        self._pipe, self._environ = pipe, environ  # from before the setup lines
        self._messages: queue.Queue[Message | None] = queue.Queue()
        self._paths = RunPaths(root=Path())  # until `place` names it
        self._name = ""
        self._is_apart = False  # this host keeps a run directory of its own
        self._shifts: dict[str, int] = {}  # by how much a file is longer at home
        self._ask_at = 0.0  # when to ask next what the home lacks
        self._drain_by = 0.0  # 0.0 if the home has all that is here
        self._packed: BinaryIO | None = None  # the project
        self._node: subprocess.Popen[bytes] | None = None
        self._code: int | None = None  # of the node that has ended
        self._parent = os.getppid()  # on the controller's machine, the controller
        self._is_first = False  # this is the controller's machine, or one in an allocation
        self._unused: RunPaths | None = None  # a run directory made here, without an attempt
        self._listener: socket.socket | None = None  # for other hosts to test the connection
        self._kill_by, self._grace_s = float("inf"), GRACE_S  # infinite: the node is not to end
        self._attempt = 0
        self._heard = time.monotonic()  # when the last message came

    def run(self) -> None:
        """Serve until the controller is gone or sends `bye`."""
        threading.Thread(target=self._receive, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    message = self._messages.get(timeout=POLL_S)
                    if message is None:
                        break
                    getattr(self, f"_on_{message['kind']}")(message)
                self._check_node()
        except (OSError, ValueError, ClusterrunError) as error:
            say_on_stderr(f"{os.uname().nodename}: {error}")
            self._pipe.refuse(judge.unwritten(self._name, error))
        finally:
            self._end()

    def stop(self, *_: object) -> None:
        """End as if the controller were gone."""
        self._messages.put(None)

    def warn(self, *_: object) -> None:
        """Pass SIGTERM on to the node, so that its ranks can save; stop if no node runs."""
        if self._node is None:
            self.stop()
        else:
            self._node.send_signal(signal.SIGTERM)

    def _receive(self) -> None:
        while (message := self._pipe.receive()) is not None:
            self._heard = time.monotonic()  # even if a slow disk blocks the main thread
            self._messages.put(message)
        self._messages.put(None)

    def _watch(self) -> None:
        """Stop once the controller is silent; if the main thread is blocked, kill everything."""
        while time.monotonic() - self._heard < SILENCE_S:
            time.sleep(ALIVE_S)
        self.stop()
        time.sleep(STUCK_S)
        kill_descendants()
        os._exit(1)

    # Messages

    def _on_alive(self, message: Message) -> None:
        self._pipe.send("alive")

    def _on_facts(self, message: Message) -> None:
        """Describe this host; until `place`, listen on a port to which other hosts connect."""
        self._name = message["name"]
        with contextlib.suppress(OSError):  # no port is free
            self._listener = listening_socket(free_port(tuple(message["ports"])))
        port = self._listener.getsockname()[1] if self._listener else 0
        self._pipe.send("answer", facts={**gather(message), "port": port})

    def _on_lock(self, message: Message) -> None:
        """Lock this host for the job, and as many of the given GPUs as the job needs."""
        held: list[str] = []
        busy: dict[str, str] = {}
        twice = take(f"job {message['job']}")  # held if another host of the job is this machine
        candidates = [] if twice else message["gpus"]
        for gpu in candidates:
            if len(held) == message["count"]:
                break
            if holder := take(f"gpu {gpu}"):
                busy[gpu] = holder
            else:
                held.append(gpu)
        self._pipe.send("answer", gpus=held, busy=busy, twice=twice)

    def _on_connect(self, message: Message) -> None:
        """Answer why this host cannot connect to an address; "" if it can."""
        self._pipe.send("answer", closed=why_closed(message["address"], message["port"], CONNECT_S))

    def _on_place(self, message: Message) -> None:
        """Use the home, or a run directory of this host's own."""
        if self._listener is not None:  # the other hosts have tried this host's port
            self._listener.close()
        self._is_apart, self._is_first = message["is_apart"], message["is_first"]
        self._paths = RunPaths(root=Path(message["root"]).expanduser())
        if self._is_apart and not self._paths.root.exists():
            self._paths.root.mkdir(mode=0o700, parents=True)
            self._unused = self._paths  # it is removed if no attempt starts
        self._pipe.send("answer", needs_project=self._is_apart and not self._paths.project.is_dir())

    def _on_project(self, message: Message) -> None:
        """Keep a part of the packed project; an empty part is the end, so unpack it."""
        self._packed = self._packed or tempfile.TemporaryFile()  # noqa: SIM115
        self._packed.write(message["data"])
        if not message["data"]:
            unpack(self._packed, self._paths.project)
            self._packed = None
            self._pipe.send("answer")

    def _on_start(self, message: Message) -> None:
        """Start the node of an attempt; a host with a directory of its own gets the files first."""
        paths, own = self._paths, message["environ"]
        self._unused = None
        if self._is_apart:
            mirror.write_bundle(paths.root, message["files"])
            with contextlib.suppress(OSError, ClusterrunError):
                link_job(paths, own["CLUSTERRUN_HOSTS_JOB_ID"])
                remember_home(record.read(paths))  # commands here then ask its home
        remember_root(paths.runs_dir)
        environ = {**scrubbed(self._environ, keep=(VISIBLE,)), **own}
        self._kill_by, self._attempt = float("inf"), message["attempt"]
        self._grace_s = GRACE_S + message["lead_s"]
        self._node = start_node(paths, message["words"], paths.root, environ)  # runs node.sh

    def _on_end(self, message: Message) -> None:
        if self._node is not None:
            self._kill_by = min(self._kill_by, time.monotonic() + self._grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._node.pid, signal.SIGTERM)

    def _on_kill(self, message: Message) -> None:
        kill_descendants()

    def _on_wants(self, message: Message) -> None:
        """Send a batch of what the home lacks; if there is nothing, the home has all."""
        self._ask_at = time.monotonic() + ASK_S
        root, sizes, times = self._paths.root, message["grows"], message["others"]
        has_all = True
        for path, at, data in mirror.news(root, sizes, times, self._shifts):
            self._pipe.send("file", data, path=path, at=at)
            has_all = False
        if has_all:
            self._drain_by = 0.0  # the end of a node need not wait for files

    def _on_bye(self, message: Message) -> None:
        self.stop()

    # The node

    def _check_node(self) -> None:
        """Ask what the home lacks, kill a node that is late to end, report one that has ended."""
        now = time.monotonic()
        if self._is_apart and now > self._ask_at:
            self._ask_at = now + mirror.RETRY_S  # the home does not answer while its disk is full
            self._pipe.send("ask")
        if self._node is not None and now > self._kill_by:
            kill_descendants()
        if self._node is not None and (code := self._node.poll()) is not None:
            self._node, self._code = None, code
            kill_descendants()
            self._drain_by = now + DRAIN_S if self._is_apart else 0.0
        if self._code is not None and now > self._drain_by:
            self._pipe.send("ended", code=self._code, attempt=self._attempt)
            self._code = None

    def _end(self) -> None:
        """End the node as Slurm would: SIGTERM, then SIGKILL to all that is left."""
        if self._node is not None:
            self._on_end({})
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._node.wait(max(0.0, self._kill_by - time.monotonic()))
        kill_descendants()
        if self._unused is not None:
            remove_run(self._unused)
        if self._is_first and os.getppid() != self._parent:  # its parent, the controller, is gone
            amend_controller(self._paths, is_gone=True)


# What a host knows about itself: `judge` decides by it


def gather(ask: Mapping[str, Any]) -> dict[str, Any]:
    """Return this host's facts, for JSON; `late` names those that took too long to gather.

    `ask` has `home` and `nonce`; `own_dir`: where this host would write without the home; `paths`:
    what must exist if it sees the home; `device`: "cuda" if GPUs are needed.
    """
    is_seen = partial(_sees, RunPaths(root=Path(ask["home"])).nonce(ask["nonce"]))
    sees_home = bool(side_by_side({"sees_home": is_seen}, DEADLINE_S).get("sees_home"))
    parts: dict[str, Callable[[], Any]] = {
        "missing": lambda: [
            name for name in ask["paths"] if sees_home and not os.path.exists(name)
        ],
        "versions": lambda: {"python": platform.python_version(), **packages()},
        "checks": partial(_checks, Path(ask["home"] if sees_home else ask["own_dir"]).expanduser()),
        "gpus": _gpus if ask["device"] == "cuda" else dict,
    }
    in_time = side_by_side(parts, DEADLINE_S)
    connection = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", ""]  # client, port, server
    return {
        **{"sees_home": sees_home, "missing": [], "versions": {}, "checks": [], "gpus": {}},
        **in_time,
        "late": sorted({*parts} - {*in_time}),
        "hostname": socket.gethostname(),
        "boot_id": boot_id(),
        "executable": sys.executable,
        "client": connection[0],  # the address of the first host as this one sees it
        "server": connection[2],  # and of this one as the first host reached it
        "time": time.time(),
    }


def _sees(file: Path) -> bool:
    """Return whether this host sees a file that another host has just written."""
    deadline = time.monotonic() + SEEN_S
    while not file.exists():
        runs = file.parent.parent  # of this job's name; without them, there is nothing to wait for
        if time.monotonic() > deadline or not runs.is_dir():
            return False
        for place in (runs, file.parent):  # listing them makes NFS ask the server again
            with contextlib.suppress(OSError):
                os.listdir(place)
        time.sleep(PAUSE_S)
    return True


def _checks(run_dir: Path) -> list[dict[str, str]]:
    """Return the checks of this host's directories that fail, as JSON of findings."""
    checks: dict[str, Check] = {
        "path.runs": partial(health_paths.runs, run_dir, is_shared=False),
        "path.disk": partial(health_paths.disk, run_dir),
        "path.inodes": partial(health_paths.inodes, run_dir),
        "node.tmp": health_paths.scratch,
    }
    found = examine(checks, _CHECKS_S, late={"path.runs": health_paths.slow_finding(run_dir)})
    return [each.to_data() for each in found if each.severity is Severity.FAIL]


def _gpus() -> dict[str, Any]:
    """Return the GPUs that this host may use; `unknown` says why NVML cannot list them."""
    answer = GpuAnswer(device_names(os.environ), LONG_S).answer
    # `absent` says why NVML could not be asked. Without NVIDIA's driver there are no GPUs, except
    # AMD's, which NVML does not list.
    if answer.absent and (answer.absent != NO_DRIVER or _AMD.exists()):
        return {"unknown": answer.absent}
    found = [
        {"name": gpu.name, "uuid": gpu.uuid or "", "problem": gpu.problem or _use(gpu)}
        for gpu in answer.gpus
    ]
    return {"problem": answer.problem or answer.absent, "all": found}


def _use(gpu: NvmlGpu) -> str:
    """Return "used by" and who uses a GPU; "" if it is free."""
    user = holder_of(f"gpu {gpu.uuid or gpu.name}") or ", ".join(map(described, gpu.pids or ()))
    return f"used by {user}" if user else ""


# Locks of this machine: names of abstract Unix sockets. The kernel gives each to one process until
# that ends, and tells all users whose process it is.
_held: list[socket.socket] = []


def take(name: str) -> str:
    """Take a lock until this process ends; return its holder, "" if it was free. Raises OSError.

    `gpu UUID` is the lock of a GPU, `gpu INDEX` if its UUID is unknown; `job ID` is the lock of a
    job, which a machine that is listed twice can't take twice.
    """
    own, until = socket.socket(socket.AF_UNIX), time.monotonic() + WAIT_S
    while True:
        try:
            own.bind(_address(name))  # only one process can
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        if (holder := holder_of(name)) or time.monotonic() > until:
            own.close()
            return holder or "a process"
        time.sleep(PAUSE_S)  # it has just been given up, or its new holder does not listen yet
    own.listen(_BACKLOG)
    _held.append(own)
    return ""


def holder_of(name: str) -> str:
    """Return which process holds a lock, as the kernel reports it; "" if the lock is free."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)
        try:
            peer.connect(_address(name))
            answer = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except ConnectionRefusedError:
            return ""
        except OSError:
            return "a process"
    pid, uid, _ = _CREDENTIALS.unpack(answer)
    process = f"process {pid}" if pid else "a process"  # 0: it is in another container
    return f"{process} of {user_name(uid)}"


def _address(name: str) -> str:
    here = f"{name} {os.uname().nodename}"  # containers may share a network
    return f"\0clusterrun-{hashlib.sha256(here.encode()).hexdigest()}"


def main() -> NoReturn:
    """Run a host's courier."""
    courier = Courier(take_streams(), before_setup(ENVIRON_FD))
    adopt_orphans()
    signal.signal(signal.SIGTERM, courier.warn)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, courier.stop)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Slurm warns all processes of a step
        signal.signal(number, lambda *_: None)
    courier.run()
    os._exit(0)  # the receiving thread may still wait for a message


if __name__ == "__main__":
    main()
