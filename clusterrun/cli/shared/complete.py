"""Shell completion: jobs, configuration keys, models, GPUs and files, in each shell.

Completers read files of this machine only. They never ask a scheduler, and offer nothing from an
invalid file. The shell does not quote what they offer, so they offer only plain words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import click
from click.shell_completion import CompletionItem

NEWEST_JOBS: Final = 20  # each is a small file to read
_PLAIN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.+/=-]*\Z"

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell offer files."""
    return [CompletionItem(incomplete, type="file")]


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer ids and names of the newest jobs, or files once a path is typed."""
    if "/" in incomplete or incomplete.startswith((".", "~")):
        return files(ctx, param, incomplete)
    return _matching(_jobs(only_active=False), incomplete)


def active_jobs(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer ids and names of jobs that have not recorded their end."""
    return _matching(_jobs(only_active=True), incomplete)


def one_of(words: Sequence[str]) -> Completer:
    """Return what offers these words."""
    return lambda _, __, incomplete: _matching(((word, "") for word in words), incomplete)


def keys(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer keys and sections of the configuration."""
    from clusterrun.config.spec import BY_KEY, SECTIONS

    sections = ((name, "all keys of the section") for name in SECTIONS)
    return _matching([*((key, each.help) for key, each in BY_KEY.items()), *sections], incomplete)


def assignments(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer `KEY=`."""
    from clusterrun.config.spec import BY_KEY

    offered = (
        (f"{key}." if each.kind == "mapping" else f"{key}=", each.help)
        for key, each in BY_KEY.items()
    )
    return _matching(offered, incomplete)


def profiles(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the profiles that the files define."""
    from clusterrun.backends.environment import working_directory
    from clusterrun.config.document import parse_document
    from clusterrun.config.files import find_files

    cwd, config_file = working_directory(os.environ), ctx.params.get("config_file")
    found = find_files(environ=os.environ, cwd=cwd, config_file=config_file)
    names = {name for each in found.files for name in parse_document(each).profiles}
    return _matching(((name, "") for name in sorted(names)), incomplete)


def gpus(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the GPUs that `plan` knows, as users spell them."""
    from clusterrun.estimates.gpus import ALL, SHORT

    cards = ((gpu.name.lower(), f"{gpu.memory_bytes / 2**30:.0f} GiB") for gpu in ALL)
    short = ((name, f"the smallest of {', '.join(names)}") for name, names in SHORT.items())
    return _matching([*short, *cards], incomplete.lower())


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the models that `plan` knows by name, and files: a config.json."""
    from clusterrun.estimates.models import BUILT_IN

    return _matching(((name, "") for name in BUILT_IN), incomplete) or files(ctx, param, incomplete)


BY_FIELD: Final[dict[str, Completer]] = {"gpu": gpus, "model": models}
"""The completers of settings that are not enums, by the field of JobSpec."""


def _matching(offered: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    found = {word: text for word, text in offered if word.startswith(incomplete)}.items()
    return [CompletionItem(w, help=text or None) for w, text in found if re.match(_PLAIN, w)]


def _jobs(*, only_active: bool) -> Iterator[tuple[str, str]]:
    """Yield ids, then names, with what the files record about them."""
    from clusterrun.rundir.outcome import read_end
    from clusterrun.rundir.record import list_records
    from clusterrun.verbs.find import places_of_runs

    own, *others = places_of_runs()
    found = list_records(own, NEWEST_JOBS)
    names: dict[str, str] = {}
    for record in found or [each for place in others for each in list_records(place, 1)]:
        end, job_id = read_end(record.paths), record.job_id
        if not job_id or (only_active and end is not None):
            continue
        names.setdefault(record.name, f"newest: {job_id}")
        name = record.name if re.match(_PLAIN, record.name) else ""
        yield job_id, "  ".join(filter(None, (name, end.state.value if end else "")))
    yield from names.items()
