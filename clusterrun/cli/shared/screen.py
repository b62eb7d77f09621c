"""The screen of `top` and `status -f`: what a job does now, until it ends or a key is pressed."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, NamedTuple

from click.exceptions import Exit as ClickExit
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clusterrun.advice.question import question_of
from clusterrun.backends.evidence import Evidence, read_evidence
from clusterrun.backends.status import JobStatus, with_usage
from clusterrun.cli.shared import job_view, output
from clusterrun.diagnosis.training import losses_in
from clusterrun.errors import ClusterrunError
from clusterrun.estimates.estimate import estimate
from clusterrun.logs.merge import find_newest
from clusterrun.logs.sources import OVERVIEW, find_files, sources_of
from clusterrun.logs.text import clock_time, readable, strip_controls
from clusterrun.logs.views import source_name
from clusterrun.rundir.record import JobRecord
from clusterrun.rundir.usage import AlertKind, Sample, alert_texts, silent
from clusterrun.shared.amounts import clock
from clusterrun.shared.hostlist import fold_hosts, natural_key
from clusterrun.shared.own_modules import module_argv
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.find import configuration
from clusterrun.verbs.status import wait

_KEYS: Final = "[l]ogs [e]rrors [s]tacks [c]heckpoint and end [x] cancel [q]uit"
_MANY: Final = 32  # more nodes have a cell each, and only the worst have rows
_WORST: Final = 20
_MOST_DESCRIBED: Final = 2  # nodes whose alerts are described
_READ_LINES: Final = 100
_LOG_LINES: Final = 3  # for which the rows of nodes leave room
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_WIDE: Final = 24  # a curve, and a bar


class Trouble(NamedTuple):
    """How bad a node is: the greater, the worse."""

    silent_s: float
    alerts: int
    memory_percent: float  # of its fullest memory

    @property
    def is_bad(self) -> bool:
        """Return whether the node does not report, or has alerts."""
        return self.silent_s > 0 or self.alerts > 0


def screen(job: JobStatus, planned_rate: str, width: int, height: int | None = None) -> Group:
    """Return what to print, safe for any terminal; without a height, all of it.

    Rows of nodes and the newest log lines share what is left of the height.
    """
    job = job if job.usage else with_usage(job)
    evidence = read_evidence(job.record.paths)
    silences_s = silent(job.usage, time.time()) if job.state is JobState.RUNNING else {}
    nodes = {
        name: Trouble(silences_s.get(name, 0.0), len(sample.alerts), sample.fullest_percent)
        for name, sample in sorted(job.usage.items(), key=lambda item: natural_key(item[0]))
    }
    logs = _last_lines(job.record, evidence.attempt)
    losses = evidence.losses or [float(loss) for line in logs for loss in losses_in(line)]
    lines = [_line(_head(job), "bold"), *_problem_lines(job, nodes)]
    lines += map(_line, _training(job, planned_rate, evidence, losses))
    if len(nodes) > _MANY:
        lines.append(_line(_strip(nodes, job.usage, width)))
    room = len(nodes) + 8  # all nodes, and some log lines
    if height is not None:
        room = max(0, height - len(lines) - 2)  # the head of the table, the keys
    node_rows = _WORST if len(nodes) > _MANY else len(nodes)
    node_rows = min(node_rows, max(0, room - min(_LOG_LINES, len(logs))))
    log_rows = min(len(logs), room - node_rows)
    keys = [] if height is None else [_line(_KEYS, "dim")]
    tables = [_table(nodes, node_rows, job.usage)] if node_rows else []
    return Group(*lines, *tables, *map(_line, logs[len(logs) - log_rows :]), *keys)


def _line(text: str, style: str = "") -> Text:
    """Return a line that no terminal obeys or wraps."""
    plain = strip_controls(text.expandtabs(), keep_colours=False)
    safe = "".join(letter if letter.isprintable() else " " for letter in plain)
    return Text(safe, style, no_wrap=True, overflow="ellipsis")


def _last_lines(record: JobRecord, attempt: int) -> list[str]:
    """Return the newest log lines of an attempt, as they are shown; [] if none can be read."""
    with contextlib.suppress(ClusterrunError, OSError):
        sources = sources_of(find_files(record.paths, attempt), OVERVIEW)
        return [
            f"{clock_time(line.epoch_us)[:8]} {source_name(line)} | "
            f"{readable(line.text, keep_colours=False)}"
            for line in find_newest(sources, _READ_LINES)
        ]
    return []


def _head(job: JobStatus) -> str:
    times = (job.elapsed_s, job.limit_s) if job.elapsed_s is not None else ()
    spent = " of ".join(clock(seconds) for seconds in times if seconds is not None)
    attempt = f"attempt {job.attempt}" if job.attempt > 1 else ""
    world = f"{count(job.record.nodes, 'node')} x {count(job.record.procs_per_node, 'rank')}"
    parts = (job.record.name, job.state.value, spent, attempt, world)
    return "  ".join(filter(None, (f"job {job.record.job_id or '-'}", *parts)))


def _problem_lines(job: JobStatus, nodes: Mapping[str, Trouble]) -> list[Text]:
    """Return what is wrong; if nothing is, that all is well, or what the job does."""
    runs = job.state is JobState.RUNNING
    wrong = [job_view.failure_text(job.failure)] if job.failure else []
    wrong += [*(each.text for each in job.suspicions), *job.notes]
    wrong += _warnings(job, nodes) if runs else ()
    if wrong:
        return [_line(text, "yellow" if runs else "red") for text in wrong]
    if runs and (nodes or job.progress.step is not None):
        return [_line("all well", "green")]
    return [_line(job_view.activity(job), "yellow")]


def _warnings(job: JobStatus, nodes: Mapping[str, Trouble]) -> Iterator[str]:
    """Yield why a running job is not well: silence, idle GPUs, and the alerts of a few nodes."""
    alerts = [alert.kind for each in job.usage.values() for alert in each.alerts]
    if job.reason:  # the scheduler's, for this state
        yield job.reason
    if quiet := {name: trouble.silent_s for name, trouble in nodes.items() if trouble.silent_s}:
        yield f"{fold_hosts(quiet)}: no sample for {clock(max(quiet.values()))}"
    if text := job_view.silence(job.progress):
        yield f"training: {text}"
    if idle := alerts.count(AlertKind.GPU_IDLE):
        yield f"{idle} of {count(sum(len(each.gpus) for each in job.usage.values()), 'GPU')} idle"
    alerting = [node for node, trouble in nodes.items() if trouble.alerts]
    worst = sorted(alerting, key=nodes.__getitem__, reverse=True)
    for node in worst[:_MOST_DESCRIBED]:
        yield f"{node}: {'; '.join(alert_texts(job.usage[node].alerts, job.usage[node]))}"
    if worst[_MOST_DESCRIBED:]:
        yield f"{count(len(worst) - _MOST_DESCRIBED, 'more node')} with alerts"


def _training(
    job: JobStatus, planned_rate: str, evidence: Evidence, losses: Sequence[float]
) -> Iterator[str]:
    """Yield step, rate (with the one from `planned`), loss, checkpoint, memory and nodes."""
    if job.progress.step is not None:
        done, total = job_view.steps_done(job.progress), job.progress.total
        left = job_view.eta_s(job)
        share = min(1.0, max(0.0, job.progress.step / total)) if total else 0.0
        bar = f"  {share:4.0%} [{('█' * round(share * _WIDE)).ljust(_WIDE)}]" if total else ""
        yield f"step   {done}{bar}{'' if left is None else f' {clock(left)} left'}"
    if text := job_view.rate(job.progress):
        yield f"rate   {text}{planned_rate if job.progress.unit == 'step' else ''}"
    if curve := sparkline(losses):
        yield f"loss   {losses[-1]:.4g}   {losses[0]:.4g} {curve}"
    yield f"saved  {_saved(job, evidence)}"
    yield from (f"{label} {text}" for label, text in job_view.usage_lines(job))
    if not job.pending and (hosts := job_view.where_or_why(job)):
        yield f"nodes  {hosts}"


def planned(record: JobRecord) -> str:
    """Return the rate that `plan` estimates, to print behind the measured one; "" if it can't."""
    with contextlib.suppress(ClusterrunError, OSError, ValueError):
        # Counting the parameters of a model that is not known yet would take seconds.
        if estimated := estimate(question_of(configuration(record), may_count=False)).time:
            return f"   plan: {1 / estimated.step.mid_s:.3g} steps/s"
    return ""


