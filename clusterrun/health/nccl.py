"""NCCL's library: the one that torch brings, and the one that is found first."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Final

from clusterrun.errors import ClusterrunError
from clusterrun.health.examine import UnknownError
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, fail, note, ok

ANSWER_S: Final = 3.0
_SEARCHED: Final = "LD_LIBRARY_PATH"
_PRELOADED: Final = "LD_PRELOAD"
# Imports come after the first line: a json.py in the working directory must not run.
_ASK: Final = """
import sys; sys.path[:] = filter(None, sys.path)
import ctypes, json, os

def look(name):
    try:
        library, number = ctypes.CDLL(name), ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return {"path": name, "error": str(error)}
    with open("/proc/self/maps") as file:
        paths = [line.split(None, 5)[5].strip() for line in file if "libnccl" in line]
    return {"path": name if "/" in name else (paths or [name])[0], "version": number.value}

first = look("libnccl.so.2")
places = (os.path.join(place, "nvidia", "nccl", "lib", "libnccl.so.2") for place in sys.path)
own = next(filter(os.path.exists, places), None)
print(json.dumps({"first": first, "own": own and look(own)}))
"""


def loaded(python: str, cuda: str | None, environ: Mapping[str, str]) -> Finding:
    """Load NCCL with the job's interpreter; "" if it is unknown. Raises UnknownError."""
    if cuda == "":
        raise UnknownError("torch was built without CUDA")
    if not python:
        raise UnknownError("the job's interpreter is unknown")
    try:
        done = shell.run([python, "-c", _ASK], timeout_s=ANSWER_S, tries=1, env=environ)
        answer = json.loads(done.stdout)
    except (ClusterrunError, ValueError) as error:
        raise UnknownError(f"{python} did not load NCCL within {ANSWER_S:g} s") from error
    return judged(answer["first"], answer["own"], python, environ)


def judged(
    first: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    python: str,
    environ: Mapping[str, str],
) -> Finding:
    """Judge the library that is found first, and torch's own if it brings one."""
    name, found = "cuda.nccl", own or first
    if "error" in found:
        if own is None:
            raise UnknownError("torch brings no libnccl.so.2, and this machine has none")
        hint = f"install it again: {python} -m pip install --force-reinstall torch"
        return fail(name, f"NCCL does not load: {found['error']}", hint)
    text = f"NCCL {_version(found)}, {found['path']}"
    if own and _way(first, environ) and first.get("version") != own["version"]:
        other = f"another NCCL is found first: {first['path']} ({_version(first)})"
        return note(name, f"{other}; torch brings {_version(own)}", _way(first, environ))
    return ok(name, text)


def _way(first: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return how to hide a library that a variable puts before torch's; "" if none does."""
    place = os.path.dirname(str(first["path"]))
    if "version" not in first:
        return ""
    if any("libnccl" in each for each in environ.get(_PRELOADED, "").split()):
        return f"unset {_PRELOADED}"
    is_searched = place in environ.get(_SEARCHED, "").split(":")
    return f"remove {place} from {_SEARCHED}" if is_searched else ""


def _version(found: Mapping[str, Any]) -> str:
    """Return a version as NVIDIA writes it; it had fewer digits before 2.9."""
    number = int(found["version"])
    unit = 10_000 if number >= 10_000 else 1000
    return f"{number // unit}.{number % unit // 100}.{number % 100}"
