"""Read what an estimate needs from the user's own configuration file."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from clusterrun.backends.machine_facts import gather_facts
from clusterrun.config.spec import Device, JobSpec, MixedPrecision
from clusterrun.errors import UsageError
from clusterrun.launch.own_world import take_world
from clusterrun.launch.plan import Precision
from clusterrun.launch.script_args import named_json
from clusterrun.launch.user_files import read_own_files


def settled(spec: JobSpec, cwd: Path, *, is_open: bool) -> JobSpec:
    """Return the spec with the world, strategy and precision of the accelerate YAML, as submitted.

    Raises UsageError for a file of DeepSpeed or FSDP, and for any if the strategy is open.
    """
    is_adopted = not is_open and not spec.strategy.is_deepspeed and named_json(spec.args)
    if not (spec.accelerate_config or spec.deepspeed_config or is_adopted):
        return spec
    refusal = UsageError(
        "plan cannot read your own configuration file",
        hint="omit it, and describe the setup with --strategy, --nodes and --gpus-per-node",
    )
    if is_open or spec.deepspeed_config or is_adopted:
        raise refusal
    facts = gather_facts(spec, cwd=cwd, environ=os.environ)
    own = read_own_files(spec, facts)
    if own.strategy is None or own.strategy.stage or own.accelerate.get("parallelism_config"):
        raise refusal
    asked = take_world(spec, own, facts)
    stated = MixedPrecision((own.stated or Precision.NO).value)
    is_auto = asked.mixed_precision is MixedPrecision.AUTO
    return dataclasses.replace(
        asked,
        strategy=own.strategy,
        device=Device.CPU if own.use_cpu and asked.device is Device.AUTO else asked.device,
        mixed_precision=stated if is_auto else asked.mixed_precision,
    )
