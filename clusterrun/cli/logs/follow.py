"""Follow a job's logs until it ends; used by `logs --follow` and `submit --follow`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from clusterrun.cli.logs.job import WAITING, LogJob, Standing, waiting
from clusterrun.cli.logs.printer import LogPrinter
from clusterrun.cli.logs.reading import exit_status, find_files
from clusterrun.cli.logs.request import Request
from clusterrun.cli.shared import output
from clusterrun.cli.shared.closing import say_end
from clusterrun.cli.shared.job_text import released
from clusterrun.cli.shared.wait_line import WaitLine
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
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count

ASK_PENDING_S = 10
ASK_RUNNING_S = 30
ASK_ENDING_S = 2
FORGOTTEN_S = 45  # longer than between two questions
FEW_NODES = 16  # more share a line


def follow_job(request: Request) -> int:
    """Print the last lines of a job, then new ones until it ends.

    Ctrl-C stops following, not the job; the exit status is then 130.
    """
    watch = _Watch(job=request.job)
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


@dataclass(kw_only=True)
class _Watch:
    """Checks whether the job has ended: rarely, but immediately when its files show an end."""

    job: LogJob
    standing: Standing | None = None
    _asked_at: float = float("-inf")
    _known_at: float = field(default_factory=time.monotonic)
    _end_seen: int | None = None
    _said: str = ""
    _prints: bool = False
    _line: WaitLine = field(default_factory=WaitLine)

    def see(self, entry: Entry) -> None:
        """Show on a terminal what an attempt does until it prints."""
        now = self.standing
        if not isinstance(entry, Pause):
            output.still()
            self._prints = isinstance(entry, LogLine)
        elif now and self.job.record and not self._prints:
            self._line.show(self.job.record, now.state, now.waits_for)

    def ended(self) -> bool:
        """Return whether the job has ended, or has been unknown for FORGOTTEN_S."""
        end = self.job.end_mark()
        is_news = end is not None and end != self._end_seen
        if is_news or time.monotonic() - self._asked_at >= self._interval_s():
            self._end_seen = end
            self._ask()
        if self.standing is None:
            return False
        return self.standing.state.is_terminal or time.monotonic() - self._known_at > FORGOTTEN_S

    def _interval_s(self) -> float:
        if self._end_seen is not None:
            return ASK_ENDING_S
        waits = self.standing is not None and self.standing.state in WAITING
        return ASK_PENDING_S if waits else ASK_RUNNING_S

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        standing = self.job.standing()
        if standing.state.is_terminal and not standing.state.is_success:
            standing = self.job.standing(fresh=True)  # it may be starting again
        if standing.error or standing.state is not JobState.UNKNOWN:
            self._known_at = time.monotonic()
        if standing.error:
            self._say(f"{standing.error.message}; still following the logs")
        elif standing.state in WAITING:
            self._say(waiting(self.job, standing))
            if standing.is_held and self.job.release():
                self._say(released(self.job.title))
        self.standing = standing

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            output.say(text)
