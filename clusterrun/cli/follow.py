"""Follow a job's logs until it ends; used by `logs --follow` and `submit --follow`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterrun.cli import output
from clusterrun.cli.log_printer import LogPrinter, Request, job_name
from clusterrun.cli.status import clock
from clusterrun.errors import Exit
from clusterrun.logs.files import find_log_files, stat_file
from clusterrun.logs.follow import Gap, NewAttempt, Pause, follow
from clusterrun.logs.lines import LogLine
from clusterrun.state import JobState

if TYPE_CHECKING:
    from clusterrun.backends.status import JobStatus
    from clusterrun.record import JobRecord

ASK_PENDING_S = 10
ASK_RUNNING_S = 30
ASK_ENDING_S = 2
FORGOTTEN_S = 45  # more than one question later
WAITING = (JobState.PENDING, JobState.CONFIGURING)


def follow_job(request: Request) -> int:
    """Print the last lines of a job, then each as it comes, until the job ends.

    Ctrl-C ends the watching and not the job; then the exit status is 130.
    """
    watch = _Watch(record=request.record)
    try:
        _print_until_the_end(request, watch)
    except KeyboardInterrupt:
        start = "\n" if output.is_interactive() else ""  # the terminal wrote ^C
        output.say(f"{start}{job_name(request.record)} keeps running")
        return Exit.INTERRUPTED
    status = watch.status
    if status is None or not status.state.is_terminal:  # a chosen attempt is over, not the job
        return Exit.OK
    spent = f" after {clock(status.elapsed_s)}" if status.elapsed_s is not None else ""
    output.say(f"{job_name(request.record)} {output.painted_state(status.state.value)}{spent}")
    return exit_status(request, status)


def exit_status(request: Request, status: JobStatus) -> int:
    """Give 3 for a job that ended badly, where that was asked for."""
    ended_badly = status.state.is_terminal and not status.state.is_success
    return Exit.NO if request.exit_status and ended_badly else Exit.OK


def waiting(status: JobStatus) -> str:
    """Say what a job that has not started waits for."""
    reason = status.pending.text if status.pending else status.reason
    state = f"{job_name(status.record)} is {status.state.value.lower()}"
    return f"{state}: {reason}" if reason else state


def _print_until_the_end(request: Request, watch: _Watch) -> None:
    paths = request.record.paths
    known = [file.node for file in find_log_files(paths, request.attempt_now, request.nodes)]
    printer = LogPrinter(request=request, nodes=known or request.nodes or ())
    for entry in follow(
        paths,
        ended=watch.ended,
        attempt=request.attempt,
        nodes=request.nodes,
        selection=request.selection,
        tail=request.tail,
    ):
        match entry:
            case LogLine():
                printer.print_line(entry)
            case NewAttempt(attempt=attempt):
                printer.start_attempt(attempt)
            case Gap(node=node):
                printer.print_gap(node)
            case Pause():
                printer.pause()
    printer.finish()
    if watch.status is not None:
        printer.print_end(watch.status.state.value, watch.status.exit_code)


@dataclass(kw_only=True)
class _Watch:
    """Knows whether the job has ended; asks seldom, and at once when its files say so."""

    record: JobRecord
    status: JobStatus | None = None
    _asked_at: float = float("-inf")
    _known_at: float = field(default_factory=time.monotonic)
    _end_seen: int | None = None
    _said: str = ""

    def ended(self) -> bool:
        """Say whether the job has ended, or is forgotten by everybody."""
        end = stat_file(self.record.paths.end)
        is_news = end is not None and end.st_mtime_ns != self._end_seen
        if is_news or time.monotonic() - self._asked_at >= self._interval_s():
            self._end_seen = end.st_mtime_ns if end else None
            self._ask()
        if self.status is None:
            return False
        return self.status.state.is_terminal or time.monotonic() - self._known_at > FORGOTTEN_S

    def _interval_s(self) -> float:
        if self._end_seen is not None:
            return ASK_ENDING_S
        waits = self.status is not None and self.status.state in WAITING
        return ASK_PENDING_S if waits else ASK_RUNNING_S

    def _ask(self) -> None:
        from clusterrun import api

        self._asked_at = time.monotonic()
        status = api.status(self.record)
        if status.state.is_terminal and not status.state.is_success:
            status = api.status(self.record, max_age_s=0)  # it may be starting again
        if status.error or status.state is not JobState.UNKNOWN:
            self._known_at = time.monotonic()
        if status.error:
            self._say(f"{status.error.message}; the logs go on")
        elif status.state in WAITING:
            self._say(waiting(status))
        self.status = status

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            output.say(text)
