"""The commands that start a shell on each host of a job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import cache

from clusterrun.backends.environment import scrubbed
from clusterrun.backends.hosts import openssh, start
from clusterrun.backends.slurm.host import cpus_of_nodes
from clusterrun.config.choices import Device, Starter
from clusterrun.errors import ClusterrunError, SubmissionError
from clusterrun.launch.hosts import FLUX_HOSTS
from clusterrun.launch.plan import Plan
from clusterrun.shared import shell
from clusterrun.shared.host_specs import parse_host
from clusterrun.shared.hostlist import parse_hostlist

# What srun needs of the allocation. Its other variables, such as SLURM_GPUS, would size each step.
_OF_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE")

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def starters_environ(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a controller: with what its starter needs."""
    is_given = not plan.cluster.scheduler.outlives_shell
    return scrubbed(environ, keep=(*_OF_SLURM, "CUDA_VISIBLE_DEVICES") if is_given else ())


def host_command(plan: Plan, rank: int, *, is_here: bool) -> list[str]:
    """Return the command that starts a shell on a host. Raises ClusterrunError."""
    host = plan.hosts[rank]
    if is_here or host in LOOPBACK:
        return list(start.READ)
    starter = Starter(plan.starter or Starter.SSH)
    if starter is Starter.SSH:
        return openssh.ssh(host, start.READ)
    name = parse_host(host).host
    if starter is Starter.SRUN:
        no_gpus = ("--gres=none",) if plan.device is Device.CPU else ()
        return [*_srun(name, os.environ), *no_gpus, *start.READ]
    if starter is Starter.BLAUNCH:
        return ["blaunch", name, *start.READ]
    return ["flux", "exec", f"--rank={_flux_rank(name)}", "--dir=/", *start.READ]


def _srun(name: str, environ: Mapping[str, str]) -> list[str]:
    """Return srun's command: a step with all that the allocation has on a node, beside others."""
    try:
        nodes = parse_hostlist(environ.get("SLURM_JOB_NODELIST", ""))
        counts = cpus_of_nodes(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        cpus = dict(zip(nodes, counts, strict=False)).get(name)
    except ClusterrunError:
        cpus = None
    return [
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--mem=0"),
        *("--unbuffered", "--quiet", *((f"--cpus-per-task={cpus}",) if cpus else ())),
    ]


@cache
def _flux_hosts() -> tuple[str, ...]:
    return tuple(parse_hostlist(shell.run(FLUX_HOSTS).stdout.strip()))


def _flux_rank(name: str) -> int:
    ranks = _flux_hosts()
    if name not in ranks:
        known = ", ".join(dict.fromkeys(ranks))
        raise SubmissionError(f"{name} is not in this Flux instance", hint=f"it has {known}")
    return ranks.index(name)


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine, for this user: its name has an address of ours."""
    spec = parse_host(host)
    if spec.user or spec.port:
        return False
    if spec.host in (*LOOPBACK, socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(spec.host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(map(_is_own, found))


def _is_own(found: tuple[socket.AddressFamily, object, object, object, object]) -> bool:
    family, *_, address = found
    try:
        with socket.socket(family) as probe:
            probe.bind(address)  # type: ignore[arg-type]  # port 0
    except OSError:
        return False
    return True
