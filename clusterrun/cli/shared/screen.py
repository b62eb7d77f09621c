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
from typing import Final

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
from clusterrun.shared.durations import clock
from clusterrun.shared.hostlist import fold_hosts, natural_key
from clusterrun.shared.own_modules import module_argv
from clusterrun.shared.state import JobState
from clusterrun.shared.wording import count
from clusterrun.verbs.find import configuration
from clusterrun.verbs.status import wait

_KEYS: Final = "[l]ogs [e]rrors [s]tacks [c]heckpoint and end [x] cancel [q]uit"
_MANY: Final = 32  # more nodes have a cell each, and only the worst have rows
_WORST: Final = 20
_ALERTS: Final = 2  # nodes whose alerts are described
_READ_LINES: Final = 100
_LOG_LINES: Final = 3  # for which the rows of nodes leave room
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_WIDE: Final = 24  # a curve, and a bar

Badness = tuple[float, int, float]  # seconds of silence, alerts, percent of the fullest memory


def screen(job: JobStatus, plan: str, width: int, height: int | None = None) -> Group:
    """Return what to print, safe for any terminal; without a height, all of it.

    Rows of nodes and the newest log lines share what is left of the height.
    """
    job, seen = job if job.usage else with_usage(job), read_evidence(job.record.paths)
    late = silent(job.usage, time.time()) if job.state is JobState.RUNNING else {}
    nodes = {
        name: (late.get(name, 0.0), len(job.usage[name].alerts), job.usage[name].fullest_percent)
        for name in sorted(job.usage, key=natural_key)
    }
    logs = _last_lines(job.record, seen.attempt)
    curve = seen.losses or [float(loss) for line in logs for loss in losses_in(line)]
    lines = [_line(_head(job), "bold"), *_answers(job, nodes)]
    lines += map(_line, _training(job, plan, seen, curve))
    if len(nodes) > _MANY:
        lines.append(_line(_strip(nodes, job.usage, width)))
    room = len(nodes) + 8  # without a height
    if height is not None:
        room = max(0, height - len(lines) - 2)  # the head of the table, the keys
    most = _WORST if len(nodes) > _MANY else len(nodes)
    most = min(most, max(0, room - min(_LOG_LINES, len(logs))))
    logs = logs[max(0, len(logs) - room + most) :]
    keys = [_line(_KEYS, "dim")] * (height is not None)
    tables = [_table(nodes, most, job.usage)] if most else []
    return Group(*lines, *tables, *map(_line, logs), *keys)


def _line(text: str, style: str = "") -> Text:
    """Return a line that no terminal obeys or wraps."""
    plain = strip_controls(text.expandtabs(), keep_colours=False)
    safe = "".join(letter if letter.isprintable() else " " for letter in plain)
    return Text(safe, style, no_wrap=True, overflow="ellipsis")


def _last_lines(record: JobRecord, attempt: int) -> list[str]:
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
    attempt = f"attempt {job.attempt}" * (job.attempt > 1)
    world = f"{count(job.record.nodes, 'node')} x {count(job.record.procs_per_node, 'rank')}"
    parts = (job.record.name, job.state.value, spent, attempt, world)
    return "  ".join(filter(None, (f"job {job.record.job_id or '-'}", *parts)))


def _answers(job: JobStatus, nodes: Mapping[str, Badness]) -> list[Text]:
    """Say what is wrong, else that nothing is."""
    runs = job.state is JobState.RUNNING
    wrong = [job_view.failure_text(job.failure)] if job.failure else []
    wrong += [*(each.text for each in job.suspicions), *job.notes]
    wrong += _warnings(job, nodes) if runs else ()
    if wrong:
        return [_line(text, "yellow" if runs else "red") for text in wrong]
    if runs and (nodes or job.progress.step is not None):
        return [_line("all well", "green")]
    return [_line(job_view.activity(job), "yellow")]


def _warnings(job: JobStatus, nodes: Mapping[str, Badness]) -> Iterator[str]:
    alerts = [alert.kind for each in job.usage.values() for alert in each.alerts]
    if job.reason:
        yield job.reason
    if late := {node: bad[0] for node, bad in nodes.items() if bad[0]}:
        yield f"{fold_hosts(late)}: no sample for {clock(max(late.values()))}"
    if text := job_view.silence(job.progress):
        yield f"training: {text}"
    if idle := alerts.count(AlertKind.GPU_IDLE):
        yield f"{idle} of {count(sum(len(each.gpus) for each in job.usage.values()), 'GPU')} idle"
    worst = sorted((node for node in nodes if nodes[node][1]), key=nodes.__getitem__, reverse=True)
    for node in worst[:_ALERTS]:
        yield f"{node}: {'; '.join(alert_texts(job.usage[node].alerts, job.usage[node]))}"
    if worst[_ALERTS:]:
        yield f"{count(len(worst) - _ALERTS, 'more node')} with alerts"


# The training


