"""`logs`: read what the ranks wrote, merged by time, and follow it while the job runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from clusterrun.cli.logs.reading import exit_status, follow_job, read
from clusterrun.cli.logs.request import Request, build_request, read_attempt, read_tail
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.help import GroupedCommand, under
from clusterrun.errors import UsageError

_lines, _few_lines = under("Lines"), under("Lines", common=False)
_filter = under("Filter")
_show, _rarely_show = under("Show"), under("Show", common=False)
_follow, _rarely_follow = under("Follow"), under("Follow", common=False)
_instead = under("Instead")


@click.command(cls=GroupedCommand)
@click.argument("job", required=False, shell_complete=complete.jobs)
@_lines("--rank", "ranks", metavar="SET", help="print only these ranks, e.g. 0,8-15 or ::8")
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
    type=read_attempt,
    metavar="N|all|-1",
    help="print this attempt; -1 is the one before the newest  [default: the newest]",
)
@_lines(
    "-n",
    "--tail",
    type=read_tail,
    metavar="N|all",
    help="print the last N lines of each printed attempt, or all  [default: 200]",
)
@_lines(
    "--since",
    metavar="T",
    help="start at this time: 1h30m (ago), 12:30 or 2026-08-01T12:30",
)
@_few_lines("--until", metavar="T", help="stop at this time")
@_filter("-g", "--include", "-i", multiple=True, metavar="RE", help="print only lines that match")
@_filter("--exclude", multiple=True, metavar="RE", help="omit lines that match")
@_filter("--errors", is_flag=True, help="print only error lines, of all ranks")
@_show("-t", "with_times", is_flag=True, help="print times with milliseconds")
@_rarely_show(
    "--prefix",
    type=click.Choice(["auto", "none"]),
    default="auto",
    help="start lines with time, node:rank, and ! for stderr  [default: auto]",
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
    "that differ  [default: fold text]",
)
@_follow("-f", "--follow", "following", is_flag=True, help="follow until the job ends")
@_rarely_follow("--exit-status", is_flag=True, help="exit with 3 if the job did not complete")
@_instead("--path", "locating", is_flag=True, help="print the directory of the logs")
def command(**wanted: Any) -> int:
    """Print the output of the ranks.

    JOB is a job id, the name of a run, its directory or the log of a node  [default: the newest
    run].
    By default, print the last lines of rank 0 and the launcher in the newest attempt, and the error
    lines of all its ranks. Up to half of the lines are error lines.

    \b
    clusterrun logs -f                    follow the newest run
    clusterrun logs 4711 -a -n all        print the newest attempt, equal lines folded
    clusterrun logs 4711 --rank ::8       print the first rank of each 8-GPU node
    clusterrun logs 4711 --errors         print the error lines of all ranks
    clusterrun logs 4711 --since 10m -g 'loss|lr'
    """
    if wanted["as_json"]:
        wanted["form"] = "json"
    output.session.json = wanted["form"] == "json"
    _refuse_two(wanted, follow="following", path="locating")
    _refuse_two(wanted, follow="following", until="until")
    request = build_request(wanted)
    if wanted["with_times"] and request.reads_batch:
        output.note("these lines have no times")
    if wanted["following"]:
        return follow_job(request)
    if wanted["locating"]:
        _print_path(request)
    else:
        read(request)
    return exit_status(request)


def _refuse_two(wanted: Mapping[str, Any], **names: str) -> None:
    given = [option for option, name in names.items() if wanted[name] not in (None, False)]
    if len(given) > 1:
        raise UsageError(
            f"--{given[0]} and --{given[1]} cannot be combined", hint="keep one of them"
        )


def _print_path(request: Request) -> None:
    """Print the directory of the newest attempt's logs."""
    paths, attempt = request.record.paths, max(request.attempts, default=0)
    path = str(paths.log(attempt, "any").parent if attempt else paths.logs_dir)
    if request.form == "json":
        output.answer_json({"schema": "clusterrun.logs/1", "paths": [path]})
    else:
        output.answer(path, wraps=False)
