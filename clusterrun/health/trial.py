"""The script of `doctor --nodes`: check the nodes of a run, alone and together.

Each rank multiplies matrices on its device; the first rank of a node also runs the node's checks.
Then the ranks that are there measure together. Files in the run directory hold what they find.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from clusterrun.config.choices import Device
from clusterrun.health import gemm, reports
from clusterrun.health.examine import examine
from clusterrun.health.facts import facts
from clusterrun.health.gpu_answer import LONG_S, gpu_facts
from clusterrun.health.node import Needs, all_looks
from clusterrun.health.reports import GroupReport, NodeReport, Share
from clusterrun.health.site import site_verdict
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.plan import read_plan
from clusterrun.shared.finding import Finding

CHECKS_S: Final = 4.0
SITE_S: Final = 10.0
COMPUTE_S: Final = 40.0  # torch may be imported from a busy file system
ANSWER_S: Final = 12.0
REDUCE_S: Final = gemm.TIMEOUT_S + 3.0
JOIN_S: Final = 15.0  # for the first report of a node, after the first rank's products
SPARE_S: Final = 3.0
PAUSE_S: Final = 0.05
Known = dict[int, dict[str, Any]]  # what each rank found so far


def main() -> None:
    """Check this rank's part, and take part in what all do; an error is what is reported."""
    root = Path(os.environ["CLUSTERRUN_RUN_DIR"])
    plan = read_plan(RunPaths(root=root))
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = f"{'cuda' if plan.device is Device.CUDA else 'cpu'}:{local}"
    report, verdict = None, list[Finding]()
    if local == 0:
        asking = threading.Thread(target=_ask_site, args=(plan, verdict), daemon=True)
        asking.start()
        report = _alone(plan, rank)
        reports.write_node(root, report)
    computed = {device: gemm.result(device)}
    if report:
        report = replace(report, computed=computed)
        reports.write_node(root, report)
    with suppress(ImportError, RuntimeError):  # without torch, or the first rank: they do not meet
        _Meeting(root, plan, rank).hold(report.node if report else "", device, computed)
    if report:
        asking.join(SITE_S)
        checks = (*report.checks, *verdict)
        reports.write_node(root, replace(report, checks=checks, is_done=True))


def _ask_site(plan: Plan, verdict: list[Finding]) -> None:
    verdict += [site_verdict(plan.health_command, SITE_S)] if plan.health_command else []


def _alone(plan: Plan, rank: int) -> NodeReport:
    needs = Needs.of(plan, is_head=rank == 0)
    asked = needs.gpu_answer(LONG_S)
    checks = tuple(examine(all_looks(needs, asked), CHECKS_S))
    own = facts(gpu_facts(asked) if asked else {})
    return NodeReport(node=os.environ["CLUSTERRUN_NODE"], rank=rank, checks=checks, facts=own)


