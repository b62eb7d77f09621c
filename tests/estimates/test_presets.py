"""Which settings a class of device starts with."""

from __future__ import annotations

import dataclasses

import pytest

from clusterrun.config.spec import MixedPrecision
from clusterrun.estimates.gpus import find
from clusterrun.estimates.presets import PRESETS, Preset, preset_for

GIB = 1 << 30
SETTINGS = {field.name for field in dataclasses.fields(Preset)} - {"name", "why"}


def test_the_classes_of_the_guides_are_there() -> None:
    assert list(PRESETS) == ["cpu", "small-gpu", "large-gpu"]


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


def test_a_cpu_trains_in_fp32() -> None:
    cpu = PRESETS["cpu"]
    assert (cpu.precision, cpu.grad_ckpt) == (MixedPrecision.NO, False)


def test_a_small_gpu_computes_activations_again_and_a_large_one_does_not() -> None:
    small, large = PRESETS["small-gpu"], PRESETS["large-gpu"]
    assert (small.grad_ckpt, large.grad_ckpt) == (True, False)
    assert small.micro_batch < large.micro_batch
