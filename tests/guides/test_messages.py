"""The messages that the guides explain, as `clusterrun logs` names them among a run's lines."""

from __future__ import annotations

import pytest

from clusterrun.logformat.symptoms import Classifier


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("", "UserWarning: 'pin_memory' argument is set as true but not supported on MPS now"),
        ("error", "ModuleNotFoundError: No module named 'torch'"),
        ("severe", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("severe", "Killed"),
        ("severe", "[rank0]: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("),
    ],
)
def test_a_message_of_a_guide_is_named(kind: str, line: str) -> None:
    assert Classifier().classify(0, line.encode()) == kind
