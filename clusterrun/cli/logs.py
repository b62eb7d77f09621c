"""`logs`: read what the ranks wrote, merged by time, and follow it while the job runs."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

import click

from clusterrun.backends.status import JobStatus
from clusterrun.cli.logs_view import (
    BATCH,
    LogPrinter,
    Request,
    build_request,
    catalogue_of,
    read_attempt,
    read_tail,
    title_of,
)
from clusterrun.cli.shared import complete, output
from clusterrun.cli.shared.closing import say_end
from clusterrun.cli.shared.help import GroupedCommand, under
from clusterrun.cli.shared.job_view import WaitLine, failure_lines
from clusterrun.errors import ClusterrunError, Exit, UsageError
from clusterrun.logformat.lines import LogLine, Stream, parse_end
from clusterrun.logs.follow import Entry, Joined, NewAttempt, Pause, follow
from clusterrun.logs.merge import last_lines
from clusterrun.logs.sources import FileKind, LogFile, file_size, has_left_out, sources_of
from clusterrun.logs.text import strip_controls
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import read_outcome
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import wording
from clusterrun.shared.files import end_of
from clusterrun.shared.hostlist import fold_hosts
from clusterrun.shared.state import JobState
from clusterrun.verbs.status import poll, quick_status

_lines, _few_lines = under("Lines"), under("Lines", common=False)
_filter = under("Filter")
_show, _rarely_show = under("Show"), under("Show", common=False)
_follow, _rarely_follow = under("Follow"), under("Follow", common=False)


@click.command(cls=GroupedCommand)
@click.argument("job", required=False, shell_complete=complete.jobs)
@_lines("--rank", "ranks", metavar="SET", help="print only these ranks, e.g. 0,8-15 or ::8")
@_lines("-a", "--all-ranks", is_flag=True, help="print all ranks")
@_lines("--node", "nodes", metavar="HOSTLIST", help="print only these nodes, e.g. node[01-04]")
@_few_lines(
    "--stream",
    "streams",
    metavar="LIST",
    help="print only these streams: any of out,err,launcher,agent, or batch alone",
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
@_lines("--since", metavar="T", help="start at this time: 1h30m (ago), 12:30 or 2026-08-01T12:30")
@_few_lines("--until", metavar="T", help="stop at this time")
@_filter("-g", "--include", "-i", multiple=True, metavar="RE", help="print only lines that match")
@_filter("--exclude", multiple=True, metavar="RE", help="omit lines that match")
@_filter("--errors", is_flag=True, help="print only error lines, of all ranks")
@_show("-t", "with_times", is_flag=True, help="print times with milliseconds")
@_rarely_show(
    "--prefix",
    type=click.Choice(["auto", "none"]),
    default="auto",
    help="begin each line with the time, node:rank and a mark (! is stderr)  [default: auto]",
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
    help="fold equal lines of 3 or more ranks into one, and tracebacks of 2 or more; <n> marks "
    "numbers that differ  [default: fold text output]",
)
@_follow("-f", "--follow", "following", is_flag=True, help="follow until the job ends")
@_rarely_follow("--exit-status", is_flag=True, help="exit with 3 if the job did not complete")
def command(**wanted: Any) -> int:
    """Print the output of the ranks.

    JOB is a job id, the name of a run or its directory  [default: the newest run].
    By default, print the last lines of rank 0 and the launcher in the newest attempt, and the error
    lines of all its ranks. With -n N, up to N/2 older error lines come first.

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
    if wanted["following"] and wanted["until"]:
        raise UsageError("--follow and --until cannot be combined", hint="keep one of them")
    request = build_request(wanted)
    if wanted["with_times"] and request.reads_batch:
        output.note("the output of the batch script has no times")
    if wanted["following"]:
        return follow_job(request)
    read(request)
    return exit_status(request)


_WAITING = (JobState.PENDING, JobState.CONFIGURING)


def read(request: Request) -> None:
    """Print the lines that exist now."""
    files = find_files(request)
    size = sum(file_size(file.path) for file in files)
    if request.query.errors and request.form == "text":
        _note_silent_failures(request)
    if size == 0 and request.reads_batch:
        output.say(f"the batch script of {title_of(request.record)} has printed nothing")
        return
    if size == 0:
        _explain_no_lines(request)
        return
    printer = LogPrinter(request=request, nodes=[file.node for file in files])
    is_cut = _print_lines(request, printer)
    _note_what_was_left_out(request, printer.count, size, is_cut=is_cut)


def _note_silent_failures(request: Request) -> None:
    """Report failures first that no rank could print: a signal, a hang, a lost node."""
    for attempt in request.attempts:
        failure = read_outcome(request.record.paths, attempt)
        if failure and failure.cause.is_failure and failure.cause is not Cause.EXCEPTION:
            of = f" of attempt {attempt}" if len(request.attempts) > 1 else ""
            output.note(f"first failure{of}: " + "\n  ".join(failure_lines(failure)))


