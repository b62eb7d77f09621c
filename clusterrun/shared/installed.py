"""Find installed packages, their versions and what they add to clusterrun.

importlib.metadata does the same, but is slow to import.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from clusterrun.config.choices import ENTRY_POINTS
from clusterrun.errors import shortened

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_LETTERS: Final = 300  # of an error of a package
UNKNOWN: Final = "?"  # the version of a package without metadata, as on PYTHONPATH


def installed_version(package: str) -> str:
    """Return a package's version; empty if it is not installed."""
    return _version(metadata_of(package))


def own_version(package: str) -> str:
    """Return the version of a package that this process can import; empty if it is missing."""
    from importlib import util

    return installed_version(package) or (UNKNOWN if util.find_spec(package) else "")


def versions_in(places: Sequence[str], packages: Iterable[str]) -> dict[str, str]:
    """Return each package's version for a Python that imports from `places`; "" if missing."""
    metadata_paths, versions = _metadata_paths(tuple(places)), dict[str, str]()
    for name in packages:
        path = metadata_paths.get(_normalized(name))
        has_directory = any(os.path.isdir(os.path.join(place, name)) for place in places)
        version = _version(_text_in(path)) if path else ""
        versions[name] = version or (UNKNOWN if has_directory else "")  # UNKNOWN: no metadata
    return versions


def _version(metadata: str) -> str:
    found = re.search(r"^Version: *(.+)$", metadata, re.MULTILINE)
    return found[1].strip() if found else ""


def metadata_of(package: str) -> str:
    """Return the metadata of an installed package; empty if there is none."""
    path = _metadata_paths(tuple(sys.path)).get(_normalized(package))
    return _text_in(path) if path else ""


@functools.cache
def _metadata_paths(places: tuple[str, ...]) -> dict[str, str]:
    """Return the path of each package's metadata by its name; the first place counts."""
    found: dict[str, str] = {}
    for place in places:
        with contextlib.suppress(OSError):
            for name in os.listdir(place or "."):
                if name.endswith((".dist-info", ".egg-info")):
                    package = os.path.splitext(name)[0].partition("-")[0]
                    found.setdefault(_normalized(package), os.path.join(place, name))
    return found


def _normalized(name: str) -> str:
    return re.sub("[-_.]+", "_", name).lower()


def _text_in(path: str) -> str:
    """Read the metadata of a wheel, of an egg directory, or of an egg that is a single file."""
    for file in (os.path.join(path, "METADATA"), os.path.join(path, "PKG-INFO"), path):
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as text:
            return text.read()
    return ""


# What packages add: docs/plugins.md


class PluginGroup(str, Enum):
    """The groups of entry points."""

    SCHEDULERS = ENTRY_POINTS
    CHECKS = "clusterrun.checks"
    CAUSES = "clusterrun.causes"


def plugins(group: PluginGroup) -> Sequence[EntryPoint]:
    """Return the entry points of a group; nothing of them is imported."""
    for path in _metadata_paths(tuple(sys.path)).values():
        with (
            contextlib.suppress(OSError),
            open(os.path.join(path, "entry_points.txt"), "rb") as file,
        ):
            if group.value.encode() in file.read():
                from importlib.metadata import entry_points

                return tuple(entry_points(group=group.value))
    return ()


def plugin_text(plugin: EntryPoint) -> str:
    """Return what a package adds, in words."""
    package = f" of {plugin.dist.name} {plugin.dist.version}" if plugin.dist else ""
    return f"{plugin.group.rpartition('.')[2]} '{plugin.name}'{package}"


def load_all(group: PluginGroup, read: Callable[[EntryPoint], T]) -> tuple[list[T], list[str]]:
    """Return what `read` makes of each plug-in, and a line for each for which it raises."""
    found, broken = list[T](), list[str]()
    for plugin in plugins(group):
        try:
            found.append(read(plugin))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is not ours
            why = " ".join(f"{type(error).__name__}: {error}".split())
            broken.append(f"{plugin_text(plugin)} cannot be loaded: {shortened(why, _LETTERS)}")
    return found, broken
