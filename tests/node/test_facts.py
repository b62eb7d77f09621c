"""What a node knows of itself; GPUs through a stand-in for NVML."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterrun.health.facts import versions
from clusterrun.health.gpu_answer import Answer, GpuAnswer
from clusterrun.health.nvml import NvmlGpu
from clusterrun.node.base import cpus, facts
from clusterrun.node.base.causes import Cause, Ending, NodeError

H100, T4 = ({"capability": capability} for capability in ((9, 0), (7, 5)))


def answer(*gpus: dict[str, Any], **fields: str) -> GpuAnswer:
    found = GpuAnswer()
    listed = [NvmlGpu(name=str(number), **gpu) for number, gpu in enumerate(gpus)]
    found.__dict__["any"] = Answer(gpus=listed, **fields)
    return found


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1,2,3", 4), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-abc", 1)]
)
def test_visible_devices_are_counted_as_cuda_does(visible: str, count: int) -> None:
    env = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": "8"}
    assert facts.visible_gpus(env, answer()) == count
    assert count or facts.gpu_capabilities(env, answer(H100)) == ()


def test_slurms_number_counts_where_no_device_is_named_and_then_the_drivers() -> None:
    assert facts.visible_gpus({"SLURM_GPUS_ON_NODE": "8"}, answer()) == 8
    assert facts.visible_gpus({}, answer(H100, T4)) == 2
    assert facts.visible_gpus({}, answer(absent="no driver")) is None
    assert facts.gpu_capabilities({}, answer(H100, T4)) == ((9, 0), (7, 5))


@pytest.mark.parametrize(
    "unknown", [answer(absent="no driver"), answer(H100, {}), answer(H100, problem="it hangs")]
)
def test_without_nvml_torch_is_asked_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, unknown: GpuAnswer
) -> None:
    done = SimpleNamespace(stdout=b"a warning\n[[9, 0], [8, 0]]\n")
    monkeypatch.setattr(facts.subprocess, "run", lambda *_, **__: done)
    assert facts.gpu_capabilities({}, unknown) == ((9, 0), (8, 0))


def test_cpus_are_those_of_the_task() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert cpus.allocated_cpus({}) == allowed
    assert cpus.allocated_cpus({"SLURM_CPUS_PER_TASK": "1"}) == 1
    assert cpus.allocated_cpus({"SLURM_CPUS_PER_TASK": "100000"}) == allowed


def test_the_interface_of_an_address_is_found() -> None:
    assert facts.interface_of("127.0.0.1") == "lo"
    assert facts.interface_of("192.0.2.1") == ""


def test_versions_name_python_and_what_trains() -> None:
    found = versions()
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert set(found) <= {"python", "torch", "accelerate"}


def test_a_slow_start_of_torch_says_nothing_against_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/bash\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(facts, "TORCH_ANSWER_S", 0.2)
    with pytest.raises(NodeError, match="importing torch took more than") as caught:
        facts._torch_capabilities()
    assert Ending.refused(caught.value).cause is Cause.RENDEZVOUS