def _print_lines(request: Request, printer: LogPrinter) -> bool:
    """Print all wanted lines, attempt by attempt; return whether older ones were left out."""
    is_cut = False
    for attempt in request.attempts:
        sources = sources_of(request.catalogue.files(attempt), request.query)
        tail = last_lines(sources, request.query, request.tail, folded=request.folds)
        is_cut |= tail.is_cut
        if len(request.attempts) > 1:
            printer.start_attempt(attempt)
        if tail.errors:  # older than the last lines: an overview begins with them
            printer.print_lines(tail.errors)
            printer.finish()
        for lines in tail.rounds:
            printer.print_lines(lines)
    printer.finish()
    return is_cut or printer.is_cut


def find_files(request: Request) -> list[LogFile]:
    """List the logs of the attempts. Raises UsageError if none of the named nodes has one."""
    every = [file for attempt in request.attempts for file in request.catalogue.files(attempt)]
    files = [file for file in every if file.kind is not FileKind.ERRORS]
    if request.nodes is None:
        return files
    missing = request.nodes - {file.node for file in files}
    if missing and not files:
        # `request.catalogue` has only what was asked for; for a hint, one attempt is enough.
        every_node = catalogue_of(request.record, nodes=None, batch=False)
        others = fold_hosts(file.node for file in every_node.files(request.first_attempt))
        hint = f"choose from {others}" if others else ()
        raise UsageError(f"no log from {fold_hosts(missing)}", hint=hint)
    if missing:
        output.note(f"no log from {fold_hosts(missing)}")
    return files


def exit_status(request: Request, now: JobStatus | None = None) -> int:
    """With --exit-status, return 3 for a job that did not complete (`now` None: look it up)."""
    if not request.exit_status:
        return Exit.OK
    if now is None:
        now = quick_status(request.record)
        if now.error:
            raise now.error
    return Exit.NO if now.state.is_terminal and not now.state.is_success else Exit.OK


def _explain_no_lines(request: Request) -> None:
    """Report why there are no lines. Raises ClusterrunError if there should be some."""
    now, title = quick_status(request.record), title_of(request.record)
    if now.error:
        raise now.error
    if now.state in _WAITING:
        output.say(_why_it_waits(title, now))
        return
    name = request.record.job_id or request.record.run_id
    where = f"the batch script's output: clusterrun logs {name} --stream {BATCH}"
    if not now.state.is_terminal:
        output.say(f"{title} is {now.state.value}; nothing has been written yet ({where})")
        return
    lines = end_of(request.record.paths.batch_output, 4096).decode("utf-8", "replace").splitlines()
    different = (line for line, _ in groupby(lines[-10:]))  # nodes repeat each other
    printed = "\n".join(strip_controls(line, keep_colours=False) for line in different) or None
    text = f"{title} is {now.state.value} and has no log lines"
    raise ClusterrunError(text, cause=printed, hint=f"read {where}" if printed else ())


def _why_it_waits(title: str, now: JobStatus) -> str:
    why = now.pending.text if now.pending else now.reason
    return ": ".join(filter(None, (f"{title} is {now.state.value.lower()}", why)))


def _note_what_was_left_out(request: Request, count: int, size: int, *, is_cut: bool) -> None:
    """Report what was not printed: `count` lines were, of `size` bytes in all."""
    if request.tail == 0:  # no lines were asked for
        return
    if count == 0:
        is_overview = request.query.overview
        where = "of rank 0, the launcher or the errors " if is_overview else ""
        more = " (-a all ranks)" if is_overview else ""
        output.note(f"no line {where}matches; {size:,} bytes in all{more}")
    elif request.form == "text":
        _note_which_lines(request, count, size, is_cut=is_cut)
    if request.form == "text" and (request.query.overview or request.query.errors):
        sides = [side for n in request.attempts for side in request.catalogue.files(n)]
        full = [side for side in sides if side.kind is FileKind.ERRORS and has_left_out(side)]
        if full:  # there was no room for all error lines
            nodes, pattern = fold_hosts({side.node for side in full}), "(?i)error|warn|traceback"
            instead = f"-a -n all -g '{pattern}', without --errors"
            output.note(f"some error lines of {nodes} are only in the log: print it with {instead}")


