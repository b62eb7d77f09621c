"""Decide the environment of a job: our variables, the preset's, then the user's."""

from __future__ import annotations

from typing import NamedTuple

from clusterrun.config.choices import Strategy
from clusterrun.config.spec import JobSpec
from clusterrun.launch.facts import Facts, version_of
from clusterrun.launch.nccl import base_environment, overlay, respell
from clusterrun.launch.plan import EnvVar
from clusterrun.launch.user_env import check_variables
from clusterrun.launch.world_shape import World


class JobEnvironment(NamedTuple):
    """The exported variables, and the process-group timeout in seconds (0: torch's default)."""

    variables: tuple[EnvVar, ...]
    timeout_s: int
    notes: tuple[str, ...]


def decide_environment(
    spec: JobSpec, facts: Facts, *, world: World, strategy: Strategy, threads: int
) -> JobEnvironment:
    """Choose the variables that do not depend on the node. Raises UsageError for invalid ones."""
    check_variables(spec)
    timeout_s = spec.timeout_s or 0
    torch = version_of(facts, "torch")
    network_env, network_notes = respell(spec.network_env, torch)
    env, env_notes = respell(spec.env, torch)
    base = base_environment(
        world=world,
        strategy=strategy,
        network=spec.network,
        torch=torch,
        threads=threads,
        timeout_s=timeout_s,
    )
    base += _planned(spec)
    return JobEnvironment(
        variables=overlay(overlay(base, network_env, "yours (network.env)"), env, "yours (env)"),
        timeout_s=timeout_s,
        notes=(*network_notes, *env_notes),
    )


def _planned(spec: JobSpec) -> tuple[EnvVar, ...]:
    """Return the planned batch as variables; accelerate reads the accumulation."""
    if not spec.planned:
        return ()
    accumulation = str(spec.accumulation or 1)
    values = {
        "CLUSTERRUN_MICRO_BATCH": str(spec.micro_batch or 1),
        "CLUSTERRUN_ACCUMULATION": accumulation,
        "CLUSTERRUN_GRAD_CKPT": "1" if spec.grad_ckpt else "0",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": accumulation,
    }
    why = "planned: clusterrun.runtime.planned()"
    return tuple(EnvVar(name=name, value=value, why=why) for name, value in values.items())
