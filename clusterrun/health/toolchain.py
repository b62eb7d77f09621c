"""The job's torch, what builds DeepSpeed's operators, NVIDIA's driver and the CUDA toolkit.

`is_sure`: the nodes find the same as this machine, so that what is wrong here makes a job fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from clusterrun.errors import ClusterrunError
from clusterrun.health.gpus import GpuAnswer
from clusterrun.health.machine import text_of
from clusterrun.health.nvml import NO_DRIVER
from clusterrun.launch.facts import Interpreter
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, bad, fail, note, ok, skip
from clusterrun.shared.installed import versions_in
from clusterrun.shared.wording import dotted, parse_version

TOOLKIT: Final = Path("/usr/local/cuda")
ANSWER_S: Final = 3.0
# The oldest driver that runs programs of a major version of CUDA on Linux.
_OLDEST: Final = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}
_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


def torch(python: Interpreter, cuda: str | None, *, on_gpus: bool, is_sure: bool) -> Finding:
    """Look whether torch can use the job's GPUs; `cuda`: what it was built for; None: unknown."""
    name, version = "python.torch", python.packages.get("torch", "")
    if not version:
        return skip(name, f"cannot tell which torch {python.path or 'the interpreter'} has")
    text = f"torch {version}".replace(" ?", ", version unknown")  # "?" is UNKNOWN
    if cuda == "" and on_gpus:
        text = f"{text} was built without CUDA; the job requests GPUs"
        hint = "install torch with CUDA: pytorch.org/get-started; or train on CPUs: --device cpu"
        return bad(name, text, hint, is_sure=is_sure)
    return ok(name, text)


def compiler(python: Interpreter, environ: Mapping[str, str], *, is_sure: bool) -> Finding:
    """Look for the C++ compiler and ninja, with which torch builds DeepSpeed's operators."""
    name, program = "python.compiler", environ.get("CXX") or "c++"
    why = "which DeepSpeed's offload needs to build its optimizer"
    words = program.split()  # CXX may contain options
    found = shell.find(words[0]) if words else None
    if not found:
        hint = "install g++ or load a module with it in setup:"
        return bad(name, f"no C++ compiler ({program}), {why}", hint, is_sure=is_sure)
    has_ninja = versions_in(python.places, ["ninja"])["ninja"] or shell.find("ninja")
    if python.is_known and not has_ninja:  # if it is not known, ninja may still be there
        hint = "install it in the job's environment: pip install ninja"
        return bad(name, f"no ninja, {why}", hint, is_sure=is_sure)
    return ok(name, found)


def cuda_of_torch(places: Sequence[str], torch: str) -> str | None:
    """Return the version of CUDA that torch was built with; "" for none, None if unknown.

    Do not import torch, but read its version.py in `places`; without one, look at the version.

    >>> cuda_of_torch([], "2.6.0+cu124"), cuda_of_torch([], "2.6.0+cpu")
    ('12.4', '')
    """
    for place in places:
        if text := text_of(Path(place, "torch", "version.py")):
            found = _CUDA.search(text)
            return found[1] if found else ""
    if torch.endswith("+cpu"):
        return ""
    tag = re.search(r"\+cu([0-9]+)([0-9])$", torch)
    return f"{tag[1]}.{tag[2]}" if tag else None


def driver(cuda: str | None, gpu_answer: GpuAnswer) -> Finding:
    """Look at the driver; `cuda` is the version that torch was built with."""
    name, answer = "cuda.driver", gpu_answer.answer
    if answer.problem:
        return fail(name, answer.problem, "run nvidia-smi -q, and tell the administrator")
    if not answer.driver:
        return skip(name, answer.absent or NO_DRIVER)
    oldest, installed = _OLDEST.get((cuda or "").split(".")[0]), parse_version(answer.driver)
    if oldest and installed and installed < oldest:
        needed = f"torch's CUDA {cuda}: it needs {dotted(oldest)}"
        hint = "install a build of torch for an older CUDA: pytorch.org/get-started"
        return fail(name, f"driver {answer.driver} is too old for {needed}", hint)
    return ok(name, f"driver {answer.driver}")


def toolkit(cuda: str | None, environ: Mapping[str, str], *, is_sure: bool) -> Finding:
    """Compare nvcc with the CUDA that torch was built with, as DeepSpeed's builder does."""
    name = "cuda.toolkit"
    if not cuda:
        why = "torch was built without CUDA" if cuda == "" else "torch's CUDA version is unknown"
        return skip(name, why)
    program = _nvcc(environ)
    hint = f"load CUDA {cuda} with a module in setup:, or set CUDA_HOME"
    if program is None:
        text = "nvcc was not found; DeepSpeed's offload needs it to build its optimizer"
        return bad(name, text, hint, is_sure=is_sure)
    found = _release(program)
    if not found:
        return skip(name, f"{program} does not print its version")
    text = f"nvcc has CUDA {found}, torch was built with CUDA {cuda}"
    if found.split(".")[0] != cuda.split(".")[0]:
        if environ.get("DS_SKIP_CUDA_CHECK") == "1":
            return note(name, f"{text}, DS_SKIP_CUDA_CHECK=1", hint)
        return bad(name, text, hint, is_sure=is_sure)
    if parse_version(found) != parse_version(cuda):
        return note(name, f"{text}; this usually works", hint)
    return ok(name, text)


def _nvcc(environ: Mapping[str, str]) -> str | None:
    """Find nvcc where torch looks for it."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    paths = [f"{home}/bin/nvcc"] if home else [shell.find("nvcc") or "", f"{TOOLKIT}/bin/nvcc"]
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _release(program: str) -> str:
    """Return the CUDA version that nvcc prints; "" if it prints none."""
    try:
        done = shell.run([program, "--version"], timeout_s=ANSWER_S, tries=1)
    except ClusterrunError:
        return ""
    match = re.search(r"release ([0-9]+\.[0-9]+)", done.stdout)
    return match[1] if match else ""
