"""Parallel sizes: what is decided, what is refused before the queue, and what is only noted."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from clusterrun.config.choices import Strategy
from clusterrun.errors import ConfigError, UsageError
from clusterrun.launch.plan import SIZE_FIELDS, Parallel, Plan
from clusterrun.rendering.bundle import render_bundle
from tests.launch.samples import VERSIONS, on_slurm, slurm_facts


def rendered(plan: Plan) -> dict[str, int]:
    """Read the sizes that accelerate is given, by accelerate's short names."""
    text = render_bundle(plan, resolved_yaml="").files["accelerate.yaml"]
    sizes = yaml.safe_load(text).get("parallelism_config", {})
    return {key.split("_", 2)[2].removesuffix("_size"): size for key, size in sizes.items()}


FSDP, HYBRID = {"strategy": Strategy.FSDP}, {"strategy": Strategy.FSDP_HYBRID}
ZERO3 = {"strategy": Strategy.ZERO3}
OFFLOAD = {"strategy": Strategy.FSDP_OFFLOAD}
# What is asked for, what accelerate is given, and the data-parallel size.
DECIDED: list[tuple[dict[str, Any], str, int]] = [
    (FSDP, "", 16),
    (ZERO3, "", 16),
    ({"strategy": Strategy.DDP}, "", 16),
    (HYBRID, "dp_replicate=2 dp_shard=8", 16),
    ({**FSDP, "data_parallel_replicate": 4}, "dp_replicate=4 dp_shard=4", 16),
    ({**HYBRID, "data_parallel_shard": 4}, "dp_replicate=4 dp_shard=4", 16),
    ({**FSDP, "data_parallel_shard": 16}, "", 16),
    ({**FSDP, "tensor_parallel": 4}, "dp_replicate=1 dp_shard=4 tp=4", 4),
    (
        {**HYBRID, "tensor_parallel": 2, "context_parallel": 2},
        "dp_replicate=2 dp_shard=2 cp=2 tp=2",
        4,
    ),
    ({**OFFLOAD, "context_parallel": 16}, "dp_replicate=1 dp_shard=1 cp=16", 1),
    ({**ZERO3, "sequence_parallel": 8}, "dp_replicate=1 dp_shard=2 sp=8", 2),
    ({"tensor_parallel": 16}, "dp_replicate=1 dp_shard=1 tp=16", 1),
]


def test_the_sizes_multiply_to_the_world() -> None:
    for asked, sizes, data in DECIDED:
        plan = on_slurm(nodes=2, gpus_per_node=8, **asked)
        given = " ".join(f"{key}={size}" for key, size in rendered(plan).items())
        assert (given, plan.data_parallel) == (sizes, data), asked
        whole = plan.parallel
        assert whole.replicate * whole.shard * whole.model == 16
        assert Plan.from_json(plan.to_json()) == plan


# What is asked for, the strategy, what is wrong, and the hint.
REFUSED: list[tuple[dict[str, int], str, str, str]] = [
    ({"tensor_parallel": 2}, "ddp", "does not work with --strategy ddp", "only over all ranks"),
    ({"tensor_parallel": 3}, "fsdp", "3 does not divide 16 ranks", "sizes with product 2"),
    ({"tensor_parallel": 2}, "zero3", "does not work with --strategy zero3", "fsdp"),
    ({"tensor_parallel": 16}, "fsdp", "fsdp has nothing left to shard", "--strategy ddp"),
    ({"context_parallel": 2}, "ddp", "does not work with --strategy ddp", "use --strategy fsdp"),
    ({"context_parallel": 2}, "zero2", "with --strategy zero2", "launch.sequence_parallel"),
    (
        {"context_parallel": 2, "data_parallel_replicate": 8},
        *("fsdp", "fsdp has nothing left to shard", "launch.data_parallel_shard"),
    ),
    ({"sequence_parallel": 2}, "fsdp", "with --strategy fsdp", "launch.context_parallel"),
    ({"sequence_parallel": 2}, "zero1", "with --strategy zero1", "zero3 or zero2"),
    (
        {"data_parallel_shard": 8},
        "ddp",
        "launch.data_parallel_shard 8 does not work",
        "--strategy fsdp",
    ),
    (
        {"data_parallel_replicate": 3},
        *(
            "fsdp",
            "launch.data_parallel_replicate 3 does not divide 16 data-parallel ranks",
            "divisor",
        ),
    ),
    (
        {"data_parallel_shard": 16, "tensor_parallel": 2},
        *("fsdp", r"does not divide 8 data-parallel ranks \(16 / 2\)", "divisor"),
    ),
    ({"data_parallel_replicate": 16}, "fsdp", "fsdp has nothing left to shard", "ddp"),
]


