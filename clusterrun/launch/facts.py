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
    """What is known about the job's Python; `path` is "" if it is not on this machine.

    `packages` maps packages to versions, "" if one was not found. It is missing if `is_known`, else
    it may be where nobody looked. `places` are the directories that Python imports from.
    """

    path: str = ""
    version: tuple[int, int] | None = None
    packages: Mapping[str, str] = MappingProxyType({})
    is_known: bool = False
    places: tuple[str, ...] = ()

    def version_of(self, package: str) -> tuple[int, int] | None:
        """Return the major and minor version of a package; None if missing or unreadable."""
        return parse_version(self.packages.get(package, ""))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The machine and the cluster at one submission.

    `cluster` is decided (never AUTO); `workdir` and `runs_dir` are absolute, and so is `python`
    unless it is a bare name, to be found on the node.
    `missing` contains the job's paths that do not exist here, as written.
    `interpreter` is the file that `python` resolves to; `oldest` are the oldest supported versions,
    including Python's.
    `local_gpus` are the ids that this machine may use (CUDA_VISIBLE_DEVICES applied).
    `accelerate_keys` are those that the job's accelerate accepts in its YAML, empty if unknown.
    The three texts are the user's files, empty if there is none; the last is the DeepSpeed JSON in
    the script's arguments (`launch.inputs`). `hosts` and `starter` are those of a job over ssh
    or in an allocation.
    """

    cluster: Cluster
    python: str
    workdir: str
    runs_dir: str
    interpreter: Interpreter = field(default_factory=Interpreter)
    oldest: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    local_gpus: tuple[str, ...] = ()
    local_cpus: int = 1
    platform: str = "linux"
    missing: frozenset[str] = frozenset()
    accelerate_config_text: str = ""
    accelerate_keys: frozenset[str] = frozenset()
    deepspeed_config_text: str = ""
    script_deepspeed_text: str = ""
    hosts: HostList = field(default_factory=HostList)
    starter: Starter = Starter.SSH
