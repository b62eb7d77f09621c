"""Install the Debian packages that the test cluster and the test hosts need."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.namespaces import run, whole_path

# Each package, with a program that shows that it is there.
PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "sacct": "slurm-wlm",
    "slurmdbd": "slurmdbd",
    "munged": "munge",
    "mariadbd": "mariadb-server",
    "mariadb": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "umount": "mount",
    "hostname": "hostname",
}
OF_HOSTS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "bridge": "iproute2",
    "nft": "nftables",
    "pivot_root": "util-linux",
    "umount": "mount",
}
ALL = PROGRAMS | OF_HOSTS
POLICY = Path("/usr/sbin/policy-rc.d")


def missing_programs(programs: Iterable[str] = tuple(PROGRAMS)) -> list[str]:
    """Return the programs, of the cluster unless others are named, that are not there."""
    path = whole_path()
    return [program for program in programs if shutil.which(program, path=path) is None]


def install() -> list[str]:
    """Install what is missing and return the packages that were asked for."""
    packages = sorted({ALL[program] for program in missing_programs(ALL)})
    if packages:
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-q"], env=quiet, timeout_s=600)
        argv = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *packages]
        with _no_services():
            run(argv, env=quiet, timeout_s=1800)
    return packages


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep packages from starting services: this cluster starts its own."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
