"""What only the first node's agent does before the launch, for all nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from clusterrun.config.choices import Launcher
from clusterrun.node.agent.journal import Journal
from clusterrun.node.agent.launcher import NOT_FORKED
from clusterrun.node.agent.preparation import (
    host_store,
    is_store_used,
    launch_variables,
    rendezvous_port,
    smoke_variables,
)
from clusterrun.node.base.identity import Attempt
from clusterrun.node.forge.handle import Forge
from clusterrun.node.forward.spool import Spool


async def prepare_launch(
    attempt: Attempt, spool: Spool, forge: Forge | None, journal: Journal
) -> tuple[int, Mapping[str, str]]:
    """Return the port where the ranks meet, and the variables that accelerate gives them.

    If these are known, the ranks' store is already there. Raises NodeError if no port is free.
    """
    plan, port, variables = attempt.plan, 0, dict[str, str]()
    why = "no process could be forked for that"
    if forge is not None:
        asked = asyncio.ensure_future(launch_variables(attempt, spool, forge))
        await asyncio.sleep(0)  # it asks first: the store is there sooner
        if plan.world_size > 1:
            port = host_store(attempt, forge)
        found, why = await asked
        variables = dict(found)
        if variables and is_store_used(variables) != bool(port):
            port = 0 if port else host_store(attempt, forge)
        journal.event("forge", problem=why)
    if why and plan.launcher is not Launcher.ACCELERATE:
        journal.say_not_forked(f"{NOT_FORKED.format('by accelerate launch')}: {why}")
    if not variables and plan.is_smoke:
        variables = smoke_variables(plan)
    return port or rendezvous_port(attempt), variables