def _saved(job: JobStatus, evidence: Evidence) -> str:
    """Name the newest checkpoint, and what a failure would cost now."""
    name, at, now = (job.checkpoint or "").rstrip("/"), evidence.checkpoint_at, time.time()
    age = "" if at is None else f", {clock(max(0.0, now - at))} ago"
    saved = f"{name.rpartition('/')[2]}{age}" if name else job_view.earlier_checkpoint(job)
    saved = saved or "no checkpoint reported"
    since = at or evidence.started_at
    if job.state is not JobState.RUNNING or since is None:
        return saved
    return f"{saved}; a failure now costs {clock(max(0.0, now - since))}"


def sparkline(values: Sequence[float]) -> str:
    """Draw a curve with a few characters; "" for fewer than two numbers.

    >>> sparkline([3, 2, 1]), sparkline([1])
    ('█▅▁', '')
    """
    known = [value for value in values if math.isfinite(value)]
    size = min(_WIDE, len(known))
    if size < 2:
        return ""
    edges = [len(known) * index // size for index in range(size + 1)]
    means = [fmean(known[edges[index] : edges[index + 1]]) for index in range(size)]
    low, high = min(means), max(means)
    return "".join(_spark(100 * (mean - low) / (high - low or 1.0)) for mean in means)


def _spark(percent: float | None) -> str:
    if percent is None:
        return "·"
    return _SPARKS[round(max(0.0, min(1.0, percent / 100)) * (len(_SPARKS) - 1))]


def _strip(nodes: Mapping[str, Trouble], usage: Mapping[str, Sample], width: int) -> str:
    """Return a cell for each node, or for the worst of several: ! if bad, else how busy it is."""
    cells = ["!" if node.is_bad else _spark(_busy(usage[name])) for name, node in nodes.items()]
    nodes_per_cell = math.ceil(len(cells) / max(1, width))
    starts = range(0, len(cells), nodes_per_cell)
    return "".join(min(cells[n : n + nodes_per_cell]) for n in starts)  # "!" sorts first


def _table(nodes: Mapping[str, Trouble], most: int, usage: Mapping[str, Sample]) -> Table:
    """Return a row for each node; if there are too many, for the worst."""
    names, title = list(nodes), "NODE"
    if len(names) > most:
        title = f"WORST {most} OF {len(names)}"
        names = sorted(names, key=nodes.__getitem__, reverse=True)[:most]
    rows = {name: _row(usage[name]) for name in names}
    columns = [head for head in rows[names[0]] if any(row[head] for row in rows.values())]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(_line(title))  # it shrinks first
    for head in columns:
        table.add_column(head, no_wrap=True, justify="right")
    for name, row in rows.items():
        style = "yellow" if nodes[name].is_bad else ""
        table.add_row(_line(name), *map(row.__getitem__, columns), style=style)
    return table


def _row(sample: Sample) -> dict[str, str]:
    gpus, busy = sample.gpus, _busy(sample)
    memory = max((gpu.memory_percent or 0.0 for gpu in gpus), default=0.0)
    heat = max((gpu.temperature_c or 0 for gpu in gpus), default=0)
    return {
        "GPUS": "".join(_spark(gpu.activity) for gpu in gpus),
        "BUSY": "" if busy is None else f"{busy:.0f} %",
        "GPU MEMORY": f"{memory:.0f} %" if memory else "",
        "TEMP": f"{heat} °C" if heat else "",
        "HOST MEMORY": "" if sample.host_percent is None else f"{sample.host_percent:.0f} %",
        "CPU": "" if sample.cpu is None else f"{sample.cpu:.1f}/{sample.cpus or '?'}",
    }


def _busy(sample: Sample) -> float | None:
    known = [gpu.activity for gpu in sample.gpus if gpu.activity is not None]
    return fmean(known) if known else None


_READ_S: Final = 2.0  # between two readings of the files; the scheduler is asked less often
_TICK_S: Final = 0.25  # in which a new size of the terminal is seen
_COMMANDS: Final = {
    b"l": ("logs",),
    b"e": ("logs", "--errors"),
    b"s": ("diagnose", "--stacks"),
    b"c": ("cancel", "-y", "--checkpoint"),
    b"x": ("cancel", "-y"),
}


def print_screen(job: JobStatus) -> None:
    """Print the screen once; on a terminal, no line is longer than its width."""
    width = output.width_of(sys.stdout)
    console = Console(force_terminal=True, color_system="standard", width=width or 10_000)
    with console.capture() as text:
        console.print(screen(job, planned(job.record), width or 80))  # 80: for cells of nodes
    for line in text.get().splitlines():
        output.answer(line, wraps=False)


def watch(record: JobRecord) -> JobStatus | None:
    """Show a job until it ends; return its status, or None without a terminal. Raises ClickExit."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return None
    for variable in ("COLUMNS", "LINES"):  # with these, rich would not see that the size changes
        os.environ.pop(variable, None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # it would leave the screen on the terminal
    has_colour = output.wants_colour(sys.stdout)
    console = Console(file=sys.stdout, force_terminal=True, no_color=not has_colour)
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            return wait(record, rest=functools.partial(_draw_until_key, live, planned(record)))
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal was closed
            raise
        raise ClickExit(128 + signal.SIGHUP) from error
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _draw_until_key(live: Live, planned_rate: str, job: JobStatus, pause_s: float) -> None:
    """Draw a job and obey keys; return when it is to be drawn again, as for a resized terminal."""
    size = live.console.size
    live.update(screen(job, planned_rate, *size), refresh=True)
    until = time.monotonic() + min(pause_s, _READ_S)
    while time.monotonic() < until and live.console.size == size:
        if not select.select([sys.stdin], [], [], _TICK_S)[0]:
            continue
        key, name = _key(), job.record.job_id or job.record.name
        if key in (b"", b"q", b"\x04"):  # also the end of the input, and Ctrl-D
            live.stop()
            output.note(f"left the screen; job {name} continues")
            raise ClickExit(0)
        if key in _COMMANDS:
            live.stop()
            with contextlib.suppress(KeyboardInterrupt):
                _run(_COMMANDS[key], name, job.record.run_dir)
            live.start()
            return


def _key() -> bytes:
    return os.read(sys.stdin.fileno(), 1).lower()


def _run(command: tuple[str, ...], name: str, run_dir: str) -> None:
    """Run a command about a job, and wait until a person has read what it prints."""
    if command[0] == "cancel":
        output.say(f"Cancel job {name}? Press y to cancel the job, or another key to go back")
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
        if _key() != b"y":
            return
    output.say(f"clusterrun {' '.join(command)} {name}")
    words = module_argv(sys.executable, "clusterrun", *command, run_dir)
    os.spawnv(os.P_WAIT, sys.executable, words)
    output.say("Press a key to go back to the job")
    _key()
