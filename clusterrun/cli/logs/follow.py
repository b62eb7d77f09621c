"""Follow a job's logs until it ends; used by `logs --follow` and `submit --follow`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from clusterrun.cli.logs.job import WAITING, LogJob, Standing, waiting
from clusterrun.cli.logs.printer import LogPrinter
from clusterrun.cli.logs.reading import exit_status, find_files
from clusterrun.cli.logs.request import Request
from clusterrun.cli.shared import output
from clusterrun.cli.shared.closing import say_end
from clusterrun.cli.shared.job_text import released
from clusterrun.cli.shared.progress_text import WaitLine
from clusterrun.errors import Exit
from clusterrun.logformat.lines import LogLine
from clusterrun.logs.files import LogFile
from clusterrun.logs.follow import (
    Entry,
    Joined,
    Left,
    LeftOut,
    NewAttempt,
    Pause,
    Truncated,
    follow,
)
from clusterrun.shared.hostlist import fold_hosts
from clusterrun.shared.wording import count
from clusterrun.verbs.status import Release, Watch

FEW_NODES = 16  # more share a line


def follow_job(request: Request) -> int:
    """Print the last lines of a job, then new ones until it ends.

    Ctrl-C stops following, not the job; the exit status is then 130.
    """
    watch = _Watch(request.job)
    try:
        _print_until_the_end(request, watch)
    except KeyboardInterrupt:
        say = output.say_interrupted if output.is_interactive() else output.say
        say(f"{request.job.title} keeps running")
        return Exit.INTERRUPTED
    standing = watch.standing
    if standing is None or not standing.state.is_terminal:  # a chosen attempt is over, not the job
        return Exit.OK
    say_end(request.job.title, standing.state, standing.elapsed_s, standing.job)
    return exit_status(request, standing)


def _print_until_the_end(request: Request, watch: _Watch) -> None:
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
    try:
        for line in _lines(entries, printer, watch):
            printer.print_line(line)
    finally:
        printer.finish()
    if watch.standing is not None:
        printer.print_end(watch.standing.state.value, watch.standing.exit_code)


def _lines(entries: Iterable[Entry], printer: LogPrinter, watch: _Watch) -> Iterator[LogLine]:
    """Yield the lines, and report events on stderr; show what an attempt without lines does."""
    left: list[Left] = []
    incomplete: set[str] = set()
    for entry in entries:
        watch.see(entry)
        match entry:
            case LogLine():
                yield entry
            case NewAttempt(attempt=attempt):
                printer.start_attempt(attempt)
            case Joined(files=files):
                print_joined(files, printer)
            case Left():
                left.append(entry)
            case LeftOut(node=node):
                if node not in incomplete:
                    incomplete.add(node)
                    printer.note(f"note: some error lines of {node} are not shown (pass --errors)")
            case Truncated(node=node):
                printer.print_truncated(node)
            case Pause():
                print_left(left, printer)
                printer.pause()
    print_left(left, printer)


def print_joined(files: tuple[LogFile, ...], printer: LogPrinter) -> None:
    """Print which nodes have logs now; many share a line."""
    groups = [[file] for file in files] if len(files) <= FEW_NODES else [[*files]]
    for group in groups:
        nodes = fold_hosts(file.node for file in group) if group[1:] else group[0].node
        ranks = sum(len(file.ranks or ()) for file in group)
        printer.note(f"+ {nodes} ({count(ranks, 'rank')})" if ranks else f"+ {nodes}")


def print_left(left: list[Left], printer: LogPrinter) -> None:
    """Print which nodes failed; the agents' lines give reasons."""
    ends: dict[tuple[int, str], list[str]] = {}
    for entry in left:
        if entry.code:
            reason = "" if printer.request.shows_agents else entry.reason
            ends.setdefault((entry.code, reason), []).append(entry.node)
    for (code, reason), nodes in ends.items():
        why = f": {reason}" if reason else ""
        printer.note(f"- {fold_hosts(nodes)} exited {code}{why}")
    left.clear()


class _Watch:
    """Looks now and then whether the job has ended, sooner once a node's log is complete."""

    def __init__(self, job: LogJob) -> None:
        self._job = job
        self._watch = Watch(lambda fresh: job.standing(fresh=fresh), *job.pauses_s)
        self._due_at = float("-inf")
        self._said = ""
        self._prints = False
        self._line, self._release = WaitLine(), Release()
        self.standing: Standing | None = None

    def see(self, entry: Entry) -> None:
        """Show on a terminal what an attempt does until it prints."""
        now = self.standing
        if isinstance(entry, Left):
            self._watch.pause_s, self._due_at = self._job.pauses_s[0], float("-inf")
        if not isinstance(entry, Pause):
            output.still()
            self._prints = isinstance(entry, LogLine)
        elif now and self._job.record and not self._prints:
            self._line.show(self._job.record, now.state, now.waits_for)

    def ended(self) -> bool:
        """Return whether the job has ended, or nobody knows it any more."""
        if time.monotonic() >= self._due_at:
            self._look()
            self._due_at = time.monotonic() + self._watch.pause_s
        return self._watch.is_over

    def _look(self) -> None:
        standing = self.standing = self._watch.look()
        if standing.error:
            self._say(f"{standing.error.message}; still following the logs")
        elif standing.state in WAITING:
            self._say(waiting(self._job, standing))
            if standing.job and self._release(standing.job):
                self._say(released(self._job.title))

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            output.say(text)
