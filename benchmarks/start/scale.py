"""Many nodes: light ranks come up, are logged and end; nodes meet; what grows with their number."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Section, Value
from benchmarks.start.place import SCRIPTS, Place, launched_at, sbatch, script, settle
from benchmarks.start.turns import compared, in_turns, parts
from benchmarks.start.world import Times, known
from clusterrun.health.machine import versions
from clusterrun.node.base.identity import Identity
from clusterrun.node.base.ports import candidate_ports
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.link import connection
from clusterrun.node.link import member as agents
from clusterrun.node.link.connection import LaunchParameters, Realm, Report
from clusterrun.node.link.head import Head
from clusterrun.node.link.member import Clock
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import raise_descriptor_limit
from tests.cluster.cluster import Cluster
from tests.road import LIGHT

OURS, FLOOR = "clusterrun", "srun"
PROCS = 8
MEETINGS = (16, 64, 256, 1000)
GROUP_NODES = 16
GROUP_PORTS = {"store": 29600, "gloo": 29650}
SIZES = (64, 128, 256)  # of torch's groups; the ranks share the cores of this machine
VARIABLES = 40  # about as many as accelerate and torch set
PORT = candidate_ports(f"benchmark of the link {os.getpid()}", 1, (20000, 29999))[0]
ENDED = "_job_complete: JobId={} done"


def light(place: Place) -> Iterator[Section]:
    """Yield the table of many light ranks."""
    cluster = place.cluster(place.large)
    contenders: dict[str, Callable[[], Times]] = {
        OURS: partial(_our_light, place, cluster),
        FLOOR: partial(_bare_light, place, cluster),
    }
    found = in_turns(contenders, place.rounds)
    totals = {name: [known(each["whole_s"]) for each in turns] for name, turns in found.items()}
    rows = compared(totals, OURS, {FLOOR: 1.5})
    for row in rows:
        row |= {k: v for k, v in parts(found[str(row["what"])]).items() if k != "whole_s"}
    yield Section(
        title=f"{place.large} nodes x {PROCS} light ranks",
        about="Each rank imports nothing, prints a line and sleeps a second; clusterrun's launcher "
        "is a stand-in without torch. From slurmd's start of the batch script to the job's end, by "
        "slurmctld's log; until then every line must be in the logs (clusterrun) or in srun's "
        f"output. All {place.large} nodes share this machine's cores. Parts, medians: to the last "
        "rank's line; from there to the end.",
        rows=rows,
    )


def _our_light(place: Place, cluster: Cluster) -> Times:
    directory = place.fresh("light")
    words = ("--cluster", "slurm", "--nodes", str(place.large), "--nproc-per-node", str(PROCS))
    job = place.submit(directory, "-y", *words, *LIGHT, "--time", "10", str(SCRIPTS / "light.py"))
    settle(cluster, job)
    logs = (directory / "runs" / "by-job" / job / "logs" / "a1").glob("*.log")
    return _lived(cluster, job, "\n".join(path.read_text() for path in logs), place.large * PROCS)


def _bare_light(place: Place, cluster: Cluster) -> Times:
    directory, nodes = place.fresh("light"), place.large
    body = f"srun --ntasks-per-node={PROCS} {sys.executable} {SCRIPTS / 'light.py'}\n"
    argv = script(directory, body, f"-N{nodes}", f"--ntasks={nodes * PROCS}", "-t10")
    job = sbatch(argv)
    settle(cluster, job)
    return _lived(cluster, job, (directory / "batch.out").read_text(), nodes * PROCS)


def _lived(cluster: Cluster, job: str, text: str, ranks: int) -> Times:
    up = up_times(text)
    if len(up) != ranks:
        raise RuntimeError(f"job {job} has logged {len(up)} of {ranks} ranks")
    began, end = launched_at(cluster, job), _ended_at(cluster, job)
    return {"whole_s": end - began, "up_s": max(up) - began, "to the end_s": end - max(up)}


def up_times(text: str) -> list[float]:
    """Return the times that light ranks printed, wherever they stand in a line.

    >>> up_times("0000000000000001 3 o up 3 12.5")
    [12.5]
    """
    words = [line.split() for line in text.splitlines()]
    return [float(each[-1]) for each in words if each[-3:-2] == ["up"]]


def _ended_at(cluster: Cluster, job: str) -> float:
    log = cluster.shape.state_dir / "log" / "slurmctld.log"
    lines = [line for line in log.read_text().splitlines() if ENDED.format(job) in line]
    return datetime.fromisoformat(lines[0][1:].partition("]")[0]).timestamp()


def store(place: Place) -> Iterator[Section]:
    """Yield the tables of meetings, of torch's group, and of what grows with the nodes."""
    cluster = place.cluster(place.large)
    yield _meetings_of_jobs(place, cluster)
    found = [_meeting(nodes, place.fresh("meeting")) for nodes in MEETINGS]
    yield Section(
        title="The agents' meeting",
        about="One process with the head's end of the link and one with all members' ends, over "
        f"loopback, with reports of today's libraries and {VARIABLES} variables for the ranks: "
        "from the first connection until all have their parameters. Bytes are those of the "
        "messages; `processor` is that of the head's process, or a member's share of theirs.",
        rows=[each.row for each in found],
    )
    groups = _groups(cluster)
    yield Section(
        title="torch's store and group",
        about="Ranks on nodes of the test cluster, forked from one process that has "
        "imported torch, into the nodes' network namespaces: from the first fork until all have "
        "met at the store, have a gloo group, and have ended an all-reduce. Bytes are those of "
        "node 0, which has the store: there, with gloo, each rank reads all others' addresses.",
        rows=groups,
    )
    yield _model(found[-1], [row for row in groups if row["what"] == "store"][-1])


