"""The job's interpreter: its packages, and what DeepSpeed needs to build its operators."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from clusterrun.errors import ClusterrunError
from clusterrun.health.check import Check, bad, ok, skip
from clusterrun.launch.facts import Interpreter
from clusterrun.shared import shell
from clusterrun.shared.versions import dotted, parse_version

ANSWER_S: Final = 3.0
# Imports come after the first line: a json.py in the working directory must not run.
_ASK: Final = """
import sys; sys.path[:] = filter(None, sys.path)
import json, os
from importlib import util
found = {name: util.find_spec(name) for name in ("torch", "transformers", "ninja")}
places = getattr(found["torch"], "submodule_search_locations", None) or [""]
try:
    with open(os.path.join(list(places)[0], "version.py")) as file:
        text = file.read()
except OSError:
    text = ""
print(json.dumps({"has": [name for name in found if found[name]], "torch": text}))
"""
_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What only the interpreter itself knows; `cuda` is torch's version of CUDA, "" for none."""

    cuda: str
    has_transformers: bool
    has_ninja: bool


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a job wants from its interpreter; `is_sure` if the nodes will find what is here."""

    python: Interpreter
    oldest: Mapping[str, tuple[int, int]]
    is_sure: bool


def ask(python: str) -> Extras | None:
    """Run an interpreter, without importing torch; None if it doesn't answer."""
    try:
        answer = json.loads(shell.run([python, "-c", _ASK], timeout_s=ANSWER_S, tries=1).stdout)
    except (ClusterrunError, ValueError):
        return None
    cuda = _CUDA.search(answer["torch"])
    return Extras(
        cuda=cuda[1] if cuda else "",
        has_transformers="transformers" in answer["has"],
        has_ninja="ninja" in answer["has"],
    )


def version(wanted: Wanted) -> Check:
    """Compare the version of Python with the oldest that is supported."""
    name, python, least = "python.version", wanted.python, wanted.oldest.get("python")
    other = "name another interpreter with --python"
    if not python.path:
        return bad(name, "the interpreter was not found here", other, is_sure=wanted.is_sure)
    if python.version is None:
        return skip(name, f"the version of {python.path} is unknown")
    text = f"{python.path} is Python {dotted(python.version)}"
    if least and python.version < least:
        text = f"{text}; clusterrun needs {dotted(least)} or newer"
        return bad(name, text, other, is_sure=wanted.is_sure)
    return ok(name, text)


def package(wanted: Wanted, package: str, *, needed_by: str, source: str = "") -> Check:
    """Look for a package that is new enough; `needed_by` is "" if the job works without it.

    `source` is what pip installs instead of the package of this name.
    """
    name, python = f"python.{package}", wanted.python
    found, least = python.packages.get(package, ""), wanted.oldest.get(package)
    if not python.is_known:
        return skip(name, f"the packages of {python.path or 'the interpreter'} are unknown")
    if not found and not needed_by:
        return skip(name, "not installed, and not needed by this job")
    wants = f"{package}>={dotted(least)}" if least else package
    hint = f"run: {python.path} -m pip install {source or repr(wants)}"
    if not found:
        text = f"{python.path} has no {package}, which {needed_by} needs"
        return bad(name, text, hint, is_sure=wanted.is_sure)
    parsed = parse_version(found)
    if needed_by and parsed and least and parsed < least:
        text = f"{package} {found} is too old; clusterrun needs {dotted(least)} or newer"
        return bad(name, text, hint, is_sure=wanted.is_sure)
    return ok(name, f"{package} {found}".replace(" ?", ", version unknown"))


def compiler(environ: Mapping[str, str], *, is_sure: bool) -> Check:
    """Look for the C++ compiler that builds DeepSpeed's operators."""
    name, wanted = "python.compiler", environ.get("CXX") or "c++"
    if found := next(filter(None, map(shell.find, wanted.split()[:1])), None):
        return ok(name, found)
    text = f"no C++ compiler ({wanted}), which DeepSpeed's offload needs to build its optimizer"
    return bad(name, text, "install g++ or load a module with it in setup:", is_sure=is_sure)


def ninja(extras: Extras | None, *, is_sure: bool) -> Check:
    """Look for ninja, with which torch builds DeepSpeed's operators."""
    name = "python.ninja"
    if (extras and extras.has_ninja) or shell.find("ninja"):
        return ok(name, "ninja was found")
    if extras is None:
        return skip(name, "the packages of the job's interpreter are unknown")
    text = "no ninja, which DeepSpeed's offload needs to build its optimizer"
    return bad(name, text, "run: pip install ninja, in the job's environment", is_sure=is_sure)


def cuda_of_torch(extras: Extras | None, torch: str) -> str | None:
    """Return the version of CUDA that torch was built with; "" for none, None if unknown.

    >>> cuda_of_torch(None, "2.6.0+cu124"), cuda_of_torch(None, "2.6.0+cpu")
    ('12.4', '')
    """
    if extras is not None:
        return extras.cuda
    tag = re.search(r"\+(?:cpu|cu([0-9]+)([0-9]))$", torch)
    return (f"{tag[1]}.{tag[2]}" if tag[1] else "") if tag else None