def _note_which_lines(request: Request, count: int, size: int, *, is_cut: bool) -> None:
    """Report which of the lines that match were printed: all, or only the last."""
    world = request.record.world_size
    of_each = " of each attempt" if len(request.attempts) > 1 else ""
    # --tail is a number for each attempt, `count` one for all of them together.
    number = (request.tail or count) if of_each else count
    what = f"last {wording.count(number, 'line')}{of_each}" if is_cut else "all lines"
    if request.query.overview and world > 1:
        errors = "the newest error lines" if is_cut else "the error lines"
        output.note(
            f"{what} of rank 0 and the launcher, and {errors} of all {world:,} ranks; "
            f"{size:,} bytes in all (-a all ranks, -n all, -f follow)"
        )
    elif is_cut:
        output.note(f"{what} (-n all, -f follow)")


def follow_job(request: Request) -> int:
    """Print the last lines of a job, then new ones until it ends; Ctrl-C does not end the job."""
    watch = _Watch(request.record)
    try:
        _print_until_the_end(request, watch)
    except KeyboardInterrupt:  # after a terminal's ^C, `say_interrupted` begins a new line
        say = output.say_interrupted if output.is_interactive() else output.say
        say(f"{title_of(request.record)} keeps running")
        return Exit.INTERRUPTED
    now = watch.now
    if now is None or not now.state.is_terminal:  # a chosen attempt is over, not the job
        return Exit.OK
    say_end(title_of(request.record), now)
    return exit_status(request, now)


def _print_until_the_end(request: Request, watch: _Watch) -> None:
    """Print lines as they come; print which nodes failed once the lines before that are printed."""
    known = [file.node for file in find_files(request)]
    printer = LogPrinter(request=request, nodes=known or request.nodes or (), is_following=True)
    entries = follow(
        request.catalogue,
        ended=watch.ended,
        query=request.query,
        attempt=request.first_attempt or None,
        is_chosen=request.is_chosen,
        tail=request.tail,
        folded=request.folds,
    )
    ends: list[LogLine] = []  # END records that were not printed yet
    try:
        for entry in entries:
            watch.take(entry)
            match entry:
                case LogLine(stream=Stream.END):
                    ends.append(entry)
                case LogLine():
                    printer.print_lines([entry])
                case NewAttempt(attempt=attempt):
                    printer.start_attempt(attempt)
                case Joined(files=files):
                    print_joined(files, printer)
                case Pause():
                    print_failed_nodes(ends, printer)
                    printer.pause()
        print_failed_nodes(ends, printer)
    finally:
        printer.finish()
    if watch.now is not None:
        printer.print_end(watch.now.state.value, watch.now.exit_code)


def print_joined(files: tuple[LogFile, ...], printer: LogPrinter) -> None:
    """Print which nodes have logs now, after a plus sign as `stern` does."""
    ranks = sum(len(file.ranks or ()) for file in files)
    nodes = fold_hosts(file.node for file in files)
    printer.note(f"+ {nodes} ({wording.count(ranks, 'rank')})" if ranks else f"+ {nodes}")


def print_failed_nodes(ends: list[LogLine], printer: LogPrinter) -> None:
    """Print which nodes failed, after a minus sign, and clear the list, so each appears once."""
    nodes_by_code: dict[int, list[str]] = {}
    for end in ends:
        if code := parse_end(end.text):
            nodes_by_code.setdefault(code, []).append(end.node)
    for code, nodes in nodes_by_code.items():
        printer.note(f"- {fold_hosts(nodes)} exited {code}")
    ends.clear()


class _Watch:
    """Looks now and then whether the job has ended, sooner once a node's log is complete."""

    def __init__(self, record: JobRecord) -> None:
        self._record, self._polled, self._line = record, poll(record), WaitLine()
        self._due_at = float("-inf")  # when to look again
        self._said = ""  # what was reported last
        self._is_over = self._has_printed = False
        self.now: JobStatus | None = None

    def take(self, entry: Entry) -> None:
        """Have the job polled when a node's log ends; show what an attempt does until it prints."""
        is_end = isinstance(entry, LogLine) and entry.stream is Stream.END
        if is_end:  # the job probably ends as well: ask at once
            self._polled, self._due_at = poll(self._record), float("-inf")
        if not isinstance(entry, Pause):
            output.clear_progress()
            self._has_printed = isinstance(entry, LogLine) and not is_end
        elif self.now and not self._has_printed:
            self._line.show(self.now)

    def ended(self) -> bool:
        """Poll the job if it is time; return whether it ended or its scheduler has forgotten it."""
        if time.monotonic() >= self._due_at:
            now, self._is_over, pause_s = next(self._polled)
            self.now = now
            text = _why_it_waits(title_of(self._record), now) if now.state in _WAITING else ""
            if now.error:
                text = f"{now.error.message}; still following the logs"
            if text not in ("", self._said):
                self._said = text
                output.say(text)
            self._due_at = time.monotonic() + pause_s
        return self._is_over
