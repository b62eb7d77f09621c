"""Hosts as people write them: `gpu1`, `user@gpu2:2222`, `[2001:db8::1]:22`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from clusterrun.errors import UsageError

# A name must not look like an option of ssh, nor like a path.
_SPEC = (
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
        raise UsageError(
            f"{text!r} is not a host", hint="write NAME, USER@NAME, NAME:PORT or [ADDRESS]:PORT"
        )
    return HostSpec(host=found["address"] or found["name"], user=found["user"] or "", port=port)


def node_names(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return a distinct name for each host, which may be part of a file name.

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