def test_what_cannot_run_is_refused_before_the_queue() -> None:
    for asked, strategy, message, hint in REFUSED:
        with pytest.raises(UsageError, match=message) as refused:
            on_slurm(nodes=2, gpus_per_node=8, strategy=Strategy(strategy), **asked)
        assert hint in refused.value.hints[0], asked


@pytest.mark.timeout(30)
def test_a_size_far_above_the_world_is_refused_at_once() -> None:
    asked: dict[str, Any] = {"tensor_parallel": 30_000, "context_parallel": 60_000}
    with pytest.raises(UsageError) as refused:
        on_slurm(nodes=2, gpus_per_node=8, strategy=Strategy.FSDP, **asked)
    assert refused.value.hints[0].startswith("choose sizes with product 16")


def test_what_would_silently_leave_samples_whole_is_refused() -> None:
    asked: dict[str, Any] = {"nodes": 2, "gpus_per_node": 8}
    split = {**asked, "strategy": Strategy.FSDP, "context_parallel": 2}
    assert on_slurm(**split, args=("--attn_implementation", "sdpa"))
    with pytest.raises(UsageError, match="but the script uses flash_attention_2"):
        on_slurm(**split, args=("--attn_implementation", "flash_attention_2"))
    ulysses = {**asked, "strategy": Strategy.ZERO3, "sequence_parallel": 2}
    assert on_slurm(**ulysses)
    with pytest.raises(UsageError, match=r"accelerate 1\.12 or newer; 1\.11\.0 is installed"):
        on_slurm(slurm_facts(packages={**VERSIONS, "accelerate": "1.11.0"}), **ulysses)


def own(sizes: dict[str, Any], **asked: Any) -> Plan:
    config = {
        "distributed_type": "FSDP",
        "parallelism_config": {f"parallelism_config_{key}_size": n for key, n in sizes.items()},
    }
    facts = slurm_facts(accelerate_config_text=yaml.safe_dump(config))
    return on_slurm(facts, nodes=2, gpus_per_node=4, accelerate_config="a.yaml", **asked)


def test_the_sizes_of_the_users_yaml_count() -> None:
    assert own({"dp_shard": 2, "tp": 4}).data_parallel == 2
    assert own({}).data_parallel == 8


def test_rank_0_spreads_the_weights_of_whole_models_only() -> None:
    for size, expected in ((1, True), (2, False)):
        plan = on_slurm(gpus_per_node=4, strategy=Strategy.FSDP, tensor_parallel=size)
        config = yaml.safe_load(render_bundle(plan, resolved_yaml="").files["accelerate.yaml"])
        assert config["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is expected


def test_sizes_that_are_no_numbers_or_given_twice_are_refused() -> None:
    for size in (0, "2"):
        with pytest.raises(ConfigError, match="must be a whole number"):
            own({"tp": size})
    for field in SIZE_FIELDS.values():
        with pytest.raises(UsageError, match=f"launch.{field} cannot be combined with a.yaml"):
            own({}, **{field: 2})


def test_the_product_of_a_mesh_is_its_world_for_every_divisor() -> None:
    for world, tensor, context in ((64, t, c) for t in (1, 2, 4) for c in (1, 2, 8)):
        for strategy in (Strategy.FSDP, Strategy.FSDP_HYBRID, Strategy.ZERO3):
            sizes = Parallel(tensor=tensor, context=context).decided(strategy, nodes=8, world=world)
            assert sizes.replicate * sizes.shard * sizes.model == world
