"""Shell completion: jobs and files, in each shell.

Completers read files of this machine only, and never ask a scheduler. The shell does not quote what
they offer, so they offer only plain words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import click
from click.shell_completion import CompletionItem

NEWEST_JOBS: Final = 20  # each is a small file to read
_PLAIN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.+/=-]*\Z"


def files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell offer files."""
    return [CompletionItem(incomplete, type="file")]


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer ids and names of the newest jobs, or files once a path is typed."""
    if "/" in incomplete or incomplete.startswith((".", "~")):
        return files(ctx, param, incomplete)
    from clusterrun.rundir.record import list_records
    from clusterrun.verbs.find import places_of_runs

    own, *others = places_of_runs()
    found = list_records(own, NEWEST_JOBS)
    found = found or [each for place in others for each in list_records(place, 1)]
    started = [each for each in found if each.job_id]
    words = [*(each.job_id for each in started), *(each.name for each in started)]
    return _matching(words, incomplete)


def one_of(words: Sequence[str]) -> Callable[..., list[CompletionItem]]:
    """Return what offers these words."""
    return lambda _, __, incomplete: _matching(words, incomplete)


def _matching(offered: Iterable[str], incomplete: str) -> list[CompletionItem]:
    found = dict.fromkeys(word for word in offered if word.startswith(incomplete))
    return [CompletionItem(word) for word in found if re.match(_PLAIN, word)]
