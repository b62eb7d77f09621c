"""What the conductor asks each node while its ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.forward.leftovers import pack
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.questions import Answerer
from clusterrun.node.watch import interruption, stacks
from clusterrun.node.watch.own_signals import OwnSignals
from clusterrun.node.watch.ranks import Ranks
from clusterrun.shared.control_page import ControlPage, Joining


class NodeAnswers:
    """The answers of one node; before its launch, it has no `ranks`."""

    def __init__(self, attempt: Attempt, spool: Spool, page: ControlPage, disk: SharedDisk) -> None:
        self._attempt, self._spool, self._disk, self.page = attempt, spool, disk, page
        self.ranks: Ranks | None = None
        scheduler = attempt.plan.cluster.scheduler
        self.own = OwnSignals(
            page=page, pids=self._pids_by_local_rank, is_in_step=bool(scheduler.signals_ranks)
        )

    def answerers(self) -> dict[str, Answerer]:
        """Return the answers by question."""

        async def found(message: Mapping[str, Any]) -> dict[str, Any]:
            return stacks.to_data(await self.places())

        async def dump(message: Mapping[str, Any]) -> dict[str, Any]:
            return {"dumped": await self.dumped(is_live=bool(message.get("live")))}

        def look(message: Mapping[str, Any]) -> dict[str, Any]:
            self.look_closely()
            return {}

        return {
            "hold": partial(interruption.hold, self.page),
            "decide": partial(interruption.decide, self.page),
            "stacks": found,
            "dump": dump,
            "warn": self.own.warn,
            "signs": lambda _: {"signs": self.signs()},
            "joins": lambda _: {**self.joins()},
            "look": look,
        }

    @property
    def pids(self) -> dict[int, int]:
        """The ranks' processes by rank."""
        return self.ranks.pids if self.ranks else {}

    async def places(self) -> list[stacks.RankPlace]:
        """Return where the ranks are."""
        return await stacks.places(self.pids, self._spool, self._attempt.who.node)

    async def dumped(self, *, is_live: bool) -> list[int]:
        """Have the ranks dump their flight recorders; of a running attempt, pack them now."""
        dumped = await stacks.dump(self.pids, self._spool)
        if is_live:
            target = self._attempt.paths.live_dumps(self._attempt.number, self._attempt.who.node)
            await self._disk.do(partial(pack, self._spool, target, is_moved=True))
        return dumped

    def signs(self) -> int:
        """Return a count, without a unit, that grows while any rank makes progress."""
        return sum(map(self.page.calls, self.page.ranks)) + stacks.bytes_moved(self.pids.values())

    def joins(self) -> dict[str, int]:
        """Return how many ranks run, wait in init_process_group(), and have joined."""
        states = [self.page.joining(rank) for rank in self.page.ranks]
        waiting, joined = states.count(Joining.WAITS), states.count(Joining.JOINED)
        return {"running": len(self.pids), "waiting": waiting, "joined": joined}

    def look_closely(self) -> None:
        """Find failures that ranks have reported just now."""
        if self.ranks is not None:
            self.ranks.look(closely=True)

    def _pids_by_local_rank(self) -> dict[int, int]:
        if self.ranks is not None:
            self.ranks.look()  # a rank may have started just now
        return {rank % self._attempt.plan.procs_per_node: pid for rank, pid in self.pids.items()}
