"""Time torch's store and a gloo group across nodes: `group.py HEAD PORT NETNS… < SIZES`.

One process imports torch; for each line of stdin, a world size, it forks as many ranks, which
enter the nodes' network namespaces in turn. It prints a JSON line for each: the seconds from the
first fork until each rank has a connection to the store and all have met there; until all have a
gloo group; and until the end of the first all-reduce; and the bytes that node 0 received meanwhile.
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
TIMEOUT = timedelta(minutes=5)


def main() -> None:
    head, port, places = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    for number, line in enumerate(sys.stdin):
        print(json.dumps(measure(int(line), head, port + number, places)), flush=True)


def measure(world: int, head: str, port: int, places: list[str]) -> dict[str, float]:
    reading, writing = os.pipe()
    began, received = time.time(), received_bytes(places[0])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os._exit(join(rank, world, head, port, places[rank % len(places)], writing))
        children.append(child)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = [json.loads(line) for line in pipe]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses) or len(found) != world:
        raise SystemExit(f"{sum(map(bool, statuses))} of {world} ranks failed")
    last = {name: max(each[name] for each in found) - began for name in found[0]}
    return {"world": world, **last, "head_bytes": received_bytes(places[0]) - received}


def join(rank: int, world: int, head: str, port: int, place: str, writing: int) -> int:
    enter(place)
    times = {"forked": time.time()}
    store = dist.TCPStore(head, port, world, is_master=rank == 0, timeout=TIMEOUT)
    times["store"] = time.time()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    times["group"] = time.time()
    dist.all_reduce(torch.ones(1))
    times["all_reduce"] = time.time()
    dist.barrier()
    os.write(writing, json.dumps(times).encode() + b"\n")
    dist.barrier()
    return 0


def enter(place: str) -> None:
    with open(place) as namespace:
        if LIBC.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), place)


def received_bytes(place: str) -> float:
    """Return what a node's interface has received; a child looks, this process stays outside."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        enter(place)
        lines = Path("/proc/net/dev").read_text().splitlines()
        count = next(line.split()[1] for line in lines if line.strip().startswith("eth0:"))
        os.write(writing, count.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return float(pipe.read())


main()
