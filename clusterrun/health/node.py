"""The checks and their pages; those of a machine that ranks run on: 2 s, no GPU memory touched.

`doctor` runs them on this machine, each agent before its ranks start.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from clusterrun.config.choices import Device
from clusterrun.health import checks, machine, paths
from clusterrun.health.examine import Check
from clusterrun.health.gpus import ANSWER_S, GpuAnswer, device_names, gpu_checks
from clusterrun.launch.plan import Plan
from clusterrun.shared.files import needed_descriptors
from clusterrun.shared.finding import Finding, skip
from clusterrun.shared.installed import PluginGroup, load_all

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the ranks of a machine need."""

    runs: Path  # the directory of the runs
    ranks: int = 1
    files: int = 0  # that the connections of a process take
    host_bytes: int = 0  # the estimated memory; 0: unknown
    gpus: tuple[str, ...] | None = None  # as in CUDA_VISIBLE_DEVICES; (): all; None: none
    node_ranks: int = 1  # of one node: the machine may simulate several, which share its GPUs

    @classmethod
    def of(cls, plan: Plan, *, is_head: bool = False) -> Needs:
        """Return what ranks need of a machine: simulated nodes share it, a head connects to all."""
        nodes_here = plan.nodes if plan.cluster.scheduler.is_this_machine else 1
        return cls(
            runs=Path(plan.runs_dir),
            ranks=plan.procs_per_node * nodes_here,
            files=needed_descriptors(plan.nodes, plan.world_size) if is_head else 0,
            host_bytes=plan.host_bytes * nodes_here,
            gpus=tuple(device_names(os.environ)) if plan.device is Device.CUDA else None,
            node_ranks=plan.procs_per_node,
        )

    def gpu_answer(self, within_s: float = ANSWER_S) -> GpuAnswer | None:
        """Return what will answer about the GPUs; None if the job uses none."""
        return None if self.gpus is None else GpuAnswer(self.gpus, within_s)


def quick_checks(needs: Needs, gpu_answer: GpuAnswer | None = None) -> dict[str, Check]:
    """Return the quick checks by id; those of a domain (`node` of `node.shm`) run in this order.

    Pass `gpu_answer`, made from `needs`, if it is also used elsewhere: the driver is asked once.
    """
    return {
        "path.disk": partial(paths.disk, needs.runs),
        "path.inodes": partial(paths.inodes, needs.runs),
        "node.shm": partial(machine.shm, needs.ranks),
        "node.memory": partial(machine.memory, needs.ranks, needs.host_bytes),
        "node.files": partial(machine.open_files, needs.ranks, needs.files),
        "node.memlock": machine.memlock,
        "node.tmp": paths.scratch,  # last: a file system that blocks would hold up the others
        **gpu_checks(gpu_answer or needs.gpu_answer(), needs.node_ranks),
        **{name: partial(own.run, needs) for name, own in own_checks().items() if own.is_quick},
    }


def all_checks(needs: Needs, gpu_answer: GpuAnswer | None = None) -> dict[str, Check]:
    """Return all checks of a machine by id: also those that may be slow, write, or are added."""
    plugin_checks()
    gpu_answer = gpu_answer or needs.gpu_answer()
    return {
        **quick_checks(needs, gpu_answer),
        **({"cuda.driver": partial(_driver, gpu_answer)} if gpu_answer else {}),
        **{name: partial(own.run, needs) for name, own in own_checks().items()},
    }


def _driver(gpu_answer: GpuAnswer) -> Finding:
    from clusterrun.health import toolchain  # only `doctor` needs it

    return toolchain.driver(toolchain.cuda_of_torch(sys.path, ""), gpu_answer)


# Checks that have a file each in checks/: a decorated function and its page. A file is enough to
# add one: `doctor`, the nodes, `explain` and the reference take it from here.


@dataclass(frozen=True, kw_only=True)
class CheckPage:
    """What `explain` prints about a check."""

    looks_at: str
    fails: str = ""  # when it does; "": never
    notes: str = ""  # when it notes something; "": never
    why: str  # what happens to a training then
    fix: Sequence[str]


class OwnCheck(NamedTuple):
    """A check with its page; a quick one is also part of the preflight."""

    run: Callable[[Needs], Finding]
    page: CheckPage
    is_quick: bool


_CHECKS: Final[dict[str, OwnCheck]] = {}
_Run = Callable[[Needs], Finding]


def check(name: str, page: CheckPage, *, is_quick: bool = False) -> Callable[[_Run], _Run]:
    """Return a decorator that registers a check by its id, `name`."""

    def register(run: _Run) -> _Run:
        _CHECKS[name] = OwnCheck(run, page, is_quick)
        return run

    return register


def own_checks() -> Mapping[str, OwnCheck]:
    """Return the checks of all files by id."""
    for module in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    return _CHECKS


@cache
def plugin_checks() -> tuple[str, ...]:
    """Register the checks of installed packages, and return what cannot be loaded.

    `doctor` runs them, here and on nodes. The agents don't look for them: that takes time.
    """
    before = {**_table(), **own_checks()}

    def add(plugin: EntryPoint) -> None:
        kept = dict(_CHECKS)
        try:
            plugin.load()
            added = {name: each for name, each in _CHECKS.items() if kept.get(name) is not each}
        finally:
            _CHECKS.clear()
            _CHECKS.update(kept)
        if taken := sorted(added.keys() & {*before, *kept}):
            raise ValueError(f"{', '.join(taken)} exists already")
        for name, (run, page, _) in added.items():
            _CHECKS[name] = OwnCheck(partial(_run_foreign, name, run), page, is_quick=False)

    return tuple(load_all(PluginGroup.CHECKS, add)[1])


def _run_foreign(name: str, run: _Run, needs: Needs) -> Finding:
    """Run a check of a package: one that raises anything is skipped."""
    try:
        found = run(needs)
        return found if isinstance(found, Finding) else skip(name, f"it returned {found!r}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is not ours
        return skip(name, f"the check raised {error!r}")


def pages() -> Mapping[str, CheckPage]:
    """Return the pages of all checks by id, in their order; those with a file of their own last."""
    plugin_checks()
    return {**_table(), **{name: each.page for name, each in own_checks().items()}}


def _table() -> dict[str, CheckPage]:
    """Return the pages of the checks that have no file of their own."""
    import yaml  # agents load no pages

    text = Path(__file__).with_name("checks.yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: CheckPage(**row) for name, row in rows.items()}
