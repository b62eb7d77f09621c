"""A newer Slurm and Python beside the system's: the next Debian's packages, unpacked into folders.

Nothing is installed: apt downloads with a configuration of its own, dpkg unpacks, and each program
gets the loader and the libraries of the folder written into it. A variable such as LD_LIBRARY_PATH
would do the same for Slurm, and break the programs of its jobs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from clusterrun.shared.locks import locked
from tests.namespaces import ClusterError, run

VERSION = "24.11"
RELEASE = "trixie"  # the Debian that has this version
PYTHON = "3.13"
CLIENTS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
# Each daemon, with its file: Debian's own programs of these names are links to alternatives.
DAEMONS = {
    "slurmctld": "slurmctld-wlm",
    "slurmd": "slurmd-wlm",
    "slurmstepd": "slurmstepd-wlm",
    "slurmdbd": "slurmdbd",
}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
CACHE = "CLUSTERRUN_TEST_CACHE"

APT_CONF = """\
Dir::Etc::SourceList "{work}/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State "{work}/state";
Dir::State::status "{work}/status";
Dir::Cache "{work}/cache";
Acquire::Languages "none";
APT::Install-Recommends "false";
APT::Sandbox::User "";
"""


@dataclass(frozen=True, kw_only=True)
class Newer:
    """Where newer programs are, or would be."""

    prefix: Path
    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]
    programs_of: ClassVar[dict[str, str]]  # each program, with its file

    @classmethod
    def default(cls) -> Newer:
        """Return those in this user's cache."""
        cache = os.environ.get(CACHE) or Path.home() / ".cache" / "clusterrun-tests"
        return cls(prefix=Path(cache).absolute() / cls.name)

    @property
    def installed(self) -> bool:
        """Return whether it is there; a folder is only moved here when it is complete."""
        return self.programs.is_dir()

    @property
    def programs(self) -> Path:
        """Return the folder of its programs."""
        return self.prefix / "bin"

    def install(self) -> bool:
        """Install it where it is missing; return whether it was."""
        if self.installed:
            return False
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        lock = self.prefix.parent / f"{self.prefix.name}.lock"
        with locked(lock, wait_s=float("inf")):
            if self.installed:
                return False
            mirror = _mirror()
            with tempfile.TemporaryDirectory(dir=self.prefix.parent) as work:
                _download(mirror, Path(work), self.packages)
                unpacked = _unpack(Path(work))
                self._adopt_programs(unpacked)
                shutil.rmtree(self.prefix, ignore_errors=True)
                unpacked.rename(self.prefix)
        return True

    def _adopt_programs(self, unpacked: Path) -> None:
        """Make the folder of programs, which use the loader and libraries of this prefix."""
        programs = unpacked / self.programs.relative_to(self.prefix)
        programs.mkdir(parents=True, exist_ok=True)
        for name, file in self.programs_of.items():
            shutil.copy(unpacked / file, programs / name)
        files = [str(file) for file in programs.iterdir()]
        patch, loader = _patchelf(unpacked, files[0])
        libraries = self.prefix / "usr/lib" / _libraries(unpacked).name
        # RPATH and not RUNPATH: it counts for the libraries of plugins, too.
        rpath = f"{libraries}:{libraries}/slurm-wlm"
        interpreter = f"{self.prefix}/usr{loader}"
        # In this order: patchelf breaks Python if it does both at once, or the other first.
        run([*patch, "--force-rpath", "--set-rpath", rpath, *files])
        run([*patch, "--set-interpreter", interpreter, *files])


class NewerSlurm(Newer):
    """A newer Slurm than the system's."""

    name = f"slurm-{VERSION}"
    packages = ("slurm-client", "slurmctld", "slurmd", "slurmdbd", "slurm-wlm-mysql-plugin")
    programs_of = {name: f"usr/bin/{name}" for name in CLIENTS} | {
        name: f"usr/sbin/{file}" for name, file in DAEMONS.items()
    }

    @property
    def plugins(self) -> Path:
        """Return the folder of its plugins."""
        return next((self.prefix / "usr" / "lib").glob("*/slurm-wlm"))


class NewerPython(Newer):
    """A newer Python than the system's."""

    name = f"python-{PYTHON}"
    packages = (f"python{PYTHON}",)
    programs_of: ClassVar = {"python": f"usr/bin/python{PYTHON}"}

    @property
    def programs(self) -> Path:
        """Return the folder of its program, from which Python finds its library."""
        return self.prefix / "usr" / "own"


def _patchelf(unpacked: Path, program: str) -> tuple[list[str], str]:
    """Return how to start the unpacked patchelf, and the loader that `program` asks for."""
    libraries = _libraries(unpacked)
    for loader in (*unpacked.glob("usr/lib*/ld-linux*.so.*"), *libraries.glob("ld-linux*.so.*")):
        patch = [str(loader), "--library-path", str(libraries), str(unpacked / "usr/bin/patchelf")]
        return patch, run([*patch, "--print-interpreter", program]).stdout.strip()
    raise ClusterError(f"no loader in {unpacked}")


def _libraries(unpacked: Path) -> Path:
    return next(unpacked.glob("usr/lib/*/libc.so.6")).parent


def _download(mirror: str, work: Path, packages: Sequence[str]) -> None:
    """Download the packages and all that they depend on; to apt nothing is installed yet."""
    for name in ("cache/archives/partial", "state/lists/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").touch()
    signed = f" [signed-by={KEYRING}]" if KEYRING.exists() else ""
    (work / "sources.list").write_text(f"deb{signed} {mirror} {RELEASE} main\n")
    (work / "apt.conf").write_text(APT_CONF.format(work=work))
    env = {"APT_CONFIG": str(work / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-q", "--error-on=any"], env=env, timeout_s=600)
    argv = ["apt-get", "install", "-q", "-y", "--download-only", *packages, "patchelf"]
    run(argv, env=env, timeout_s=1800)


def _unpack(work: Path) -> Path:
    target = work / "unpacked"
    target.mkdir(mode=0o755)
    for package in sorted((work / "cache/archives").glob("*.deb")):
        run(["dpkg", "-x", str(package), str(target)])
        package.unlink()
    for name in ("etc", "var", "usr/share"):
        shutil.rmtree(target / name, ignore_errors=True)
    return target


def _mirror() -> str:
    """Return the mirror from which this machine has its own Debian."""
    fields = "$(SITE) $(ORIGIN) $(LABEL) $(COMPONENT)"
    asked = ["apt-get", "indextargets", "--format", fields, "Created-By: Packages"]
    for line in run(asked).stdout.splitlines():
        site, *rest = line.split()
        if rest == ["Debian", "Debian", "main"]:
            return site
    raise ClusterError("apt knows no mirror of Debian here")
