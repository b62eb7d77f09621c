"""Hosts as people, hostfiles and schedulers write them: `gpu1`, `user@gpu2:2222`, `[::1]:22`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from clusterrun.config.choices import Cluster, Starter
from clusterrun.errors import ConfigError, UsageError
from clusterrun.shared.hostlist import parse_hostlist

_SSH_PORT: Final = 22
_MOST_SLOTS: Final = 1024
_BETWEEN: Final = r"[,\s]+(?![^\[\]]*\])"  # not the comma of gpu[1,3]
_RANGE: Final = r"\[[0-9][0-9,-]*\]"
_SLOTS: Final = r"(?i)slots=([1-9][0-9]{0,3})"
_OPTION: Final = rf"{_SLOTS}|max[_-]?slots=[0-9]+"
_SHORT: Final = r"([^:]+|\[[^\]]+\]):([1-9][0-9]{0,3})"
_FORMS: Final = "write one host on each line: gpu1, user@gpu2:2222, or gpu3 slots=4"
# The variables of schedulers that lead to an allocation's hosts: by a file, by their names, or as a
# sign that FLUX_HOSTS answers.
NODE_FILES: Final = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
FLUX: Final = "FLUX_URI"
SOURCES: Final = (*NODE_FILES, "SLURM_JOB_NODELIST", FLUX)
FLUX_HOSTS: Final = ("flux", "getattr", "hostlist")
# The variable that a job has, and the program that starts processes on its nodes.
_STARTERS: Final = (
    ("LSB_JOBID", Starter.BLAUNCH),
    ("SLURM_JOB_ID", Starter.SRUN),
    (FLUX, Starter.FLUX),
)
# A name must not look like an option of ssh, nor like a path.
_SPEC: Final = (
    r"(?:(?P<user>[A-Za-z0-9_.][A-Za-z0-9_.-]*\$?)@)?"
    r"(?:\[(?P<address>[0-9A-Fa-f:.%a-z0-9]+)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))"
    r"(?::(?P<port>[0-9]{1,5}))?\Z"
)


class HostSpec(NamedTuple):
    """One host for ssh; `user` is "" and `port` 0 if ssh's configuration decides."""

    host: str
    user: str = ""
    port: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """The options and the destination for ssh."""
        port = ("-p", str(self.port)) if self.port else ()
        return (*port, f"{self.user}@{self.host}" if self.user else self.host)


def parse_host(text: str) -> HostSpec:
    """Read one host. Raises UsageError.

    >>> parse_host("ann@gpu2:2222").options
    ('-p', '2222', 'ann@gpu2')
    """
    found = re.match(_SPEC, text)
    port = int(found["port"] or 0) if found else 0
    if found is None or port > 65535:
        hint = "write NAME, USER@NAME, NAME:PORT or [ADDRESS]:PORT"
        raise UsageError(f"{text!r} is not a host", hint=hint)
    return HostSpec(host=found["address"] or found["name"], user=found["user"] or "", port=port)


