"""Wait for a submitted job or follow its logs: `submit`, `resume`, `resubmit`.

`await-end` is what they run on the host that has the run directory.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import click

from clusterrun.backends.status import JobStatus
from clusterrun.cli.shared import output
from clusterrun.cli.shared.closing import say_end
from clusterrun.cli.shared.job_json import end_object
from clusterrun.cli.shared.progress_text import WaitLine
from clusterrun.cli.shared.wait_text import warn_stuck
from clusterrun.errors import Exit
from clusterrun.rundir.record import JobRecord
from clusterrun.verbs.find import find_record
from clusterrun.verbs.status import wait as wait_until_ended


def await_end(record: JobRecord, data: dict[str, Any] | None, *, follow: bool) -> int:
    """Follow or wait for a job, and return its status; `data` is of its submission, for JSON."""
    _pass_warnings_on(record)
    if data is not None:
        return _wait_for_json(record, data)
    if follow and _follow(record) == Exit.INTERRUPTED:
        _print_how_to_end(record)
        return Exit.INTERRUPTED
    return _exit_code(_wait(record, is_followed=follow))


def _pass_warnings_on(record: JobRecord) -> None:
    """In an allocation, have the ranks save when its scheduler warns this process."""
    if record.cluster.scheduler.outlives_shell:
        return
    from clusterrun.backends.hosts.backend import HostsBackend  # slow to import

    backend = HostsBackend(runs_dir=record.runs_dir)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda *_: backend.signal(record.job_id, signal.SIGUSR2))


def _follow(record: JobRecord) -> int:
    """Print the logs as `logs --follow` does, of a resumed run those of the next attempt.

    Ctrl-C does not end the job.
    """
    from clusterrun.cli.logs import command as logs

    newest = record.paths.newest_attempt()
    is_over = bool(newest) and record.paths.earlier_end(newest).exists()
    args = ["--follow", *["-n", "0"] * is_over, record.run_dir]
    with logs.command.make_context("logs", args, parent=click.get_current_context()) as inner:
        status: int = logs.command.invoke(inner)
    return status


def _print_how_to_end(record: JobRecord) -> None:
    output.say(f"  to end it, run: clusterrun cancel --checkpoint {record.job_id}")


def _wait_for_json(record: JobRecord, data: dict[str, Any]) -> int:
    """Print one object once the job has ended, or on Ctrl-C; return the job's exit status."""
    ended = None
    try:
        ended = _wait(record, is_followed=False)
    finally:
        output.answer_json({**data, **(end_object(ended) if ended else {})})
    return _exit_code(ended)


def _wait(record: JobRecord, *, is_followed: bool) -> JobStatus:
    """Wait for the end and print it, unless `logs` has done so."""
    try:
        ended = wait_until_ended(record, stuck=warn_stuck, rest=WaitLine().rest)
    except KeyboardInterrupt:
        output.say_interrupted(f"job {record.job_id} keeps running")
        _print_how_to_end(record)
        raise
    if not is_followed:
        say_end(f"job {record.job_id}", ended)
    return ended


def _exit_code(ended: JobStatus) -> int:
    """Return a job's own exit status, 1 if it has none and did not complete."""
    if ended.exit_code:
        return ended.exit_code
    if ended.exit_signal:
        return 128 + ended.exit_signal
    return Exit.OK if ended.state.is_success else Exit.FAILED


@click.command()
@click.option("--follow", is_flag=True)
@click.option("--json", "submission", help="the object to complete")
def command(*, follow: bool, submission: str | None) -> int:
    """Follow or wait for the forwarded run, and exit with its status."""
    output.session.json = submission is not None
    return await_end(find_record(), json.loads(submission or "null"), follow=follow)