def _meetings_of_jobs(place: Place, cluster: Cluster) -> Section:
    sizes = [nodes for nodes in (2, 16, 64) if nodes <= place.large]
    contenders = {str(nodes): partial(_met, place, cluster, nodes) for nodes in sizes}
    found = in_turns(contenders, place.rounds)
    rows: list[dict[str, Value]] = [
        {"nodes": int(name), **parts(turns), "turns": len(turns)} for name, turns in found.items()
    ]
    return Section(
        title="Meeting on the real Slurm",
        about="Jobs of one light rank for each node, by their events. From slurmd's start of the "
        "batch script to the first and the last agent's start, and to the head's decision how to "
        "launch, which needs all nodes' reports. All nodes share this machine's cores, and most of "
        "the time is the start of their interpreters.",
        rows=rows,
    )


def _met(place: Place, cluster: Cluster, nodes: int) -> Times:
    directory = place.fresh("met")
    words = ("--cluster", "slurm", "--nodes", str(nodes), "--nproc-per-node", "1")
    job = place.submit(directory, "-y", *words, *LIGHT, "--time", "10", str(SCRIPTS / "light.py"))
    settle(cluster, job)
    files = (directory / "runs" / "by-job" / job / "events").glob("*.jsonl")
    events = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    began = launched_at(cluster, job)
    started = [event["ts"] - began for event in events if event["type"] == "started"]
    met = [event["ts"] - began for event in events if event["type"] == "rendezvous"]
    decided = min(met)
    return {
        "first agent_s": min(started),
        "last agent_s": max(started),
        "decided_s": decided,
        "after the last agent_s": decided - max(started),
    }


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a meeting of nodes cost; bytes and processor seconds of the head, and of one member."""

    nodes: int
    wall_s: float
    head_cpu_s: float
    member_cpu_s: float
    received_bytes: int
    sent_bytes: int

    @property
    def members(self) -> int:
        return self.nodes - 1

    @property
    def row(self) -> dict[str, Value]:
        return {
            "nodes": self.nodes,
            "head's connections": self.members,
            "wall_s": self.wall_s,
            "head's processor_s": self.head_cpu_s,
            "for each member_ms": 1000 * self.head_cpu_s / self.members,
            "a member's processor_ms": 1000 * self.member_cpu_s,
            "head receives_bytes": self.received_bytes,
            "for each member_bytes": self.received_bytes // self.members,
            "head sends_bytes": self.sent_bytes,
            "to each member_bytes": self.sent_bytes // self.members,
        }


def _meeting(nodes: int, directory: Path) -> Meeting:
    """Let a head in this process and members in a forked one meet."""
    raise_descriptor_limit()
    realm = Realm(paths=RunPaths(root=directory / "job" / "run"), attempt=1)
    realm.paths.attempts_dir.mkdir(parents=True)
    take_attempt(realm.paths, 1, "")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os._exit(_members(nodes, realm, writing))
    os.close(writing)
    began, before = time.perf_counter(), _processor_s()
    sent = asyncio.run(_head_meets(nodes, realm))
    wall, spent = time.perf_counter() - began, _processor_s() - before
    with os.fdopen(reading) as pipe:
        members_cpu, received = json.loads(pipe.read())
    os.waitpid(child, 0)
    return Meeting(
        nodes=nodes,
        wall_s=wall,
        head_cpu_s=spent,
        member_cpu_s=members_cpu / nodes,
        received_bytes=received,
        sent_bytes=sent,
    )


def _members(nodes: int, realm: Realm, writing: int) -> int:
    before = _processor_s()
    received = asyncio.run(_members_meet(nodes, realm))
    os.write(writing, json.dumps([_processor_s() - before, received]).encode())
    return 0


async def _head_meets(nodes: int, realm: Realm) -> int:
    count = _counted()
    head = Head(realm, nodes, lambda: 300.0, SharedDisk())

    async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not await head.admit(reader, writer):
            writer.close()

    listener = socket.create_server(("127.0.0.1", PORT), backlog=1024)
    await asyncio.start_server(knocked, sock=listener, backlog=1024)
    await head.meet(lambda: asyncio.sleep(0))
    variables = {f"ACCELERATE_VARIABLE_{number:02}": "some value" for number in range(VARIABLES)}
    head.welcome(
        LaunchParameters(address="", port=1, interface="", precision="bf16", variables=variables)
    )
    sent = count[0]
    await head.stop(await head.decision.wait())
    await head.close()
    return sent


async def _members_meet(nodes: int, realm: Realm) -> int:
    count = _counted()
    place = agents.Place("127.0.0.1", PORT)
    members = [
        agents.Member(
            _who(rank, nodes), realm, place, 300, Clock(), _ignore, _ignore, {}, SharedDisk()
        )
        for rank in range(nodes)
    ]
    await asyncio.gather(*(one.meet(_report(rank)) for rank, one in enumerate(members)))
    sent = count[0]
    await asyncio.gather(*(member.rest(is_well=False) for member in members))
    return sent


def _counted() -> list[int]:
    """Count the bytes of the messages that this process sends from now on."""
    count, send = [0], connection.Channel.send

    def counting(channel: Any, kind: str, **fields: Any) -> None:
        count[0] += len(json.dumps({"type": kind, **fields})) + 1
        send(channel, kind, **fields)

    connection.Channel.send = counting  # type: ignore[method-assign,assignment]
    return count


def _who(rank: int, nodes: int) -> Identity:
    return Identity(
        job_id="1",
        node=f"node{rank}",
        node_rank=rank,
        nodes=tuple(f"node{other}" for other in range(nodes)),
        conductor="node0",
    )


def _ignore(what: object) -> None:
    """Do nothing with what the conductor reports."""


async def _report(rank: int) -> Report:
    return Report(node=f"node{rank}", node_rank=rank, versions=versions())


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _groups(cluster: Cluster) -> list[dict[str, Value]]:
    """Measure the store on all nodes, and groups on a few, for the size of a kernel's ARP table."""
    few = cluster.nodes[:GROUP_NODES]
    return [*_joined("store", cluster, cluster.nodes), *_joined("gloo", cluster, few)]


