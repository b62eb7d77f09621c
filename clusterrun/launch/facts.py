"""Facts of this machine and its cluster that a plan depends on; the caller looks them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from clusterrun.config.choices import Cluster, Starter
from clusterrun.config.hosts import HostList
from clusterrun.shared.wording import parse_version


class Interpreter(NamedTuple):
    """What is known about the job's Python."""

    path: str = ""  # "": it is not on this machine
    version: tuple[int, int] | None = None
    packages: Mapping[str, str] = MappingProxyType({})  # with versions, "" if not found
    is_known: bool = False  # False: a package without a version may still be installed
    places: tuple[str, ...] = ()  # the directories that it imports from

    def version_of(self, package: str) -> tuple[int, int] | None:
        """Return the major and minor version of a package; None if missing or unreadable."""
        return parse_version(self.packages.get(package, ""))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The machine and the cluster at one submission."""

    cluster: Cluster  # decided, never AUTO
    python: str  # an absolute path, or a bare name to be found on the node
    workdir: str  # absolute, as is `runs_dir`
    runs_dir: str
    interpreter: Interpreter = field(default_factory=Interpreter)  # what `python` resolves to
    oldest: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # supported; also Python's
    local_gpus: tuple[str, ...] = ()  # ids that may be used here, by CUDA_VISIBLE_DEVICES
    local_cpus: int = 1
    platform: str = "linux"
    missing: frozenset[str] = frozenset()  # the job's paths that do not exist here, as written
    accelerate_keys: frozenset[str] = frozenset()  # that its YAML may have; empty: unknown
    accelerate_config_text: str = ""  # of the user's file, as the next two; "": no file
    deepspeed_config_text: str = ""
    script_deepspeed_text: str = ""  # the JSON in the script's arguments (`launch.inputs`)
    hosts: HostList = field(default_factory=HostList)  # of a job over ssh or in an allocation
    starter: Starter = Starter.SSH
