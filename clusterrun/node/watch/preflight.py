"""Check this node before its ranks start, and report what it is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Final

from clusterrun.config.choices import Device, Preflight
from clusterrun.errors import shortened
from clusterrun.health.examine import examine
from clusterrun.health.gpus import LONG_S, GpuAnswer, device_names
from clusterrun.health.machine import versions
from clusterrun.health.node import Needs, quick_checks
from clusterrun.launch.plan import Plan, Precision
from clusterrun.node.base.causes import NodeError, NodeExit
from clusterrun.node.base.identity import Attempt, Identity
from clusterrun.node.link.connection import Report
from clusterrun.shared import shell
from clusterrun.shared.files import needed_descriptors, raise_descriptor_limit
from clusterrun.shared.finding import BAD, Finding, note
from clusterrun.shared.installed import own_version
from clusterrun.shared.wording import count, missing_text

DEADLINE_S: Final = 1.5  # a start must not take 2 s longer; a late check is skipped
MOST: Final = 8  # checks in a report
LETTERS: Final = 600  # of a text
TORCH_ANSWER_S = 300  # a cold import from a busy shared file system
_ASK_TORCH = """
import sys; sys.path[:] = filter(None, sys.path)
import json, torch
print(json.dumps([torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]))
"""
Capabilities = tuple[tuple[int, int], ...]


class NodeChecks:
    """The quick checks of this node before the launch; none if off."""

    def __init__(self, plan: Plan, *, is_head: bool = False) -> None:
        self._is_on = plan.preflight is not Preflight.OFF
        self._needs = Needs.of(plan, is_head=is_head)
        self._asked: GpuAnswer | None = None

    @property
    def pids(self) -> list[int]:
        """Child processes that may be stuck in the kernel."""
        return [self._asked.pid] if self._asked and self._asked.pid else []

    async def report(self) -> tuple[Finding, ...]:
        """Run the checks; return notes and failures, for the conductor."""
        if not self._is_on:
            return ()
        self._asked = self._needs.gpu_answer()
        try:
            checks = quick_checks(self._needs, self._asked)
            found = await asyncio.to_thread(examine, checks, DEADLINE_S)
        except Exception as error:  # noqa: BLE001 - a fault of a check must not end the job
            hint = "start without these checks: --set launch.preflight=off"
            found = [note("preflight", f"cannot check this node: {error!r}", hint)]
        bad = sorted((c for c in found if c.severity in BAD), key=lambda c: BAD.index(c.severity))
        return tuple(map(_short, bad[:MOST]))


def _short(check: Finding) -> Finding:
    text, fix = (shortened(" ".join(each.split()), LETTERS) for each in (check.text, check.fix))
    return dataclasses.replace(check, text=text, fix=fix)


def node_report(plan: Plan, who: Identity) -> Report:
    """Return this node's report to the conductor."""
    if plan.is_smoke:  # the job only checks nodes: it refuses none
        return Report(node=who.node, node_rank=who.node_rank, versions={})
    is_cuda = plan.device is Device.CUDA
    needs_capabilities = is_cuda and plan.precision is Precision.HEAD  # to choose bf16 or fp16
    asked = GpuAnswer(device_names(os.environ), LONG_S)
    return Report(
        node=who.node,
        node_rank=who.node_rank,
        versions=versions(),
        capabilities=gpu_capabilities(os.environ, asked) if needs_capabilities else (),
        problem=missing_packages(plan) or (gpu_problem(plan, os.environ, asked) if is_cuda else ""),
    )


def missing_packages(plan: Plan) -> str:
    """Return which packages for the launch this interpreter lacks; empty if none."""
    if not (missing := [name for name in plan.strategy.packages if not own_version(name)]):
        return ""
    way_out = "install clusterrun[train] there, or name another interpreter with --python"
    return f"{missing_text(sys.executable, missing)}; {way_out}"


def check_descriptors(attempt: Attempt) -> None:
    """Raise the limit on open files; on the first node, raise NodeError if it stays too low."""
    plan, who = attempt.plan, attempt.who
    wanted = needed_descriptors(nodes=0, ranks=plan.world_size)  # which rank 0 opens
    limit = raise_descriptor_limit()
    if who.is_first and limit < wanted:
        text = f"{plan.world_size} ranks need {wanted} open files in one process"
        raise NodeError(NodeExit.NODE_UNFIT, f"{who.node}: {text}; ulimit -Hn is {limit}")


def gpu_problem(plan: Plan, env: Mapping[str, str], asked: GpuAnswer) -> str:
    """Return why the node has too few GPUs for its ranks; empty if it has enough."""
    found, ranks = visible_gpus(env, asked), plan.procs_per_node
    if found is None or found >= ranks:
        return ""
    return f"only {count(found, 'GPU')} for {ranks} ranks; each rank needs one"


def visible_gpus(env: Mapping[str, str], asked: GpuAnswer) -> int | None:
    """Count the GPUs that the scheduler or the user gave this node; None if unknown."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len(device_names(env))
    if (text := env.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return int(text)
    return None if asked.answer.absent or asked.answer.problem else len(asked.answer.gpus)


def gpu_capabilities(env: Mapping[str, str], asked: GpuAnswer) -> Capabilities:
    """Return the compute capability of each GPU that the ranks will see; empty if unknown."""
    if visible_gpus(env, asked) == 0:
        return ()
    rows = [(gpu.capability or (0, 0)) for gpu in asked.answer.gpus]  # (0, 0): unknown
    if not rows or (0, 0) in rows or asked.answer.problem:
        return _torch_capabilities()
    return tuple((major, minor) for major, minor in rows)


def _torch_capabilities() -> Capabilities:
    """Ask torch in a child process: the agent must hold no CUDA context. Raises NodeError."""
    done = shell.run_once([sys.executable, "-c", _ASK_TORCH], TORCH_ANSWER_S)
    if done.rc == shell.TIMED_OUT:
        text = f"{socket.gethostname()}: importing torch took more than {TORCH_ANSWER_S} s"
        raise NodeError(NodeExit.RENDEZVOUS_FAILED, text)
    with contextlib.suppress(ValueError, IndexError):
        rows = json.loads(done.stdout.splitlines()[-1])
        return tuple((int(major), int(minor)) for major, minor in rows)
    return ()