class _Meeting:
    """The ranks that are there, in rounds: each hands in what it found, and learns it of all.

    The first rank hosts their store, and waits for the others; a late one is left out.
    """

    def __init__(self, root: Path, plan: Plan, rank: int) -> None:
        """Join the first rank's store. Raises ImportError, RuntimeError."""
        from torch.distributed import TCPStore

        self._root, self._rank = root, rank
        self._host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=COMPUTE_S)
        self._store = TCPStore(
            self._host, port, is_master=rank == 0, timeout=patience, wait_for_workers=False
        )
        self._of_node = plan.procs_per_node
        self._ranks = tuple(range(plan.world_size))
        self._known: Known = {}

    def hold(self, node: str, device: str, computed: Mapping[str, Any]) -> None:
        """Take part in all rounds; `node` is set for its first rank. Raises RuntimeError."""
        self._round("ready", {"node": node, "computed": computed}, COMPUTE_S, self._expected)
        mine: dict[str, Any] = {"clock_s": time.time()}  # all ranks leave a round at once
        if node:
            names = filter(None, (self._known[rank]["node"] for rank in self._ranks))
            mine["unseen"] = reports.unseen(self._root, [*names])
        self._round("look", mine)
        fit = [rank for rank in self._ranks if "error" not in _product(self._known[rank])]
        self._round("reduce", self._reduced(device, fit) if self._rank in fit else {}, 2 * REDUCE_S)
        if self._rank == 0:
            reports.write_group(self._root, _group(self._known, self._ranks))
            self._store.set("written", "")
        self._store.wait(["written"], timedelta(seconds=ANSWER_S))  # the store ends with its host

    def _round(
        self,
        name: str,
        found: Mapping[str, Any],
        within_s: float = ANSWER_S,
        expected: Callable[[float], set[int]] | None = None,
    ) -> None:
        """Hand in, and learn what those found that did so in time. Raises RuntimeError if late."""
        self._store.set(f"{name}/{self._rank}", json.dumps(found))
        if self._rank == 0:
            self._store.set(name, json.dumps(self._gathered(name, within_s, expected)))
        self._store.wait([name], timedelta(seconds=within_s + SPARE_S))
        gathered = {int(rank): each for rank, each in json.loads(self._store.get(name)).items()}
        for rank, each in gathered.items():
            self._known.setdefault(rank, {}).update(each)
        if self._rank not in gathered:
            raise RuntimeError("this rank was late")
        self._ranks = tuple(gathered)

    def _gathered(
        self, name: str, within_s: float, expected: Callable[[float], set[int]] | None
    ) -> Known:
        began, here = time.monotonic(), set[int]()
        while (passed_s := time.monotonic() - began) < within_s:
            here |= {n for n in self._ranks if n not in here and self._has(f"{name}/{n}")}
            if not (expected(passed_s) if expected else set(self._ranks)) - here:
                break
            time.sleep(PAUSE_S)
        return {n: json.loads(self._store.get(f"{name}/{n}")) for n in sorted(here)}

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _expected(self, passed_s: float) -> set[int]:
        """Return the ranks of the nodes that may still come: torch may not start on one."""
        if passed_s < JOIN_S:
            return set(self._ranks)
        found = reports.read_nodes(self._root).values()
        fit = [each.rank for each in found if "error" not in _product(vars(each))]
        return {first + local for first in fit for local in range(self._of_node)}

    def _reduced(self, device: str, fit: list[int]) -> dict[str, Any]:
        from torch.distributed import PrefixStore

        store, found = PrefixStore("group", self._store), dict[str, Any]()
        place = fit.index(self._rank)

        def reduce() -> None:
            found.update(gemm.all_reduced(device, store, place, len(fit)))

        # A rank that is in the group may wait for others that are not, without a time limit.
        reducing = threading.Thread(target=reduce, daemon=True)
        reducing.start()
        reducing.join(REDUCE_S)
        return dict(found) or {"reduce_error": f"no answer within {REDUCE_S:g} s"}


def _product(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the result of a rank's matrix products."""
    return next(iter((found["computed"] or {}).values()), {})


def _group(known: Known, left: tuple[int, ...]) -> GroupReport:
    """Merge what ranks found into one share for each node."""
    shares: dict[str, Share] = {}
    name, lost = "", list[str]()
    for rank, found in sorted(known.items()):
        name = found["node"] or name
        if rank not in left and name not in lost:
            lost.append(name)
        fields = {each: found[each] for each in Share.__dataclass_fields__ if each in found}
        if found["node"]:
            shares[name] = Share(**fields)
        elif name in shares:
            shares[name] = _merged(shares[name], Share(**fields))
    return GroupReport(shares=shares, lost=tuple(lost))


def _merged(first: Share, other: Share) -> Share:
    """Add another rank of the node."""
    times = [each.reduced_s for each in (first, other) if each.reduced_s is not None]
    return replace(
        first,
        computed={**first.computed, **other.computed},
        reduced_s=max(times, default=None),
        reduce_error=first.reduce_error or other.reduce_error,
    )


if __name__ == "__main__":
    main()
