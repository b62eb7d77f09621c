"""What a data loader is told, by CPUs and memory."""

from __future__ import annotations

import pytest

from clusterrun.estimates.presets import Loader, advice

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


def test_a_host_of_unknown_memory_is_not_taken_for_a_small_one() -> None:
    assert advice(4, 0).num_workers == 4


def test_the_reason_names_the_memory_that_is_low() -> None:
    assert advice(8, 12 * GIB) == Loader(
        num_workers=0,
        pin_memory=False,
        why="the host has 12.0 GiB, less than 15: workers copy what they load, and pinned memory"
        " can't be swapped",
    )


def test_unknown_cpus_get_no_number_and_say_what_to_give() -> None:
    advised = advice(0, 0)
    assert advised.num_workers is None
    assert "--cpus-per-task" in advised.why
