"""What a GPU is known by, and that its precision is the one that its nodes will choose."""

from __future__ import annotations

import pytest

from clusterrun.errors import UsageError
from clusterrun.estimates.gpus import ALL, SHORT, assumption, find, precision_of, sized
from clusterrun.estimates.steps import advice
from clusterrun.launch.plan import Precision
from clusterrun.node.conductor.leader import decided_precision
from clusterrun.node.link.connection import Report

GIB = 1 << 30


# As Slurm's AutoDetect names them: NVML's name in lower case with underscores; and as
# administrators and users write them.
SPELLINGS = {
    "nvidia_a100-sxm4-40gb": "A100-40G",
    "nvidia_a100_80gb_pcie": "A100-PCIe-80G",
    "tesla_v100-pcie-32gb": "V100-PCIe-32G",
    "nvidia_a800-sxm4-80gb": "A800-80G",
    "nvidia_h100_80gb_hbm3": "H100-80G",
    "nvidia_h100_pcie": "H100-PCIe",
    "nvidia_h100_nvl": "H100-NVL",
    "nvidia_gh200_480gb": "GH200",
    "nvidia_rtx_6000_ada_generation": "RTX-6000-Ada",
    "nvidia_rtx_a6000": "RTX-A6000",
    "nvidia_geforce_rtx_3090": "RTX-3090",
    "tesla_v100-sxm2-32gb": "V100-32G",
    "tesla_p100-pcie-16gb": "P100-16G",
    "tesla_t4": "T4",
    "amd_instinct_mi300x": "MI300X",
    **{"rtx4090": "RTX-4090", "4090": "RTX-4090", "rtx3080-12gb": "RTX-3080-12G"},
    **{"a100_80g": "A100-80G", "A100 40 GiB": "A100-40G", "l40s": "L40S", "mi250": "MI250X"},
}


def test_a_card_is_found_under_its_common_spellings_and_own_names() -> None:
    assert {text: find(text).name for text in SPELLINGS} == SPELLINGS
    own = {text: gpu for gpu in ALL for text in (gpu.name, *gpu.aliases)}
    assert [text for text, gpu in own.items() if find(text) != gpu] == []
    for short, names in SHORT.items():
        cards = [find(name) for name in names]
        assert find(short) == cards[0]
        assert cards[0].memory_bytes == min(card.memory_bytes for card in cards)

    taken = "is assumed to be the V100-16G; for another, pass v100-32g or v100-pcie-16g"
    assert assumption("nvidia_v100") == f"GPU 'nvidia_v100' {taken}"
    assert assumption("h100").endswith("H100-80G; for another, pass h100-pcie or h100-nvl")
    assert assumption("h100-80g") == assumption("rtx4090") == ""


def test_an_unknown_card_is_refused_with_those_close_to_it() -> None:
    close = {"rtx4091": "rtx-4090", "h100-81g": "h100-80g", "a10g": "a10", "l40": "l40s"}
    for text, name in (*close.items(), *(("tpu", gpu.name.lower()) for gpu in ALL)):
        with pytest.raises(UsageError, match=f"GPU '{text}' is not known") as refused:
            find(text)
        (hint,) = refused.value.hints
        assert name in hint
        assert "--gpu-mem" in hint


def test_a_card_with_another_memory_says_so() -> None:
    for card, gib, name, as_fast_as in [
        ("rtx3080", 20, "RTX-3080-20G", "rtx3080-10g"),
        ("rtx3080", 12, "RTX-3080-12G", "rtx3080-12g"),
        ("rtx3090", 20, "RTX-3090-20G", "rtx3090"),
        ("h100-80g", 80, "H100-80G", "h100-80g"),
    ]:
        found = sized(find(card), gib * GIB)
        assert (found.name, found.memory_bytes) == (name, gib * GIB)
        assert found.processors == find(as_fast_as).processors


def test_each_card_says_all_that_is_asked_of_it() -> None:
    """Its processors reach its peak at a clock that there is."""
    for gpu in ALL:
        cores = 64 if gpu.compute_capability <= (8, 0) else 128
        clock = gpu.tflops["fp32"] * 1e12 / (2 * cores * gpu.processors)
        assert 1.1e9 < clock < 2.7e9, gpu.name
        assert 250 < gpu.bandwidth < 10_000
        precisions = {"fp16", "fp32"} | ({"bf16"} if precision_of(gpu) == "bf16" else set())
        assert set(gpu.tflops) == precisions, gpu.name
        assert all(peak > 0 for peak in gpu.tflops.values())
        assert gpu.architecture
        capabilities, versions = (gpu.compute_capability,) * 2, {"torch": "2.13.0"}
        head = Report(node="n0", node_rank=0, versions=versions, capabilities=capabilities)
        assert precision_of(gpu) == decided_precision(Precision.HEAD, [head]), gpu.name
    named = "rtx3080 rtx3090 rtx4070 rtx4080 rtx4090 a6000 v100 p100 a100-40g a100-80g h100 h200"
    assert len({find(text).name for text in named.split()}) == 12  # the guides' cards


# The data loader


def test_a_worker_a_cpu_and_four_at_most_and_none_under_15_gib() -> None:
    for cpus, host_bytes, is_cpu, workers, pins in [
        *((cpus, 64 * GIB, False, min(cpus, 4), True) for cpus in (1, 3, 4, 64)),
        *((4, 15 * GIB - 1, False, 0, False), (4, 15 * GIB, False, 4, True)),
        (8, 64 * GIB, True, 0, False),
    ]:
        advised = advice(cpus, host_bytes, is_cpu=is_cpu)
        assert (advised.num_workers, advised.pin_memory) == (workers, pins)
    unknown = advice(0, 0)
    assert unknown.num_workers is None
    assert "--cpus-per-task" in unknown.why
