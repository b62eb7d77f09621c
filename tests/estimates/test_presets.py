"""Which settings a class of device starts with."""

from __future__ import annotations

from clusterrun.estimates.presets import PRESETS, advice, preset_for

GIB = 1 << 30


def test_the_memory_of_the_gpu_chooses_and_the_effective_batch_stays() -> None:
    sizes = {0: "cpu", 16 * GIB: "small-gpu", 20 * GIB: "small-gpu", 20 * GIB + 1: "large-gpu"}
    assert {size: preset_for(size).name for size in sizes} == sizes
    assert {each.micro_batch * each.accumulation for each in PRESETS.values()} == {64}


def test_a_worker_a_cpu_and_four_at_most() -> None:
    for cpus, workers in ((1, 1), (3, 3), (4, 4), (64, 4)):
        advised = advice(cpus, 64 * GIB)
        assert (advised.num_workers, advised.pin_memory) == (workers, True)
    unknown = advice(0, 0)
    assert unknown.num_workers is None
    assert "--cpus-per-task" in unknown.why


def test_a_host_under_15_gib_gets_no_workers_and_no_pinning() -> None:
    for host_bytes, frugal in ((15 * GIB - 1, True), (15 * GIB, False)):
        advised = advice(4, host_bytes)
        assert (advised.num_workers == 0, not advised.pin_memory) == (frugal, frugal)
    of_cpus = advice(8, 64 * GIB, is_cpu=True)
    assert (of_cpus.num_workers, of_cpus.pin_memory) == (0, False)
