"""`logs`: read what the ranks wrote, merged by time, and follow it while the job runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from clusterrun.cli.logs import options
from clusterrun.cli.logs.files import list_files, print_path, save
from clusterrun.cli.logs.find import find_log_job
from clusterrun.cli.logs.follow import follow_job
from clusterrun.cli.logs.reading import ask_exit_status, read
from clusterrun.cli.logs.request import build_request
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.help import GroupedCommand, under
from clusterrun.errors import UsageError

_TIMES = ("none", "clock", "time", "iso", "delta")


_lines, _few_lines = under("Lines"), under("Lines", common=False)
_filter = under("Filter")
_show, _rarely_show = under("Show"), under("Show", common=False)
_follow, _rarely_follow = under("Follow"), under("Follow", common=False)
_instead = under("Instead")


@click.command(cls=GroupedCommand)
@click.argument("job", required=False, shell_complete=complete.jobs)
@_lines("--rank", "ranks", metavar="SET", help="print only these ranks, e.g. 0,8-15 or ::8")
@_few_lines(
    "--local-rank", "local_ranks", metavar="SET", help="print only these ranks of each node"
)
@_lines("-a", "--all-ranks", is_flag=True, help="print all ranks")
@_lines("--node", "nodes", metavar="HOSTLIST", help="print only these nodes, e.g. node[01-04]")
@_few_lines(
    "--stream",
    "streams",
    metavar="LIST",
    help="print only these streams: out, err, launcher, agent; or only batch",
)
@_lines(
    "--attempt",
    type=options.attempt,
    metavar="N|all|-1",
    help="print this attempt; -1 is the one before the newest  [default: the newest]",
)
@_lines(
    "-n",
    "--tail",
    type=options.tail,
    metavar="N|all",
    help="print the last N lines of each printed attempt, or all  [default: 200]",
)
@_lines(
    "--since",
    metavar="T",
    help="start at this time: 1h30m (ago), 12:30, 2026-08-01T12:30 or step:4000",
)
@_few_lines("--until", metavar="T", help="stop at this time")
@_filter("-g", "--include", "-i", multiple=True, metavar="RE", help="print only lines that match")
@_filter("--exclude", multiple=True, metavar="RE", help="omit lines that match")
@_rarely_show("-H", "--highlight", multiple=True, metavar="RE", help="highlight matches")
@_filter("--errors", is_flag=True, help="print only error lines, of all ranks")
@_filter(
    "-C",
    "--context",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="also print N lines of the same rank before and after each match",
)
@_show("-t", "with_times", is_flag=True, help="print times with milliseconds")
@_rarely_show(
    "--timestamps", type=click.Choice(_TIMES), help="print times in this form  [default: clock]"
)
@_rarely_show("--tz", metavar="ZONE", help="use this time zone, e.g. UTC or Europe/Berlin")
@_rarely_show(
    "--prefix",
    type=click.Choice(["auto", "full", "none"]),
    default="auto",
    help="start lines with node:rank, and ! for stderr  [default: auto]",
)
@_rarely_show(
    "-o",
    "--output",
    "form",
    type=click.Choice(["text", "raw", "json"]),
    default="text",
    help="print text, the bytes as written, or a JSON object per line  [default: text]",
)
@_show("--json", "as_json", is_flag=True, help="print a JSON object per line")
@_show(
    "--dedup/--no-dedup",
    default=None,
    help="fold lines printed by 3 or more ranks, and tracebacks of 2 or more; <n> marks numbers "
    "that differ  [default: fold text, except when saving]",
)
@_follow("-f", "--follow", "following", is_flag=True, help="follow until the job ends")
@_rarely_follow(
    "--interval",
    type=options.interval,
    metavar="TIME",
    help="check the files this often, e.g. 2s",
)
@_rarely_follow("--exit-status", is_flag=True, help="exit with 3 if the job did not complete")
@_instead("--list", "listing", is_flag=True, help="list the log files")
@_instead("--path", "locating", is_flag=True, help="print the directory of the logs")
@_instead(
    "--save",
    "target",
    metavar="FILE|DIR",
    help="save all lines, unfolded, to FILE, or to DIR/ with one file per rank",
)
@click.pass_context
def command(ctx: click.Context, /, **_: Any) -> None:
    """Print the output of the ranks.

    JOB is a job id, the name of a run, its directory or a log file  [default: the newest run].
    By default, print the last lines of rank 0 and the launcher in the newest attempt, and the error
    lines of all its ranks. Up to half of the lines are error lines.

    \b
    clusterrun logs -f                    follow the newest run
    clusterrun logs 4711 -a -n all        print the newest attempt, equal lines folded
    clusterrun logs 4711 --rank ::8       print the first rank of each 8-GPU node
    clusterrun logs 4711 --errors -C 3    print errors with the lines around them
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
        output.note("these lines have no times")
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
        raise UsageError(
            f"--{given[0]} and --{given[1]} cannot be combined", hint="keep one of them"
        )
