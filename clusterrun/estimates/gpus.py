"""Find the memory, the peak and the precisions of a GPU by its name.

Peaks are those of dense training: 16-bit tensor cores that accumulate in fp32, and fp32 as torch
computes it by default (no TF32).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from clusterrun.errors import UsageError

MIB: Final = 1 << 20
_NOISE: Final = re.compile(
    r"nvidia|tesla|geforce|quadro|rtx|amd|instinct|generation|sxm\d?|hbm3e?|[^a-z0-9]"
)
_SIZE: Final = re.compile(r"-[0-9]+G\Z")
# GB/s of 16 lanes: 15.75 in PCIe 3, doubled by each generation since.
_PCIE_GB: Final = {
    **dict.fromkeys(("Pascal", "Volta", "Turing"), 15.75),
    **dict.fromkeys(("Ampere", "Ada", "CDNA 2"), 31.5),
    **dict.fromkeys(("Hopper", "Blackwell", "CDNA 3"), 63.0),
}


@dataclass(frozen=True)
class Gpu:
    """One kind of card, or one device of a card that has two (MI250X)."""

    name: str
    architecture: str
    compute_capability: tuple[int, int]  # of AMD's cards as torch reports it: gfx942 is (9, 4)
    memory_bytes: int  # NVML's total; nominal for AMD's cards and the RTX 3080 with 12 GB
    tensor: float  # peak in TFLOPS, as `fp32`
    fp32: float
    bandwidth: float  # of the memory, in GB/s
    processors: int  # enabled multiprocessors (NVIDIA) or compute units (AMD)
    aliases: tuple[str, ...] = ()
    nvlink: float = 0  # GB/s of both directions together, as in data sheets; 0: PCIe only
    fabric: float = 0  # its share of a usual node's network, in Gb/s; 0: the node has 100 Gb/s

    @property
    def tflops(self) -> Mapping[str, float]:
        """Return the peak of each precision that the card computes in."""
        peaks = {"fp32": self.fp32, "fp16": self.tensor}
        return {**peaks, "bf16": self.tensor} if has_bf16(self.compute_capability) else peaks

    @property
    def pcie(self) -> float:
        """Return the GB/s of 16 lanes in one direction, by the specification."""
        return _PCIE_GB[self.architecture]


def has_bf16(capability: tuple[int, int]) -> bool:
    """Return whether a GPU computes in bf16 natively."""
    return capability >= (8, 0)  # torch.cuda.is_bf16_supported() is also True for emulation


# Peaks and NVLink are from the vendor's data sheet of the card; peaks of A40, A6000 and RTX cards
# are from NVIDIA's white papers (GA102, Ada, Blackwell), or cores times clock. Network cards are
# those of the node that the card is sold in: DGX-1 (4 x 100 Gb/s), DGX A100 (8 x 200), DGX H100,
# H200 and B200 and AMD's MI300X platform (8 x 400), Alps (4 x 200 for 4 GH200), Frontier (4 x 200
# for the 8 dies of 4 MI250X). CUDA offers less memory than NVML: 79.1 of 79.6 GiB on an H100.

ALL: Final = (
    Gpu("P100-16G", "Pascal", (6, 0), 16280 * MIB, 18.7, 9.3, 732, 56, ("p100", "p100-pcie-16gb")),
    Gpu("V100-16G", "Volta", (7, 0), 16160 * MIB, 125, 15.7, 900, 80, nvlink=300, fabric=50),
    Gpu("V100-32G", "Volta", (7, 0), 32510 * MIB, 125, 15.7, 900, 80, nvlink=300, fabric=50),
    Gpu("V100-PCIe-16G", "Volta", (7, 0), 16160 * MIB, 112, 14, 900, 80),
    Gpu("V100-PCIe-32G", "Volta", (7, 0), 32510 * MIB, 112, 14, 900, 80,
        ("v100s-pcie-32gb",)),
    Gpu("T4", "Turing", (7, 5), 15360 * MIB, 65, 8.1, 300, 40, ("t4-16g",)),
    Gpu("A100-40G", "Ampere", (8, 0), 40960 * MIB, 312, 19.5, 1555, 108, nvlink=600, fabric=200),
    Gpu("A100-80G", "Ampere", (8, 0), 81920 * MIB, 312, 19.5, 2039, 108, nvlink=600, fabric=200),
    Gpu("A100-PCIe-40G", "Ampere", (8, 0), 40960 * MIB, 312, 19.5, 1555, 108,
        ("a100-40gb-pcie",)),
    Gpu("A100-PCIe-80G", "Ampere", (8, 0), 81920 * MIB, 312, 19.5, 1935, 108,
        ("a100-80gb-pcie",)),
    Gpu("A800-80G", "Ampere", (8, 0), 81920 * MIB, 312, 19.5, 2039, 108, ("a800",),
        nvlink=400, fabric=200),
    Gpu("A10", "Ampere", (8, 6), 23028 * MIB, 125, 31.2, 600, 72, ("a10-24g",)),
    Gpu("A40", "Ampere", (8, 6), 46068 * MIB, 149.7, 37.4, 696, 84, ("a40-48g",)),
    Gpu("RTX-A6000", "Ampere", (8, 6), 49140 * MIB, 154.8, 38.7, 768, 84, ("a6000-48g",)),
    Gpu("RTX-3080-10G", "Ampere", (8, 6), 10240 * MIB, 59.5, 29.8, 760, 68),
    Gpu("RTX-3080-12G", "Ampere", (8, 6), 12288 * MIB, 61.3, 30.6, 912, 70),
    Gpu("RTX-3090", "Ampere", (8, 6), 24576 * MIB, 71, 35.6, 936, 82, ("rtx3090-24g",)),
    Gpu("RTX-4070", "Ada", (8, 9), 12282 * MIB, 58.3, 29.1, 504, 46, ("rtx4070-12g",)),
    Gpu("RTX-4080", "Ada", (8, 9), 16376 * MIB, 97.5, 48.7, 717, 76, ("rtx4080-16g",)),
    Gpu("RTX-4090", "Ada", (8, 9), 24564 * MIB, 165.2, 82.6, 1008, 128, ("rtx4090-24g",)),
    Gpu("RTX-6000-Ada", "Ada", (8, 9), 49140 * MIB, 364.2, 91.1, 960, 142,
        ("ada6000", "rtx6000ada-48g")),
    Gpu("L4", "Ada", (8, 9), 23034 * MIB, 121, 30.3, 300, 58, ("l4-24g",)),
    Gpu("L40S", "Ada", (8, 9), 46068 * MIB, 362, 91.6, 864, 142, ("l40s-48g",)),
    Gpu("H100-80G", "Hopper", (9, 0), 81559 * MIB, 989, 66.9, 3350, 132, nvlink=900, fabric=400),
    Gpu("H800-80G", "Hopper", (9, 0), 81559 * MIB, 989, 66.9, 3350, 132, ("h800",),
        nvlink=400, fabric=400),
    Gpu("H100-PCIe", "Hopper", (9, 0), 81559 * MIB, 756, 51.2, 2000, 114,
        ("h100-pcie-80gb", "h100-80gb-pcie")),
    Gpu("H100-NVL", "Hopper", (9, 0), 95830 * MIB, 835, 60, 3900, 132,
        ("h100-94g", "h100-nvl-94gb")),
    Gpu("H200", "Hopper", (9, 0), 143771 * MIB, 989, 66.9, 4800, 132, ("h200-141g",),
        nvlink=900, fabric=400),
    Gpu("GH200", "Hopper", (9, 0), 97871 * MIB, 989, 66.9, 4000, 132,
        ("gh200-96g", "gh200-480gb", "gh200-120gb"), nvlink=900, fabric=200),
    Gpu("B200", "Blackwell", (10, 0), 183359 * MIB, 2250, 75, 8000, 148, ("b200-180g",),
        nvlink=1800, fabric=400),
    Gpu("RTX-5090", "Blackwell", (12, 0), 32607 * MIB, 209.5, 104.8, 1792, 170, ("rtx5090-32g",)),
    Gpu("MI250X", "CDNA 2", (9, 0), 65536 * MIB, 191.5, 47.9, 1638, 110, ("mi250", "mi250x-64g"),
        nvlink=800, fabric=100),
    Gpu("MI300X", "CDNA 3", (9, 4), 196608 * MIB, 1307.4, 163.4, 5300, 304, ("mi300x-192g",),
        nvlink=896, fabric=400),
)  # fmt: skip

# A short name stands for its first card, the smallest: what fits it fits all.
SHORT: Final = {
    "v100": ("V100-16G", "V100-32G", "V100-PCIe-16G"),
    "a100": ("A100-40G", "A100-80G", "A100-PCIe-40G"),
    "rtx3080": ("RTX-3080-10G", "RTX-3080-12G"),
    "h100": ("H100-80G", "H100-PCIe", "H100-NVL"),
}


def _key(text: str) -> str:
    """Reduce a name to what distinguishes cards: "NVIDIA H100 80GB HBM3" is h10080g."""
    return re.sub(r"gi?b", "g", _NOISE.sub("", text.lower()))


_BY_NAME: Final = {gpu.name: gpu for gpu in ALL}
_SHORT: Final = {_key(short): names for short, names in SHORT.items()}
_BY_KEY: Final = {
    **{_key(text): gpu for gpu in ALL for text in (gpu.name, *gpu.aliases)},
    **{key: _BY_NAME[names[0]] for key, names in _SHORT.items()},
}


def find(text: str) -> Gpu:
    """Find a card by its name in nvidia-smi or Slurm (the type of a GRES), or by a usual name.

    >>> [find(text).name for text in ("h100", "nvidia_a100-sxm4-80gb", "GeForce RTX 4090")]
    ['H100-80G', 'A100-80G', 'RTX-4090']

    Raises UsageError for any other text, with similar names.
    """
    gpu = _BY_KEY.get(_key(text))
    if gpu is None:
        keys = difflib.get_close_matches(_key(text), _BY_KEY, n=5)
        similar = list(dict.fromkeys(_BY_KEY[key].name.lower() for key in keys))[:3]
        names = " or ".join(similar) or ", ".join(card.name.lower() for card in ALL)
        hint = f"use {names}, or pass the card's memory as --gpu-mem"
        raise UsageError(f"GPU '{text}' is not known", hint=hint)
    return gpu


def sized(gpu: Gpu, memory_bytes: int) -> Gpu:
    """Return the known variant of a card with that much memory, else a renamed copy of the card.

    >>> [sized(find(text), 20 * 1024 * MIB).name for text in ("rtx3080", "a100")]
    ['RTX-3080-20G', 'A100-20G']
    >>> sized(find("a100"), 80 * 1024 * MIB) == find("a100-80g")
    True
    """
    name = f"{_SIZE.sub('', gpu.name)}-{round(memory_bytes / (1024 * MIB))}G"
    return replace(_BY_NAME.get(name, gpu), name=name, memory_bytes=memory_bytes)


def bf16_note(text: str | None) -> str:
    """Return a note on a card without bf16; "" if it has bf16 or is unknown.

    >>> bf16_note("v100-32g")
    'the V100-32G emulates bf16, slowly: pass --mixed-precision fp16 or auto'
    """
    gpu = _BY_KEY.get(_key(text or ""))
    if gpu is None or "bf16" in gpu.tflops:
        return ""
    return f"the {gpu.name} emulates bf16, slowly: pass --mixed-precision fp16 or auto"


def assumption(text: str) -> str:
    """Return a note on the card that a short name stands for; "" for a full name.

    >>> assumption("A100")
    "GPU 'A100' is assumed to be the A100-40G; for another, pass a100-80g or a100-pcie-40g"
    """
    names = _SHORT.get(_key(text))
    if names is None:
        return ""
    others = " or ".join(name.lower() for name in names[1:])
    return f"GPU '{text}' is assumed to be the {names[0]}; for another, pass {others}"


def precision_of(gpu: Gpu) -> str:
    """Choose bf16 or fp16 as `--mixed-precision auto` does on the node."""
    return "bf16" if has_bf16(gpu.compute_capability) else "fp16"
