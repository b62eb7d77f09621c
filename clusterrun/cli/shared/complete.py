"""Shell completion: jobs, in each shell.

It reads files of this machine only, and never asks a scheduler. The shell does not quote what is
offered, so only plain words are.
"""

from __future__ import annotations

import re
from typing import Final

import click
from click.shell_completion import CompletionItem

NEWEST_JOBS: Final = 20  # each is a small file to read
_PLAIN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.+/=-]*\Z"


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer ids and names of the newest jobs, or files once a path is typed."""
    if "/" in incomplete or incomplete.startswith((".", "~")):
        return click.Path().shell_complete(ctx, param, incomplete)
    from clusterrun.rundir.record import list_records
    from clusterrun.verbs.find import places_of_runs

    own, *others = places_of_runs()  # of this project and of others
    records = list_records(own, NEWEST_JOBS)
    records = records or [newest for place in others for newest in list_records(place, 1)]
    started = [each for each in records if each.job_id]
    words = dict.fromkeys((*(each.job_id for each in started), *(each.name for each in started)))
    offered = (word for word in words if word.startswith(incomplete) and re.match(_PLAIN, word))
    return [CompletionItem(word) for word in offered]
