"""Which settings a class of device starts with."""

from __future__ import annotations

import dataclasses

import pytest

from clusterrun.estimates.gpus import find
from clusterrun.estimates.presets import PRESETS, Preset, advice, preset_for

GIB = 1 << 30
SETTINGS = {field.name for field in dataclasses.fields(Preset)} - {"name", "why"}


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_each_setting_has_its_reason(preset: Preset) -> None:
    assert set(preset.why) == SETTINGS
    assert all(preset.why.values())


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_the_effective_batch_is_the_same_in_all(preset: Preset) -> None:
    assert preset.micro_batch * preset.accumulation == 64


@pytest.mark.parametrize(
    ("gpu_bytes", "name"),
    [
        (0, "cpu"),
        (10 * GIB - 1, "small-gpu"),
        (16 * GIB, "small-gpu"),
        (20 * GIB, "small-gpu"),
        (20 * GIB + 1, "large-gpu"),
        (find("a100-80g").memory_bytes, "large-gpu"),
    ],
)
def test_the_memory_of_the_gpu_chooses(gpu_bytes: int, name: str) -> None:
    assert preset_for(gpu_bytes) is PRESETS[name]


GIB = 1 << 30


@pytest.mark.parametrize(("cpus", "workers"), [(1, 1), (3, 3), (4, 4), (64, 4)])
def test_a_worker_a_cpu_and_four_at_most(cpus: int, workers: int) -> None:
    advised = advice(cpus, 64 * GIB)
    assert (advised.num_workers, advised.pin_memory) == (workers, True)


@pytest.mark.parametrize(("host_bytes", "frugal"), [(15 * GIB - 1, True), (15 * GIB, False)])
def test_a_host_under_15_gib_gets_no_workers_and_no_pinning(
    host_bytes: int, *, frugal: bool
) -> None:
    advised = advice(4, host_bytes)
    assert (advised.num_workers == 0, not advised.pin_memory) == (frugal, frugal)


def test_a_training_on_cpus_gets_no_workers_and_no_pinning() -> None:
    advised = advice(8, 64 * GIB, is_cpu=True)
    assert (advised.num_workers, advised.pin_memory) == (0, False)


def test_unknown_cpus_get_no_number_and_say_what_to_give() -> None:
    advised = advice(0, 0)
    assert advised.num_workers is None
    assert "--cpus-per-task" in advised.why