def node_names(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return a distinct name for each host, which may be part of a file name.

    A port is added where hosts share a name, and dashes to names that are still the same.

    >>> node_names(["ann@gpu1", "gpu2:2222", "gpu2:2223", "[::1]", "gpu2-2222"])
    ('gpu1', 'gpu2-2222', 'gpu2-2223', '--1', 'gpu2-2222-')
    """
    specs = [parse_host(text) for text in hosts]
    plain = [spec.host.replace(":", "-").replace("%", "-") for spec in specs]
    names = [
        f"{name}-{spec.port}" if plain.count(name) > 1 and spec.port else name
        for name, spec in zip(plain, specs, strict=True)
    ]
    return tuple(name + "-" * names[:place].count(name) for place, name in enumerate(names))


class HostList(NamedTuple):
    """Hosts in order."""

    hosts: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()  # the GPUs of each host; 0: the list does not state them
    source: str = ""  # the name of the list in messages


def split_hosts(text: str) -> list[str]:
    """Return the hosts of one text: names between commas or spaces, ranges as Slurm writes them.

    Raises UsageError for an invalid range.

    >>> split_hosts("ann@gpu[1-2]:2222, [::1]:22")
    ['ann@gpu1:2222', 'ann@gpu2:2222', '[::1]:22']
    """
    parts = [part for part in re.split(_BETWEEN, text) if part]
    groups = [parse_hostlist(part) if re.search(_RANGE, part) else [part] for part in parts]
    return [host for group in groups for host in group]


def check_distinct(listed: HostList) -> None:
    """Refuse a host that is listed twice. Raises UsageError."""
    addresses = list(map(_address, listed.hosts))
    if twice := [h for h in listed.hosts if addresses.count(_address(h)) > 1]:
        text = f"{listed.source} lists a host more than once: {', '.join(twice)}"
        raise UsageError(text, hint="list each host once; for several GPUs, pass --gpus-per-node")


def parse_hostfile(text: str, *, shown: str) -> HostList:
    """Read a hostfile: plain, DeepSpeed's and MPI's (`gpu1 slots=4`, `gpu1:4`), PBS's and LSF's.

    PBS and LSF repeat a host for each of its CPU slots, which says nothing about its GPUs.
    Messages name it `shown`. Raises ConfigError with the line of the first mistake.
    """
    rows: dict[tuple[str, int], tuple[str, int]] = {}  # by address: host, slots
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            for host, slots in _hosts_of(words):
                first = rows.setdefault(_address(host), (host, slots))
                if first[1] != slots:
                    problem = f"{host} is listed twice, with different slots"
                    raise UsageError(problem, hint="keep one line")
        except UsageError as error:
            where = f"{shown}:{number}"
            raise ConfigError(error.message, hint=error.hints or _FORMS, where=where) from error
    if not rows:
        raise ConfigError("the hostfile lists no hosts", hint=_FORMS, where=shown)
    names, counts = zip(*rows.values(), strict=True)
    return HostList(hosts=names, slots=counts, source=shown)


def _hosts_of(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Return the hosts of a line, each with its slots (0: not stated). Raises UsageError."""
    name, *rest = words  # one host or a range of hosts, then options
    stated = [int(match[1]) for word in rest if (match := re.fullmatch(_SLOTS, word))]
    if len(stated) > 1 or not all(re.fullmatch(_OPTION, word) for word in rest):
        raise UsageError(f"{' '.join(words)!r} is not a valid hostfile line", hint=_FORMS)
    short = re.fullmatch(_SHORT, name)
    # As in MPI, `gpu1:4` means 4 slots; 22, or a number above 1024, is a port for ssh.
    if short and not stated and int(short[2]) <= _MOST_SLOTS and int(short[2]) != _SSH_PORT:
        name, stated = short[1], [int(short[2])]
    return ((host, sum(stated)) for host in split_hosts(name))  # at most one number is stated


def _address(host: str) -> tuple[str, int]:
    """Return what tells hosts apart, without the user: users of a host share its GPUs."""
    spec = parse_host(host)
    return spec.host.lower(), spec.port or _SSH_PORT


def slots_per_host(listed: HostList) -> int:
    """Return the slots of every host; 0 if none are stated. Raises UsageError if they differ."""
    if len({*listed.slots}) > 1:
        text = f"the hosts of {listed.source} have different numbers of slots"
        raise UsageError(text, hint="pass --gpus-per-node COUNT: how many GPUs to use on each host")
    return max(listed.slots, default=0)


# The hosts of an allocation


def allocation_source(environ: Mapping[str, str]) -> str:
    """Return the first variable of SOURCES that is set. Raises UsageError if none is."""
    found = next((source for source in SOURCES if environ.get(source)), None)
    if found is None:
        names = ", ".join(f"${source}" for source in SOURCES)
        hint = "run this inside the allocation, or name its nodes with --hosts or --hostfile"
        raise UsageError(f"this shell is not in an allocation: none of {names} is set", hint=hint)
    return found


def allocation_hosts(source: str, text: str) -> HostList:
    """Read the hosts in `text`, the file, variable or answer of `source`. Raises UsageError."""
    if source in NODE_FILES:
        return parse_hostfile(text, shown=f"${source}")
    names = tuple(dict.fromkeys(split_hosts(text)))
    for name in names:
        parse_host(name)  # raises UsageError if it is not a host
    return HostList(hosts=names, slots=(0,) * len(names), source=f"${source}")


def choose_starter(
    asked: Starter, cluster: Cluster, environ: Mapping[str, str], has: Callable[[str], object]
) -> Starter:
    """Return what starts processes on the hosts; `has` looks for a program.

    Raises UsageError if the starter that was asked for is missing, or can't be used.
    """
    is_allocation = not cluster.scheduler.outlives_shell
    if asked is Starter.AUTO:
        found = (starter for name, starter in _STARTERS if environ.get(name) and has(starter.value))
        return next(found, Starter.SSH) if is_allocation else Starter.SSH
    if asked is not Starter.SSH and not is_allocation:
        text = f"starter {asked.value} needs an allocation; --cluster ssh starts processes over ssh"
        raise UsageError(text, hint="pass --cluster allocation, or leave out starter")
    if not has(asked.value):
        hint = f"put {asked.value} on PATH, or choose another program: --set starter=NAME"
        raise UsageError(f"{asked.value} was not found on this machine", hint=hint)
    return asked


def without_excluded(listed: HostList, exclude: str) -> HostList:
    """Return the list without the hosts that --exclude names. Raises UsageError if none is left."""
    excluded = {*parse_hostlist(exclude)}
    rows = zip(node_names(listed.hosts), listed.hosts, listed.slots, strict=True)
    left = [
        (host, slots)
        for name, host, slots in rows
        if excluded.isdisjoint((name, host, parse_host(host).host))
    ]
    if not left:
        raise UsageError(f"--exclude {exclude} leaves none of the hosts", hint="list more hosts")
    hosts, slots = zip(*left, strict=True)
    return HostList(hosts=hosts, slots=slots, source=f"{listed.source} without --exclude")
