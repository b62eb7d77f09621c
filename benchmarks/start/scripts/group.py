"""Time torch's store and a gloo group across nodes: `group.py KIND HEAD PORT NETNS… < SIZES`.

One process imports torch; for each line of stdin, a world size, it forks as many ranks, which
enter the nodes' network namespaces in turn. It prints a JSON line for each: the seconds from the
first fork until each rank has a connection to the store and all have met there; with KIND `gloo`
also until all have a group, and until the end of the first all-reduce; and the bytes that node 0
received and sent meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
TIMEOUT = timedelta(minutes=2)


def main() -> None:
    kind, head, port, places = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    for number, line in enumerate(sys.stdin):
        print(json.dumps(measure(kind, int(line), head, port + number, places)), flush=True)


def measure(kind: str, world: int, head: str, port: int, places: list[str]) -> dict[str, float]:
    reading, writing = os.pipe()
    began, before = time.time(), traffic(places[0])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            enter(places[rank % len(places)])
            times = join(kind, rank, world, head, port)
            os.write(writing, json.dumps(times).encode() + b"\n")
            os._exit(0)
        children.append(child)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = [json.loads(line) for line in pipe]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses) or len(found) != world:
        raise SystemExit(f"{sum(map(bool, statuses))} of {world} ranks failed")
    last = {name: max(each[name] for each in found) - began for name in found[0]}
    after = traffic(places[0])
    return {"world": world, **last, **{name: after[name] - before[name] for name in after}}


def join(kind: str, rank: int, world: int, head: str, port: int) -> dict[str, float]:
    times = {"forked": time.time()}
    store = dist.TCPStore(head, port, world, is_master=rank == 0, timeout=TIMEOUT)
    times["store"] = time.time()
    if kind == "gloo":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
        times["group"] = time.time()
        dist.all_reduce(torch.ones(1))
        times["all-reduce"] = time.time()
    if store.add("left", 1) < world and rank == 0:  # the store is in this process
        while store.add("left", 0) < world:
            time.sleep(0.01)
    return times


def enter(place: str) -> None:
    with open(place) as namespace:
        if LIBC.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), place)


def traffic(place: str) -> dict[str, float]:
    """Return what a node's interface has received and sent; a child looks, this process stays."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        enter(place)
        lines = Path("/proc/net/dev").read_text().splitlines()
        fields = next(line.split() for line in lines if line.strip().startswith("eth0:"))
        os.write(writing, f"{fields[1]} {fields[9]}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        received, sent = map(float, pipe.read().split())
    return {"received": received, "sent": sent}


main()