def _training(job: JobStatus, plan: str, seen: Evidence, losses: Sequence[float]) -> Iterator[str]:
    if job.progress.step is not None:
        done, total = job_view.steps_done(job.progress), job.progress.total
        left = job_view.eta_s(job)
        share = min(1.0, max(0.0, job.progress.step / total)) if total else 0.0
        bar = f"  {share:4.0%} [{('█' * round(share * _WIDE)).ljust(_WIDE)}]" if total else ""
        yield f"step   {done}{bar}{'' if left is None else f' {clock(left)} left'}"
    if text := job_view.rate(job.progress):
        yield f"rate   {text}{plan * (job.progress.unit == 'step')}"
    if curve := sparkline(losses):
        yield f"loss   {losses[-1]:.4g}   {losses[0]:.4g} {curve}"
    yield f"saved  {_saved(job, seen)}"
    yield from (f"{label} {text}" for label, text in job_view.usage_lines(job))
    if not job.pending and (hosts := job_view.where_or_why(job)):
        yield f"nodes  {hosts}"


def planned(record: JobRecord) -> str:
    """Return the rate that `plan` estimates, if it can."""
    with contextlib.suppress(ClusterrunError, OSError, ValueError):
        if planned := estimate(question_of(configuration(record), may_count=False)).time:
            return f"   plan: {1 / planned.step.mid_s:.3g} steps/s"
    return ""


def _saved(job: JobStatus, seen: Evidence) -> str:
    """Name the newest checkpoint, and what a failure would cost now."""
    name, at, now = (job.checkpoint or "").rstrip("/"), seen.checkpoint_at, time.time()
    age = "" if at is None else f", {clock(max(0.0, now - at))} ago"
    saved = f"{name.rpartition('/')[2]}{age}" if name else job_view.earlier_checkpoint(job)
    saved = saved or "no checkpoint reported"
    since = at or seen.started_at
    if job.state is not JobState.RUNNING or since is None:
        return saved
    return f"{saved}; a failure now costs {clock(max(0.0, now - since))}"


def sparkline(values: Sequence[float]) -> str:
    """Draw a curve of a few letters; "" for fewer than two numbers.

    >>> sparkline([3, 2, 1]), sparkline([1])
    ('█▅▁', '')
    """
    known = [value for value in values if math.isfinite(value)]
    size = min(_WIDE, len(known))
    edges = [len(known) * place // max(1, size) for place in range(size + 1)]
    means = [fmean(known[edges[place] : edges[place + 1]]) for place in range(size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join(_spark(100 * (mean - low) / (high - low or 1.0)) for mean in means) * (size > 1)


def _spark(percent: float | None) -> str:
    if percent is None:
        return "·"
    return _SPARKS[round(max(0.0, min(1.0, percent / 100)) * (len(_SPARKS) - 1))]


# The nodes


def _strip(nodes: Mapping[str, Badness], usage: Mapping[str, Sample], width: int) -> str:
    """Return a cell for each node, or for the worst of a few: ! is bad, else how busy it is."""
    cells = ["!" if any(bad[:2]) else _spark(_busy(usage[name])) for name, bad in nodes.items()]
    each = math.ceil(len(cells) / max(1, width))
    return "".join(min(cells[n : n + each]) for n in range(0, len(cells), each))


def _table(nodes: Mapping[str, Badness], most: int, usage: Mapping[str, Sample]) -> Table:
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
        style = "yellow" if any(nodes[name][:2]) else ""
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
        console.print(screen(job, planned(job.record), width or 80))
    for line in text.get().splitlines():
        output.answer(line, wraps=False)


def watch(record: JobRecord) -> JobStatus | None:
    """Show a job until it ends, and return its last status; None if there is no terminal.

    The terminal is as before afterwards. Raises ClickExit if a person quits.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return None
    for variable in ("COLUMNS", "LINES"):  # a terminal may change its size
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
            return wait(record, rest=functools.partial(_rest, live, planned(record)))
    except OSError as error:
        if error.errno != errno.EIO:  # the terminal was closed
            raise
        raise ClickExit(128 + signal.SIGHUP) from error
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _rest(live: Live, plan: str, job: JobStatus, pause_s: float) -> None:
    """Draw a job, and wait for a key; return early if the terminal has another size."""
    size = live.console.size
    live.update(screen(job, plan, *size), refresh=True)
    until = time.monotonic() + min(pause_s, _READ_S)
    while time.monotonic() < until and live.console.size == size:
        if not select.select([sys.stdin], [], [], _TICK_S)[0]:
            continue
        key, name = _key(), job.record.job_id or job.record.name
        if key in (b"", b"q", b"\x04"):
            live.stop()
            output.note(f"job {name} was not cancelled")
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
        output.say(f"Cancel job {name}? Press y to cancel it, any other key to go back")
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
        if _key() != b"y":
            return
    output.say(f"clusterrun {' '.join(command)} {name}")
    words = module_argv(sys.executable, "clusterrun", *command, run_dir)
    os.spawnv(os.P_WAIT, sys.executable, words)
    output.say("Press a key to go back to the job")
    _key()
