"""What the head of a smoke job has all nodes do at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from clusterrun.health.reports import GroupReport, Share
from clusterrun.node.link.head import Head
from clusterrun.node.smoke.part import NodePart
from clusterrun.node.smoke.probes import COMPUTE_S, REDUCE_S

ANSWER_S: Final = 12.0
SPARE_S: Final = 3.0  # the processes that compute end earlier, with an error
Found = Mapping[int, Mapping[str, Any]]


async def gather(head: Head, part: NodePart, address: str) -> GroupReport:
    """Have the nodes that are present measure the file system, their links and an all-reduce."""
    group = _Group(head, part, address)
    names = group.names
    ready = await group.ask("ready", COMPUTE_S + SPARE_S)
    alone = await part.store({})
    found = [await group.ask("store", names=list(names.values()))]
    if len(names) > 1:
        listening = await group.ask("listen")
        found.append(await group.ask("send", targets=group.ring(listening)))
    found.append(await group.reduced(ready))
    shares = {
        name: _share(*(answers.get(rank, {}) for answers in found)) for rank, name in names.items()
    }
    lost = tuple(name for rank, name in names.items() if rank not in group.answering)
    return GroupReport(shares=shares, alone=_share(alone), lost=lost)


class _Group:
    """The nodes that have met; one that does not answer is not asked again."""

    def __init__(self, head: Head, part: NodePart, address: str) -> None:
        self._head, self._part = head, part
        self._addresses = dict(sorted({0: address, **head.addresses()}.items()))
        self.answering = set(self._addresses)

    @property
    def names(self) -> dict[int, str]:
        """The nodes that met, by node rank."""
        return {rank: self._part.nodes[rank] for rank in self._addresses}

    async def ask(self, what: str, within_s: float = ANSWER_S, **fields: Any) -> Found:
        """Return the answers of all nodes, this one included, by node rank."""
        own, others = await asyncio.gather(
            self._part.answerers[what](fields),
            self._head.questions.ask(what, within_s=within_s, of=self.answering, **fields),
        )
        self.answering &= {0, *others.given}
        return {0: own, **others.given}

    def ring(self, listening: Found) -> dict[str, tuple[str, str, int]]:
        """Return the next node that listens, by node rank."""
        ports = {rank: each["port"] for rank, each in sorted(listening.items()) if each["port"]}
        ranks = list(ports)
        pairs = zip(ranks, [*ranks[1:], *ranks[:1]], strict=True)
        return {
            str(one): (self.names[two], self._addresses[two], ports[two])
            for one, two in pairs
            if one != two
        }

    async def reduced(self, ready: Found) -> Found:
        """Have the devices that computed reduce together; the others would hold them up."""
        ranks = [rank for rank in sorted(self.answering) if ready.get(rank, {}).get("is_fit")]
        if not ranks:
            return {}
        first, devices = ranks[0], self._part.devices
        if not ready[first]["port"]:
            return {first: {"reduce_error": "no port of network.port_range is free"}}
        return await self.ask(
            "reduce",
            REDUCE_S + SPARE_S,
            address=self._addresses[first],
            port=ready[first]["port"],
            world=len(ranks) * devices,
            first={str(rank): n * devices for n, rank in enumerate(ranks)},
        )


def _share(*answers: Mapping[str, Any]) -> Share:
    """Merge what a node answered; messages have more fields."""
    fields = {name: value for answer in answers for name, value in answer.items()}
    return Share(**{name: fields[name] for name in Share.__dataclass_fields__ if name in fields})
