"""What the head of a smoke job has all nodes do at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from clusterrun.health.reports import GroupReport, Share
from clusterrun.node.base.ports import free_port
from clusterrun.node.link.head import Head
from clusterrun.node.smoke.part import NodePart

ANSWER_S: Final = 12.0
REDUCE_S: Final = 60.0  # the processes end earlier, with an error
Found = dict[int, Mapping[str, Any]]


async def gather(head: Head, part: NodePart, address: str) -> GroupReport:
    """Have the nodes that are present measure the file system, their links and an all-reduce."""
    addresses = {0: address, **head.addresses()}
    names = {rank: part.nodes[rank] for rank in addresses}
    alone = await part.store({})
    found = [await _all(head, part, "store", names=list(names.values()))]
    if len(addresses) > 1:
        listening = await _all(head, part, "listen")
        ring = _ring(names, addresses, {rank: each["port"] for rank, each in listening.items()})
        found.append(await _all(head, part, "send", targets=ring))
    found.append(await _reduced(head, part, addresses))
    shares = {
        name: _share(*(answers.get(rank, {}) for answers in found)) for rank, name in names.items()
    }
    return GroupReport(shares=shares, alone=_share(alone))


async def _all(head: Head, part: NodePart, what: str, **fields: Any) -> Found:
    """Return the answers of all nodes, this one included, by node rank."""
    own, others = await asyncio.gather(
        part.answerers[what](fields), head.questions.ask(what, within_s=ANSWER_S, **fields)
    )
    return {0: own, **others.given}


def _ring(
    names: Mapping[int, str], addresses: Mapping[int, str], ports: Mapping[int, int]
) -> dict[str, tuple[str, str, int]]:
    """Return the next node of each, by node rank."""
    ranks = sorted(addresses)
    pairs = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return {str(one): (names[two], addresses[two], ports.get(two, 0)) for one, two in pairs}


async def _reduced(head: Head, part: NodePart, addresses: Mapping[int, str]) -> Found:
    firsts = {str(rank): n * part.devices for n, rank in enumerate(sorted(addresses))}
    try:
        port = free_port(part.ports)
    except OSError as error:
        return {0: {"reduce_error": f"no port is free: {error}"}}
    world = len(addresses) * part.devices
    return await _all(
        head, part, "reduce", address=addresses[0], port=port, world=world, first=firsts
    )


def _share(*answers: Mapping[str, Any]) -> Share:
    """Merge what a node answered; messages have more fields."""
    fields = {name: value for answer in answers for name, value in answer.items()}
    return Share(**{name: fields[name] for name in Share.__dataclass_fields__ if name in fields})
