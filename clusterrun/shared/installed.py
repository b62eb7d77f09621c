"""Find the versions of installed packages without importlib.metadata, which is slow to import."""

from __future__ import annotations

import contextlib
import os
import re
import sys


def installed_version(package: str) -> str:
    """Return a package's version; empty if it is not installed."""
    found = re.search(r"^Version: *(.+)$", metadata_of(package), re.MULTILINE)
    return found[1].strip() if found else ""


def metadata_of(package: str) -> str:
    """Return the metadata of an installed package; empty if there is none."""
    name = re.sub("[-_.]+", "[-_.]+", package)
    is_its = re.compile(rf"{name}(-.*)?\.(dist|egg)-info\Z", re.IGNORECASE).match
    for place in sys.path:
        with contextlib.suppress(OSError):
            for found in filter(is_its, os.listdir(place or ".")):
                return _text_in(os.path.join(place, found))
    return _of_an_archive(package) if any(map(os.path.isfile, sys.path)) else ""


def _text_in(path: str) -> str:
    """Read the metadata of a wheel, of an egg, or an egg's that is a file."""
    for file in (os.path.join(path, "METADATA"), os.path.join(path, "PKG-INFO"), path):
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as text:
            return text.read()
    return ""


def _of_an_archive(package: str) -> str:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return str(metadata.metadata(package))
    return ""
