"""`logs`: read what the ranks wrote, merged by time, and follow it while the job runs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from clusterrun.cli import output
from clusterrun.cli.follow import WAITING, exit_status, follow_job, waiting
from clusterrun.cli.log_printer import DEFAULT_TAIL, LogPrinter, Request, job_name
from clusterrun.cli.status import find_announced
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.hostlist import fold_hostlist, parse_hostlist, parse_ranks
from clusterrun.logs.files import LogFile, file_size, find_log_files, fold_nodes
from clusterrun.logs.lines import EVERYTHING, OVERVIEW, Selection
from clusterrun.logs.merge import read_merged
from clusterrun.logs.text import strip_controls

if TYPE_CHECKING:
    from clusterrun.record import JobRecord

QUIET_S = 60  # how long a running job may have no logs before that is a fault


class _Tail(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 only
    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "all" or isinstance(value, int):
            return value
        if not (value.isascii() and value.isdigit()):
            self.fail(f"'{value}' is neither a number of lines nor 'all'", param, ctx)
        return int(value)


@click.command()
@click.argument("job", required=False)
@click.option("--rank", "ranks", metavar="SET", help="these ranks alone, as 0,8-15 or ::8")
@click.option("-a", "--all-ranks", is_flag=True, help="every line of every rank")
@click.option("--node", "nodes", metavar="HOSTLIST", help="these nodes alone, as node[01-04]")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="default: the newest")
@click.option(
    "-n",
    "--tail",
    type=_Tail(),
    metavar="N|all",
    default=DEFAULT_TAIL,
    show_default=True,
    help="the last N lines, or all",
)
@click.option("-t", "--timestamps", is_flag=True, help="the time in front of each line")
@click.option(
    "--prefix",
    type=click.Choice(["auto", "none"]),
    default="auto",
    help="auto: node:rank in front of each line, with ! for stderr",
)
@click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["text", "raw", "json"]),
    default="text",
    help="raw: the bytes as they were written; json: one object a line",
)
@click.option("--json", "as_json", is_flag=True, help="the same as --output json")
@click.option("-f", "--follow", "following", is_flag=True, help="go on until the job ends")
@click.option("--exit-status", is_flag=True, help="exit 3 when the job ended and did not complete")
@click.option("--list", "listing", is_flag=True, help="list the log files instead")
@click.option("--path", "locating", is_flag=True, help="print the directory of the logs instead")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: str | None,
    *,
    following: bool,
    listing: bool,
    locating: bool,
    **wanted: Any,
) -> None:
    """Read what the ranks wrote.

    JOB is a job id, the name of a run or its directory; without it the newest run is taken.
    Shown are the last lines of rank 0 and the launcher, and what any rank wrote to stderr.

    \b
    clusterrun logs -f                    follow the newest run
    clusterrun logs 4711 -a -n all        everything
    clusterrun logs 4711 --rank ::8       the first rank of each 8-GPU node
    clusterrun logs 4711 --node node07    all ranks of one node
    """
    if wanted.pop("as_json"):
        wanted["form"] = "json"
    output.current_session().json = wanted["form"] == "json"
    request = _request(find_announced(job), **wanted)
    if locating:
        _print_path(request)
    elif listing:
        _list_files(request)
    else:
        ctx.exit(follow_job(request) if following else _read(request))


def _request(
    record: JobRecord,
    *,
    ranks: str | None,
    all_ranks: bool,
    nodes: str | None,
    tail: int | str,
    prefix: str,
    attempt: int | None,
    **rest: Any,
) -> Request:
    newest = record.paths.newest_attempt()
    if attempt is not None and attempt > newest:
        known = f"1-{newest}" if newest > 1 else "1 only" if newest else "none yet"
        raise UsageError(
            f"attempt {attempt} does not exist; attempts of {job_name(record)}: {known}"
        )
    if all_ranks and ranks is not None:
        raise UsageError("--rank and --all-ranks exclude each other")
    return Request(
        record=record,
        attempt=attempt,
        nodes=None if nodes is None else frozenset(parse_hostlist(nodes)),
        selection=_selection(record, ranks, everything=all_ranks or nodes is not None),
        tail=None if tail == "all" else int(tail),
        prefix=prefix == "auto",
        **rest,
    )


def _selection(record: JobRecord, ranks: str | None, *, everything: bool) -> Selection:
    if ranks is not None:
        chosen = parse_ranks(ranks, record.world_size)
        return Selection(ranks=chosen, launcher=False, stderr_of_all=False)
    return EVERYTHING if everything else OVERVIEW


def _log_files(request: Request) -> list[LogFile]:
    found = find_log_files(request.record.paths, request.attempt_now)
    if request.nodes is None or not found:
        return found
    missing = sorted(request.nodes - {file.node for file in found})
    if len(missing) == len(request.nodes):
        raise UsageError(
            f"no log of {fold_hostlist(missing)}",
            hint=f"{job_name(request.record)} has logs of {fold_nodes(found)}",
        )
    if missing:
        output.note(f"no log of {fold_hostlist(missing)}")
    return [file for file in found if file.node in request.nodes]


def _print_path(request: Request) -> None:
    paths = request.record.paths
    attempt = request.attempt_now
    output.answer(str(paths.log(attempt, "any").parent if attempt else paths.logs_dir))


def _list_files(request: Request) -> None:
    paths = request.record.paths
    newest = paths.newest_attempt()
    attempts = [request.attempt] if request.attempt else range(1, newest + 1)
    rows = [
        {"attempt": n, "node": f.node, "size_bytes": file_size(f.path), "path": str(f.path)}
        for n in attempts
        for f in find_log_files(paths, n, request.nodes)
    ]
    if request.form == "json":
        output.answer_json({"schema": "clusterrun.logs/1", "files": rows})
    else:
        cells = [[str(value) for value in row.values()] for row in rows]
        output.answer_table(["ATTEMPT", "NODE", "BYTES", "PATH"], cells)


# Reading what is there


def _read(request: Request) -> int:
    request = replace(request, attempt=request.attempt_now or None)  # the next may start any time
    files = _log_files(request)
    size = sum(file_size(file.path) for file in files)
    if size == 0:
        return _tell_nothing_yet(request)
    nodes = frozenset(file.node for file in files)
    printer = LogPrinter(request=request, nodes=nodes)
    for line in read_merged(
        request.record.paths,
        request.attempt_now,
        nodes=nodes,
        selection=request.selection,
        tail=request.tail,
    ):
        printer.print_line(line)
    printer.finish()
    _note_what_was_left_out(request, printer.count, size)
    return _ended_well(request) if request.exit_status else Exit.OK


def _ended_well(request: Request) -> int:
    from clusterrun import api

    status = api.status(request.record)
    if status.error:
        raise status.error
    return exit_status(request, status)


def _note_what_was_left_out(request: Request, count: int, size: int) -> None:
    if request.form != "text":
        return
    world = request.record.world_size
    is_cut = count == request.tail
    what = f"last {count} lines" if is_cut else "all lines"
    if request.selection is OVERVIEW and world > 1:
        output.note(
            f"{what} of rank 0 and the launcher, and the stderr of all {world} ranks; "
            f"{size:,} bytes in all (-a all ranks, -n all, -f follow)"
        )
    elif is_cut:
        output.note(f"{what} (-n all, -f follow)")


def _tell_nothing_yet(request: Request) -> int:
    """Say why there are no lines.

    Raises ClusterrunError where there should be some.
    """
    from clusterrun import api

    record = request.record
    status = api.status(record)
    if status.error:
        raise status.error
    if status.state in WAITING:
        output.say(waiting(status))
        return Exit.OK
    if not status.state.is_terminal and (status.elapsed_s or 0) < QUIET_S:
        output.say(f"{job_name(record)} is {status.state.value}; nothing is written yet")
        return Exit.OK
    printed = _end_of_batch_output(record)
    where = f"what the batch script itself printed is in {record.paths.batch_output}"
    raise ClusterrunError(
        f"no log lines of {job_name(record)}, which is {status.state.value}",
        cause=printed,
        hint=where if printed else (),
    )


def _end_of_batch_output(record: JobRecord) -> str | None:
    try:
        with record.paths.batch_output.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 4096, 0))
            lines = file.read().decode("utf-8", "replace").splitlines()[-10:]
    except OSError:
        return None
    return "\n".join(strip_controls(line, keep_colours=False) for line in lines) or None
