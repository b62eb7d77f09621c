"""`logs`: read what the ranks wrote, merged by time, and follow it while the job runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click

from clusterrun.cli.logs import options
from clusterrun.cli.logs.files import list_files, print_path, save
from clusterrun.cli.logs.find import find_log_job
from clusterrun.cli.logs.follow import follow_job
from clusterrun.cli.logs.reading import ask_exit_status, read
from clusterrun.cli.logs.request import build_request
from clusterrun.cli.shared import output
from clusterrun.cli.shared.options import GroupedCommand, GroupedOption
from clusterrun.errors import UsageError

_TIMES = ("none", "clock", "time", "iso", "delta")


def _under(heading: str) -> Callable[..., Callable[[Any], Any]]:
    return functools.partial(click.option, cls=GroupedOption, heading=heading)


_lines = _under("Lines")
_filter = _under("Filter")
_show = _under("Show")
_follow = _under("Follow")
_instead = _under("Instead")


@click.command(cls=GroupedCommand)
@click.argument("job", required=False)
@_lines("--rank", "ranks", metavar="SET", help="these ranks alone, as 0,8-15 or ::8")
@_lines("--local-rank", "local_ranks", metavar="SET", help="these ranks of each node")
@_lines("-a", "--all-ranks", is_flag=True, help="the lines of every rank")
@_lines("--node", "nodes", metavar="HOSTLIST", help="these nodes alone, as node[01-04]")
@_lines("--stream", "streams", metavar="LIST", help="of out, err, launcher, agent; or batch alone")
@_lines(
    "--attempt",
    type=options.attempt,
    metavar="N|all|-1",
    help="default: the newest; -1: the one before it",
)
@_lines(
    "-n",
    "--tail",
    type=options.tail,
    metavar="N|all",
    help="the last N lines of each attempt, or all  [default: 200]",
)
@_lines("--since", metavar="T", help="from 1h30m ago, 12:30, 2026-08-01T12:30, step:4000 on")
@_lines("--until", metavar="T", help="up to such a moment")
@_filter(
    "-g", "--include", "-i", multiple=True, metavar="RE", help="lines that match (any of several)"
)
@_filter("--exclude", multiple=True, metavar="RE", help="no lines that match")
@_show("-H", "--highlight", multiple=True, metavar="RE", help="mark what matches")
@_filter("--errors", is_flag=True, help="error lines alone, of every rank")
@_filter(
    "-C",
    "--context",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="with N lines of the same rank before and after each",
)
@_show("-t", "with_times", is_flag=True, help="times with ms: --timestamps=time")
@_show("--timestamps", type=click.Choice(_TIMES), help="[default: clock]")
@_show("--tz", metavar="ZONE", help="zone of times, as UTC or Europe/Berlin")
@_show(
    "--prefix",
    type=click.Choice(["auto", "full", "none"]),
    default="auto",
    help="auto: node:rank in front of each line, with ! for stderr",
)
@_show(
    "-o",
    "--output",
    "form",
    type=click.Choice(["text", "raw", "json"]),
    default="text",
    help="raw: the bytes as they were written; json: one object a line",
)
@_show("--json", "as_json", is_flag=True, help="the same as --output json")
@_show(
    "--dedup/--no-dedup",
    default=None,
    help="fold lines that 3 or more ranks printed, and tracebacks of 2 or more; <n> is a number "
    "that differs  [default: in text; not saved]",
)
@_follow("-f", "--follow", "following", is_flag=True, help="go on until the job ends")
@_follow(
    "--interval",
    type=options.interval,
    metavar="TIME",
    help="look at the files this often, as 2s",
)
@_follow("--exit-status", is_flag=True, help="exit 3 when the job ended and did not complete")
@_instead("--list", "listing", is_flag=True, help="list the log files instead")
@_instead("--path", "locating", is_flag=True, help="print the directory of the logs instead")
@_instead(
    "--save",
    "target",
    metavar="FILE|DIR",
    help="write there instead, all lines as they are unless said; DIR/: a file for each rank",
)
@click.pass_context
def command(ctx: click.Context, /, **_: Any) -> None:
    """Read what the ranks wrote.

    JOB is a job id, the name of a run, its directory or a log file; without it the newest run is
    taken. Shown are the last lines of rank 0 and the launcher, and of the error lines of every
    rank, which keep up to half of the room however old they are.

    \b
    clusterrun logs -f                    follow the newest run
    clusterrun logs 4711 -a -n all        everything; with --no-dedup line by line
    clusterrun logs 4711 --rank ::8       the first rank of each 8-GPU node
    clusterrun logs 4711 --errors -C 3    what went wrong, and what was just before
    clusterrun logs 4711 --since 10m -g 'loss|lr'
    """
    wanted = ctx.params
    if wanted["as_json"]:
        wanted["form"] = "json"
    if wanted["with_times"]:
        wanted["timestamps"] = wanted["timestamps"] or "time"
    output.current_session().json = wanted["form"] == "json"
    _refuse_two(wanted, follow="following", list="listing", path="locating", save="target")
    _refuse_two(wanted, follow="following", until="until")
    request = build_request(find_log_job(wanted["job"]), wanted)
    if not request.has_times and wanted["timestamps"] not in (None, "none"):
        output.note("these lines carry no times")
    if wanted["following"]:
        ctx.exit(follow_job(request))
    if wanted["locating"]:
        print_path(request)
    elif wanted["listing"]:
        list_files(request)
    elif wanted["target"] is not None:
        save(request, wanted["target"])
    else:
        read(request)
    ctx.exit(ask_exit_status(request))


def _refuse_two(wanted: Mapping[str, Any], **names: str) -> None:
    given = [option for option, name in names.items() if wanted[name] not in (None, False)]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} exclude each other")
