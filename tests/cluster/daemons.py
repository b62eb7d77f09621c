"""Start and stop munged, MariaDB, slurmdbd, slurmctld and the slurmds of a cluster."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests import namespaces
from tests.cluster import config, network
from tests.cluster.shape import Shape
from tests.namespaces import SYSTEM_PATH, ClusterError, run, whole_path
from tests.patience import patience

READY_TIMEOUT_S = 60.0


def environment(shape: Shape) -> dict[str, str]:
    """Return the daemons' whole environment, the mark that finds them included."""
    return {
        "PATH": shape.path(SYSTEM_PATH),
        "LANG": "C.UTF-8",
        "SLURM_CONF": str(shape.slurm_conf),
        "MYSQL_UNIX_PORT": str(shape.state_dir / "mysql" / "socket"),
        namespaces.MARK: shape.bridge,
    }


def client_environment(shape: Shape) -> dict[str, str]:
    """Return the variables by which Slurm's commands find this cluster."""
    return {"SLURM_CONF": str(shape.slurm_conf), "PATH": shape.path(whole_path())}


def write_files(shape: Shape) -> None:
    """Make the state directory, the configuration and the stand-ins for GPU devices."""
    shape.state_dir.mkdir(parents=True, exist_ok=True)
    (shape.state_dir / "cluster.json").write_text(shape.to_json())
    for name in ("ctld", "log", "munge", "run", *(f"spool/{node}" for node in shape.node_names)):
        (shape.state_dir / name).mkdir(parents=True, exist_ok=True)
    shape.state_dir.chmod(0o755)
    shape.slurm_conf.write_text(config.slurm_conf(shape))
    (shape.state_dir / "gres.conf").write_text(config.gres_conf(shape))
    (shape.state_dir / "cgroup.conf").write_text(config.cgroup_conf(shape))
    dbd_conf = shape.state_dir / "slurmdbd.conf"
    dbd_conf.touch(mode=0o600)  # slurmdbd refuses a file that others can read
    dbd_conf.write_text(config.slurmdbd_conf(shape))
    shape.device_dir.mkdir(exist_ok=True)
    for number in range(shape.gpus_per_node):
        # The numbers of /dev/null: any character device will do, and this one does no harm.
        os.mknod(shape.device_dir / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def start_munged(shape: Shape) -> None:
    """Start munged with a key of its own; its socket serves every node, being a file."""
    directory = shape.state_dir / "munge"
    key = directory / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
    files = [f"--{name}-file={directory}/munge.{name}" for name in ("pid", "log", "seed")]
    argv = ["munged", "--num-threads=10", f"--socket={directory}/munge.socket"]
    _run(shape, [*argv, f"--key-file={key}", *files])


def start_database(shape: Shape) -> None:
    """Start MariaDB on a data directory and a socket of its own, with no TCP port."""
    directory = shape.state_dir / "mysql"
    data = directory / "data"
    if not data.exists():
        directory.mkdir()
        _run(
            shape,
            [
                "mariadb-install-db",
                "--no-defaults",
                "--user=root",
                f"--datadir={data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
        )
    _start_database_server(directory, shape)
    _wait("MariaDB", lambda: _sql(shape, "SELECT 1") == 0)
    _sql(shape, "CREATE USER IF NOT EXISTS slurm@localhost; GRANT ALL ON *.* TO slurm@localhost")


def start_slurmdbd(shape: Shape) -> None:
    """Start slurmdbd and wait until it answers."""
    _run(shape, ["slurmdbd"])
    _wait("slurmdbd", lambda: _slurm_code(shape, ["sacctmgr", "-n", "list", "cluster"]) == 0)


def register_accounts(shape: Shape) -> None:
    """Tell accounting of the cluster and of an account for root."""
    name = shape.bridge
    for entity in (f"cluster {name}", "account root", f"user root account=root cluster={name}"):
        code = _slurm_code(shape, ["sacctmgr", "-i", "add", *entity.split()])
        if code not in (0, 1):  # 1: nothing new added
            raise ClusterError(f"sacctmgr add {entity} ended with {code}")


def start_slurmctld(shape: Shape) -> None:
    """Start slurmctld and wait until it answers."""
    _run(shape, ["slurmctld", "-f", str(shape.slurm_conf)])
    _wait("slurmctld", lambda: controller_answers(shape))


def start_slurmd(shape: Shape, node: str) -> None:
    """Start the slurmd of a node, on that node."""
    argv = ["slurmd", "-f", str(shape.slurm_conf), "-N", node]
    own_stepd = ["-d", str(shape.newer.programs / "slurmstepd")] if shape.newer else []
    _run(shape, [*network.enter(shape, node), *argv, *own_stepd])


def stop(shape: Shape, daemon: str) -> None:
    """End `slurmctld`, `slurmdbd` or `slurmd-<node>` as an administrator would."""
    pid = namespaces.pid_in(shape.state_dir / "run" / f"{daemon}.pid", daemon.split("-")[0])
    if pid is not None:
        namespaces.kill([pid], number=signal.SIGTERM, timeout_s=30)


def controller_answers(shape: Shape) -> bool:
    """Return whether slurmctld answers a ping."""
    return _slurm_code(shape, ["scontrol", "ping"]) == 0


def missing(shape: Shape) -> list[str]:
    """Return the daemons that should run and don't."""
    files = {"munged": shape.state_dir / "munge" / "munge.pid"}
    names = ["slurmctld", *(f"slurmd-{node}" for node in shape.node_names)]
    if shape.accounting:
        names.append("slurmdbd")
        files["mariadbd"] = shape.state_dir / "mysql" / "pid"
    files.update({name: shape.state_dir / "run" / f"{name}.pid" for name in names})
    return sorted(
        name for name, file in files.items() if namespaces.pid_in(file, name.split("-")[0]) is None
    )


def _start_database_server(directory: Path, shape: Shape) -> None:
    log = (shape.state_dir / "log" / "mariadb.log").open("ab")
    subprocess.Popen(
        [
            "mariadbd",
            "--no-defaults",
            "--user=root",
            f"--datadir={directory}/data",
            f"--socket={directory}/socket",
            f"--pid-file={directory}/pid",
            "--skip-networking",
            "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",  # slurmdbd complains below this
            "--innodb-flush-log-at-trx-commit=0",  # a test's accounting may be lost in a crash
        ],
        env=environment(shape),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    log.close()


def _run(shape: Shape, argv: list[str]) -> None:
    """Run a program that turns itself into a daemon.

    Output goes to a file: a daemon that kept a pipe open would make us wait for ever.
    """
    log = shape.state_dir / "log" / f"start-{'slurmd' if 'slurmd' in argv else argv[0]}.log"
    with log.open("ab") as output:
        code = subprocess.call(
            argv,
            env=environment(shape),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=shape.state_dir,
            timeout=READY_TIMEOUT_S * patience(),
        )
    if code != 0:
        raise ClusterError(f"{' '.join(argv)} ended with {code}: {log.read_text()[-2000:]}")


def _sql(shape: Shape, statement: str) -> int:
    socket = shape.state_dir / "mysql" / "socket"
    argv = ["mariadb", "--no-defaults", f"--socket={socket}", "--user=root", "-e", statement]
    return run(argv, check=False).returncode


def _slurm_code(shape: Shape, argv: list[str]) -> int:
    return run(argv, env=client_environment(shape), check=False).returncode


def _wait(what: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S * patience()
    while not ready():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not answer in {READY_TIMEOUT_S:.0f} s")
        time.sleep(0.1)
