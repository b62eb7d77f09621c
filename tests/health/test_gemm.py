"""The short multiplication of matrices: a CPU stands for a GPU."""

from __future__ import annotations

import pytest

from clusterrun.health import gemm

pytestmark = pytest.mark.torch


def test_the_rate_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(gemm, "CPU_S", 0.02)
    assert 0 < gemm.matmul_rate("cpu") < 1000
    monkeypatch.setattr(torch, "randn", lambda *size, **kind: torch.full(size, 1e30, **kind))
    with pytest.raises(RuntimeError, match="not finite"):
        gemm.matmul_rate("cpu")
