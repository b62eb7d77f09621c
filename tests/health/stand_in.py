"""Build and control the stand-in for NVIDIA's driver library."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.patience import patience

SURROUNDINGS = dict(os.environ)  # with the compiler, which a test may hide
GCC = shutil.which("gcc")
SOURCE = Path(__file__).with_name("nvml.c")


@dataclass(frozen=True)
class StandIn:
    """A driver for two healthy GPUs; `says` holds what it answers instead."""

    says: Path

    def answer(self, **values: int | str) -> None:
        """Add answers: `gpu1_errors=2` is the line "gpu1.errors 2"."""
        lines = [f"{name.replace('_', '.')} {value}\n" for name, value in values.items()]
        with self.says.open("a") as file:
            file.writelines(lines)


def stand_in(place: Path, says: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let the processes that this one starts find the stand-in, built at `place` if it is new."""
    if not list(importlib.metadata.distributions(name="nvidia-ml-py")):
        pytest.skip("nvidia-ml-py is not installed")
    if not GCC:
        pytest.skip("gcc was not found, which builds the stand-in for NVML")
    build(place)
    says.write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(place))
    monkeypatch.setenv("NVML_STAND_IN", str(says))
    return StandIn(says)


@cache
def build(place: Path) -> None:
    place.mkdir(exist_ok=True)
    out = place / "libnvidia-ml.so.1"
    argv = [str(GCC), "-shared", "-fPIC", "-w", "-o", os.fspath(out), os.fspath(SOURCE)]
    subprocess.run(argv, check=True, timeout=120 * patience(), env=SURROUNDINGS)
