"""`environment: copy`: lock the packages of this interpreter, and have hosts build the same."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from clusterrun.backends.hosts import build_environment
from clusterrun.backends.hosts.project import find_project, pack, unpack
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.shared import shell
from clusterrun.shared.files import parse_object

BUILD_S: Final = 300.0  # for a wheel of a package that is installed from a directory
_TORCH_TAG: Final = re.compile(r"(cpu|cu\d+|rocm[\d.]+|xpu)\Z")
_INDEX: Final = re.compile(r"(?:global|install|:env:)\.(index-url|extra-index-url|find-links)='(.*)'")
# The host's shell finds the interpreter, the interpreter reads its program and then the lock.
_START: Final = (
    'p=$(command -v "python$1" || command -v python3) || exit 127; exec "$p" -Ic '
    '"import sys; i = sys.stdin.buffer; exec(i.read(int(i.readline())))"'
)


def lock_environment() -> bytes:
    """Return the lock of this interpreter's environment. Raises ClusterrunError."""
    if Path(sys.prefix, "conda-meta").exists():
        hint = "build it on the hosts, and name it there: setup: {conda: NAME}"
        raise UsageError("'environment: copy' cannot copy a conda environment", hint=hint)
    found = {_canonical(dist.metadata["Name"]): dist for dist in _distributions()}
    if "clusterrun" not in found:
        hint = "run 'pip install' in its directory"
        raise UsageError("clusterrun is not installed in this environment", hint=hint)
    wheels = {name: data for dist in found.values() for name, data in _wheel(dist)}
    lines = [*_indexes(found.values()), *(_line(dist) for dist in found.values())]
    content = {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "platform": f"{sys.platform}-{platform.machine()}",
        "packages": len(found),
        "lines": [*(line for line in lines if line), *(f"./{name}" for name in sorted(wheels))],
    }
    digests = sorted((name, _contents(data)) for name, data in wheels.items())
    key = hashlib.sha256(json.dumps([content, digests]).encode()).hexdigest()
    text = "".join(f"{line}\n" for line in content.pop("lines")).encode()
    files = {name: base64.b64encode(data).decode() for name, data in [*wheels.items(), ("lock.txt", text)]}
    return json.dumps({**content, "key": key, "files": files}).encode()
