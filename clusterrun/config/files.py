"""Find the configuration files and read them; no other part of loading touches the disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from clusterrun.config.settings import Anchor, ConfigFile
from clusterrun.errors import ConfigError

PROJECT_FILE: Final = "clusterrun.yaml"
SITE_FILE: Final = "/etc/clusterrun/config.yaml"
_MOST_BYTES: Final = 4 << 20


class FoundFiles(NamedTuple):
    """The configuration files, the highest first, and the directory of their project."""

    files: tuple[ConfigFile, ...]
    project_dir: Path
    notes: tuple[str, ...] = ()


def find_files(
    *, environ: Mapping[str, str], cwd: Path, config_file: str | None = None, search: bool = True
) -> FoundFiles:
    """Read the job file, the project's (with `search`), the user's and the site's configuration.

    Raises ConfigError for a named file that is missing, or a file that cannot be read.
    """
    home = environ.get("HOME") or None
    project, notes = find_project(cwd) if search else (None, ())
    job_file: Path | None = None
    found: list[ConfigFile] = []
    if config_file:
        job_file = cwd / Anchor(home=home).absolute(config_file)
        found.append(read_file(job_file, shown=config_file, cwd=cwd, home=home))
    # The job file may be the project's own: it is read once.
    if project is not None and not (job_file and job_file.resolve() == project.resolve()):
        shown = os.path.relpath(project, cwd)
        found.append(read_file(project, shown=shown, cwd=cwd, home=home))
    places = list(user_and_site(environ))
    for path, is_named in places:
        if is_named or os.path.lexists(path):  # a named file must exist
            shown = str(path)
            if home and shown.startswith(home.rstrip("/") + "/"):
                shown = "~" + shown[len(home) :]
            file = read_file(path, shown=shown, cwd=cwd, home=home, strict=False)
            found.append(file._replace(is_of_user=path != places[-1][0]))  # the last is the site's
    directory = project.parent if project is not None else cwd
    return FoundFiles(files=tuple(found), project_dir=directory, notes=notes)


def read_file(
    path: Path, *, shown: str, cwd: Path, home: str | None, strict: bool = True
) -> ConfigFile:
    """Read one file; messages name it `shown`, and unknown keys in it are mistakes if `strict`.

    Its directory anchors its paths. Raises ConfigError if it can't be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        text = data.decode("utf-8-sig")
        is_regular = path.is_file()
    except OSError as error:
        hint, cause = "check that it exists and that you can read it", error.strerror or str(error)
        raise ConfigError(f"cannot read {shown}", cause=cause, hint=hint) from error
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8"
        raise ConfigError(f"{shown} is not UTF-8 text", cause=str(error), hint=hint) from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{shown} is larger than 4 MiB", hint="keep only settings in it")
    # A pipe has no directory, and paths relative to the working directory stay as written.
    has_own_directory = is_regular and path.parent != cwd
    anchor = Anchor(directory=str(path.parent) if has_own_directory else None, home=home)
    return ConfigFile(shown=shown, text=text, anchor=anchor, strict=strict)


def find_project(cwd: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Find clusterrun.yaml in `cwd`, or above it one of this user or root; return it with notes."""
    notes: tuple[str, ...] = ()
    for directory in (cwd, *cwd.parents):
        path = directory / PROJECT_FILE
        if directory == cwd and path.with_suffix(".yml").is_file():
            notes = (f"clusterrun.yml is ignored; rename it to {PROJECT_FILE}",)
        try:
            status = path.stat()
        except OSError:
            continue
        if stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode):  # it may have no end
            return None, (*notes, f"{path} is a pipe or a device, and is ignored")
        if directory == cwd or status.st_uid in (os.getuid(), 0):
            return path, notes
        other = f"{path} belongs to another user and is ignored; pass --config to use it"
        return None, (*notes, other)
    return None, notes


def user_and_site(environ: Mapping[str, str]) -> Iterator[tuple[Path, bool]]:
    """Yield the user's file, if there is a home, and the site's; True: a variable names this file.

    Their templates are in the same directories.
    """
    home = environ.get("HOME") or None
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the XDG specification: a relative one is ignored
        base = os.path.join(home, ".config") if home else ""
    if base:
        yield Path(base) / "clusterrun" / "config.yaml", False
    named = environ.get("CLUSTERRUN_SITE_CONFIG")
    yield Path(Anchor(home=home).absolute(named or SITE_FILE)), bool(named)