def _joined(kind: str, cluster: Cluster, nodes: Sequence[str]) -> list[dict[str, Value]]:
    shape = cluster.shape
    places = [f"/run/netns/{shape.netns(node)}" for node in nodes]
    port = str(GROUP_PORTS[kind])
    argv = [sys.executable, str(SCRIPTS / "group.py"), kind, shape.address(nodes[0]), port, *places]
    lines = "".join(f"{size}\n" for size in SIZES)
    done = subprocess.run(argv, input=lines, check=True, capture_output=True, text=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [_group_row(kind, len(nodes), each) for each in found]


def _group_row(kind: str, nodes: int, found: dict[str, float]) -> dict[str, Value]:
    world = int(found["world"])
    times: dict[str, Value] = {
        f"{name}_s": found.get(name) for name in ("forked", "store", "group", "all-reduce")
    }
    return {
        "what": kind,
        "nodes": nodes,
        "ranks": world,
        **times,
        "node 0 receives_bytes": int(found["received"]),
        "node 0 sends_bytes": int(found["sent"]),
        "sends for each rank_bytes": found["sent"] / world,
        "sends for each pair of ranks_bytes": found["sent"] / world**2,
    }


def _model(meeting: Meeting, joined: dict[str, Value]) -> Section:
    """Return what grows with the nodes, by formula, with the measured constants."""
    per_rank = float(str(joined["sends for each rank_bytes"]))
    return Section(
        title="What grows with the number of nodes",
        about=f"By formula, with the constants of the largest measurements above, {PROCS} ranks "
        "for each node. `link`: what clusterrun adds; it grows on the head alone, and linearly. "
        "Each member has one connection and messages of constant size. `store`: torch's, with any "
        "launcher, until all have met; each rank and each node's launcher has a connection. What a "
        "backend then exchanges there is not in the table: gloo's part grows faster than the "
        "square of the ranks, as measured above.",
        rows=[grown(nodes, meeting, per_rank) for nodes in (2, 16, 64, 256, 1000)],
    )


def grown(nodes: int, meeting: Meeting, rank_bytes: float) -> dict[str, Value]:
    """Return a row of the model: a number of nodes, a meeting's constants, the store's per rank."""
    members, connections = nodes - 1, nodes * PROCS + nodes
    return {
        "nodes": nodes,
        "link: head's connections": members,
        "link: head receives_bytes": round(meeting.received_bytes / meeting.members * members),
        "link: head sends_bytes": round(meeting.sent_bytes / meeting.members * members),
        "link: head's processor_s": meeting.head_cpu_s / meeting.members * members,
        "link: a member's connections": 1,
        "link: a member sends_bytes": meeting.received_bytes // meeting.members,
        "store: connections": connections,
        "store: sends_bytes": round(rank_bytes * connections),
    }
