"""Lists of hosts, as options, hostfiles and schedulers write them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from clusterrun.errors import ConfigError, UsageError
from clusterrun.shared.host_specs import parse_host
from clusterrun.shared.hostlist import parse_hostlist

_SSH_PORT: Final = 22
_MOST_SLOTS: Final = 1024
_BETWEEN: Final = r"[,\s]+(?![^\[\]]*\])"  # not the comma of gpu[1,3]
_RANGE: Final = r"\[[0-9][0-9,-]*\]"
_SLOTS: Final = r"(?i)slots=([0-9]{1,4})"
_KNOWN: Final = rf"{_SLOTS}|max[_-]?slots=[0-9]+"
_SHORT: Final = r"([^:]+|\[[^\]]+\]):([0-9]{1,4})"
_FORMS: Final = "write one host on each line: gpu1, user@gpu2:2222, or gpu3 slots=4"


class HostList(NamedTuple):
    """Hosts in order; `slots` are the GPUs of each if the list states them, else 0.

    `source` names the list in messages.
    """

    hosts: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    source: str = ""


def split_hosts(text: str) -> list[str]:
    """Return the hosts of one text: names between commas or spaces, ranges as Slurm writes them.

    Raises UsageError for a range that is none.

    >>> split_hosts("ann@gpu[1-2]:2222, [::1]:22")
    ['ann@gpu1:2222', 'ann@gpu2:2222', '[::1]:22']
    """
    parts = [part for part in re.split(_BETWEEN, text) if part]
    hosts = [parse_hostlist(part) if re.search(_RANGE, part) else [part] for part in parts]
    return [host for each in hosts for host in each]


def check_distinct(listed: HostList) -> None:
    """Refuse a host that is listed twice. Raises UsageError."""
    seen: dict[tuple[str, int], str] = {}
    for host in listed.hosts:
        place = _place(host)
        first = seen.get(place)
        seen[place] = host
        if first is not None:
            names = host if host == first else f"{first} and {host}"
            raise UsageError(
                f"{listed.source} lists the same host twice: {names}",
                hint="list each host once; --gpus-per-node sets the GPUs of each",
            )


def parse_hostfile(text: str, *, shown: str) -> HostList:
    """Read a hostfile: plain, DeepSpeed's and MPI's (`gpu1 slots=4`, `gpu1:4`), PBS's and LSF's.

    A host may be repeated, as PBS and LSF do once for each CPU slot; that states no GPUs.
    Raises ConfigError with the line of the first mistake.
    """
    rows: dict[tuple[str, int], tuple[str, int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            for host, slots in _hosts_of(words):
                if rows.setdefault(_place(host), (host, slots))[1] != slots:
                    raise UsageError(
                        f"{host} is listed twice, with different slots", hint="keep one line"
                    )
        except UsageError as error:
            where = f"{shown}:{number}"
            raise ConfigError(error.message, hint=error.hints or _FORMS, where=where) from error
    if not rows:
        raise ConfigError("the hostfile lists no hosts", hint=_FORMS, where=shown)
    return HostList(
        hosts=tuple(host for host, _ in rows.values()),
        slots=tuple(slots for _, slots in rows.values()),
        source=shown,
    )


def _hosts_of(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    name, *rest = words
    stated = [match for word in rest if (match := re.fullmatch(_SLOTS, word))]
    unknown = [w for w in rest if not re.fullmatch(_KNOWN, w)]
    if unknown or len(stated) > 1:
        raise UsageError(f"{' '.join(words)!r} is not a host with its slots", hint=_FORMS)
    short = re.fullmatch(_SHORT, name)
    # `gpu1:4` are slots, as in MPI; 22 is ssh's port, and so is any number above 1024.
    if short and not stated and int(short[2]) <= _MOST_SLOTS and int(short[2]) != _SSH_PORT:
        name, slots = short[1], int(short[2])
    else:
        slots = int(stated[0][1]) if stated else 0
    if (stated or name != words[0]) and not 1 <= slots <= _MOST_SLOTS:
        raise UsageError(f"{' '.join(words)!r} states {slots} slots", hint="write 1 or more")
    return ((host, slots) for host in split_hosts(name))


def parse_named(text: str, *, shown: str) -> HostList:
    """Read a list of hosts in Slurm's form."""
    names = tuple(dict.fromkeys(split_hosts(text)))
    for name in names:
        parse_host(name)
    return HostList(hosts=names, slots=(0,) * len(names), source=shown)


def _place(host: str) -> tuple[str, int]:
    """Return what tells hosts apart: users of a host share its GPUs."""
    spec = parse_host(host)
    return spec.host.lower(), spec.port or _SSH_PORT


def one_count(listed: HostList) -> int:
    """Return the slots of each host; 0 if none are stated. Raises UsageError if they differ."""
    pairs = list(zip(listed.hosts, listed.slots, strict=True))
    for (host, slots), (other, different) in itertools.pairwise(pairs):
        if slots != different:
            raise UsageError(
                f"hosts have different numbers of slots: {host} {slots or 'none'}, "
                f"{other} {different or 'none'} ({listed.source})",
                hint="pass --gpus-per-node COUNT: how many GPUs to use on each host",
            )
    return pairs[0][1] if pairs else 0
