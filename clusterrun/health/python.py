"""The job's interpreter: its torch, and what DeepSpeed needs to build its operators."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterrun.launch.facts import Interpreter
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, bad, ok, skip
from clusterrun.shared.installed import versions_in

_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The interpreter that a job wants; `is_sure` if the nodes will find what is here."""

    python: Interpreter
    is_sure: bool


def lacks(python: Interpreter, package: str) -> bool | None:
    """Return whether an interpreter has no package of this name; None if that is unknown."""
    is_found = versions_in(python.places, [package])[package]
    return False if is_found else True if python.is_known else None


def torch(wanted: Wanted, cuda: str | None, *, on_gpus: bool) -> Finding:
    """Look whether torch, built with this CUDA, can use the GPUs of the job."""
    name, version = "python.torch", wanted.python.packages.get("torch", "")
    if not version:
        return skip(name, f"no torch is known of {wanted.python.path or 'the interpreter'}")
    text = f"torch {version}".replace(" ?", ", version unknown")
    if cuda == "" and on_gpus:
        text = f"{text} was built without CUDA; the job requests GPUs"
        hint = "install a torch with CUDA: pytorch.org/get-started; or train on CPUs: --device cpu"
        return bad(name, text, hint, is_sure=wanted.is_sure)
    return ok(name, text)


def compiler(wanted: Wanted, environ: Mapping[str, str], *, is_sure: bool) -> Finding:
    """Look for the C++ compiler and ninja, with which torch builds DeepSpeed's operators."""
    name, program = "python.compiler", environ.get("CXX") or "c++"
    why = "which DeepSpeed's offload needs to build its optimizer"
    found = next(filter(None, map(shell.find, program.split()[:1])), None)
    if not found:
        hint = "install g++ or load a module with it in setup:"
        return bad(name, f"no C++ compiler ({program}), {why}", hint, is_sure=is_sure)
    if lacks(wanted.python, "ninja") and not shell.find("ninja"):
        hint = "run: pip install ninja, in the job's environment"
        return bad(name, f"no ninja, {why}", hint, is_sure=wanted.is_sure)
    return ok(name, found)


def cuda_of_torch(places: Sequence[str], torch: str) -> str | None:
    """Return the version of CUDA that torch was built with; "" for none, None if unknown.

    torch is not imported: the first of `places` that has it has the file that tells.

    >>> cuda_of_torch([], "2.6.0+cu124"), cuda_of_torch([], "2.6.0+cpu")
    ('12.4', '')
    """
    for place in places:
        with contextlib.suppress(OSError):
            text = Path(place, "torch", "version.py").read_text(errors="replace")
            found = _CUDA.search(text)
            return found[1] if found else ""
    tag = re.search(r"\+(?:cpu|cu([0-9]+)([0-9]))$", torch)
    return (f"{tag[1]}.{tag[2]}" if tag[1] else "") if tag else None
