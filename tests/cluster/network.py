"""One bridge, and for each node a network namespace, a host name and a cable to the bridge."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from tests import namespaces
from tests.cluster.shape import Shape
from tests.namespaces import ip, run

HOSTS = Path("/etc/hosts")
CGROUPS = Path("/sys/fs/cgroup/memory")  # version 1


def refusal() -> str:
    """Return why this machine can't have nodes, in the words of its tools; empty where it can."""
    script = "ip link add b0 type bridge && ip link add v0 type veth peer name v1"
    return namespaces.refusal("net", "uts", script=script)


def make(shape: Shape) -> None:
    """Make the bridge, the namespaces, the cables and the host names."""
    bridge = shape.bridge
    lines = [
        f"link add {bridge} type bridge",
        f"addr add {shape.head_address}/{shape.network.prefixlen} dev {bridge}",
        f"link set {bridge} up",
    ]
    ip(lines)
    for node in shape.node_names:
        make_node(shape, node)
    _write_hosts(shape, names=True)


def make_node(shape: Shape, node: str) -> None:
    """Make the namespaces of one node and its cable to the bridge."""
    netns, cable = shape.netns(node), shape.cable(node)
    peer = f"peer name eth0 address {shape.mac_address(node)} netns {netns}"
    outside = (
        f"netns add {netns}",
        f"link add {cable} type veth {peer}",
        f"link set {cable} master {shape.bridge} up",
    )
    address = f"{shape.address(node)}/{shape.network.prefixlen}"
    inside = ("link set lo up", f"addr add {address} dev eth0", "link set eth0 up")
    ip(outside)
    ip(inside, "-n", netns)
    _make_host_name(shape.uts_file(node), node)


def remove_node(shape: Shape, node: str) -> None:
    """Remove a node's cable and network namespace, and with it the state of its connections."""
    run(["ip", "link", "delete", shape.cable(node)])
    run(["ip", "netns", "delete", shape.netns(node)])


def remove(shape: Shape) -> None:
    """Remove what `make` made; whatever is missing already is passed over."""
    for file in sorted((shape.state_dir / "uts").glob("*")):
        run(["umount", str(file)], check=False)
    for netns in existing_namespaces(shape):
        run(["ip", "netns", "delete", netns], check=False)
    for cable in _cables(shape):
        run(["ip", "link", "delete", cable], check=False)
    run(["ip", "link", "delete", shape.bridge], check=False)
    _write_hosts(shape, names=False)


def enter(shape: Shape, node: str) -> list[str]:
    """Return the argv prefix that starts a program on `node`.

    nsenter and not `ip netns exec`: that one mounts a new /sys and hides the cgroup mounts.
    """
    return ["nsenter", f"--net=/run/netns/{shape.netns(node)}", f"--uts={shape.uts_file(node)}"]


def set_cable(shape: Shape, node: str, *, plugged: bool) -> None:
    """Plug or pull the network cable of a node."""
    run(["ip", "link", "set", shape.cable(node), "up" if plugged else "down"])


def has_node(shape: Shape, node: str) -> bool:
    """Return whether the node's network namespace is there."""
    return (Path("/run/netns") / shape.netns(node)).exists()


def existing_namespaces(shape: Shape) -> list[str]:
    """Return every network namespace of this slot, also one of an earlier, larger cluster."""
    directory = Path("/run/netns")
    return sorted(path.name for path in directory.glob(f"{shape.bridge}-*"))


def _make_host_name(file: Path, node: str) -> None:
    if os.path.ismount(file):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    run(["unshare", f"--uts={file}", "hostname", node])


def _cables(shape: Shape) -> list[str]:
    names = (path.name for path in Path("/sys/class/net").iterdir())
    return sorted(name for name in names if re.fullmatch(rf"cr{shape.slot}n\d+", name))


def _write_hosts(shape: Shape, *, names: bool) -> None:
    """Write the nodes' names between two marker lines.

    In place: inside a container /etc/hosts is a mount, which can't be renamed over.
    """
    begin, end = f"# begin {shape.bridge} test cluster", f"# end {shape.bridge} test cluster"
    text = re.sub(rf"{begin}\n.*?{end}\n", "", HOSTS.read_text(), flags=re.DOTALL)
    if names:
        lines = [f"{shape.head_address} {shape.bridge}-head"]
        lines += [f"{shape.address(node)} {node}" for node in shape.node_names]
        text = "\n".join((text.removesuffix("\n"), begin, *lines, end, ""))
    with HOSTS.open("r+") as hosts:  # not emptied first: others look names up meanwhile
        hosts.write(text)
        hosts.flush()
        hosts.truncate()


# The memory cgroups that a slurmd makes for its node


def memory_refusal() -> str:
    """Return why no memory limit can be set here, or an empty string."""
    probe = CGROUPS / f"clusterrun-probe-{os.getpid()}"
    try:
        probe.mkdir()
        (probe / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError as error:
        return str(error)
    finally:
        with suppress(OSError):
            probe.rmdir()
    return ""


def remove_cgroups(shape: Shape) -> None:
    """Remove what slurmd leaves; the processes have ended."""
    for node in shape.node_names:
        for path, _, _ in os.walk(CGROUPS / f"slurm_{node}", topdown=False):
            with suppress(OSError):
                os.rmdir(path)
