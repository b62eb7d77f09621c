"""Say beside the lines what they are not all of."""

from __future__ import annotations

from clusterrun import wording
from clusterrun.cli import output
from clusterrun.cli.log_request import Request
from clusterrun.hostlist import fold_hosts
from clusterrun.logs.files import Kind
from clusterrun.logs.index import has_left_out
from clusterrun.logs.tail import Cut


def note_what_was_left_out(request: Request, count: int, size: int, cut: Cut) -> None:
    """Say of which lines the `count` that were printed are the last, out of `size` bytes."""
    if request.tail == 0:
        return
    if count == 0:
        _note_that_nothing_matches(request, size)
    elif request.form == "text":
        _note_which_lines(request, count, size, cut)
    if request.form == "text" and request.query.overview:
        sides = request.catalogue.files(request.attempts[-1])
        short = [side for side in sides if side.kind is Kind.ERRORS and has_left_out(side)]
        if short:
            nodes = fold_hosts(side.node for side in short)
            output.note(f"not all error lines of {nodes} are among them (--errors)")


def _note_that_nothing_matches(request: Request, size: int) -> None:
    where = "of rank 0, the launcher and the error lines, " if request.query.overview else ""
    more = " (-a all ranks)" if request.query.overview else ""
    output.note(f"{where}no line matches; {size:,} bytes in all{more}")


def _note_which_lines(request: Request, count: int, size: int, cut: Cut) -> None:
    world = request.job.world_size
    what = _last_lines(request, count) if Cut.LINES in cut else f"all {_kind(request)}lines"
    if request.query.overview and world > 1:
        errors = "the newest error lines" if Cut.ERRORS in cut else "the error lines"
        output.note(
            f"{what} of rank 0 and the launcher, and {errors} of all {world:,} ranks; "
            f"{size:,} bytes in all (-a all ranks, -n all, -f follow)"
        )
    elif Cut.LINES in cut:
        output.note(f"{what} (-n all, -f follow)")


def _last_lines(request: Request, count: int) -> str:
    is_single = len(request.attempts) == 1 and not request.context
    number = count if is_single else request.tail or 0
    text = f"last {wording.count(number, f'{_kind(request)}line')}"
    if request.context:
        text += " and their neighbours"
    return f"{text} of each attempt" if len(request.attempts) > 1 else text


def _kind(request: Request) -> str:
    query = request.query
    is_chosen = query.include or query.exclude or query.since_us or query.until_us
    return "matching " if is_chosen else ""
