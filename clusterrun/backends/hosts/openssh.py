"""The ssh commands that reach the hosts: no prompt, no new host key, the user's settings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from clusterrun.shared.host_specs import parse_host

CONNECT_S = 10
LINK_S = 100  # a connection that is silent for longer is lost; the agents' link gives up first
_PINGS = 5

OPTIONS = (
    *("-oBatchMode=yes", "-oStrictHostKeyChecking=yes", f"-oConnectTimeout={CONNECT_S}"),
    *(f"-oServerAliveInterval={LINK_S // _PINGS}", f"-oServerAliveCountMax={_PINGS}"),
    *("-oForwardX11=no", "-oForwardAgent=no", "-oClearAllForwardings=yes"),
)


def ssh(host: str, argv: Sequence[str], *, terminal: bool = False) -> list[str]:
    """Return the command that runs `argv` on a host; each word arrives as it is.

    An own `bash -c` makes this independent of the login shell there.
    """
    line = " ".join(map(shlex.quote, argv))
    return [
        "ssh",
        "-t" if terminal else "-T",
        *OPTIONS,
        *parse_host(host).options,
        "--",
        f"exec bash -c {shlex.quote(line)}",
    ]
