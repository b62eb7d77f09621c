"""What the files of a run say about how it stands, without asking a scheduler."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.end import read_end
from clusterrun.node.endings import Cause
from clusterrun.paths import RunPaths
from clusterrun.state import JobState
from clusterrun.symptoms import TRACEBACK, Classifier

HEAD_BYTES = 256 * 1024  # started, rendezvous, world_ready: they name all nodes, thousands perhaps
SAID = "clusterrun: "  # how our scripts and agents begin a line that the user is to read
_DECIDED = re.compile(r"attempt \d+: [a-z]+: ")
_WENT_ON = re.compile(SAID + r"(attempt \d+: (relaunch|requeue|successor): |job \S+ goes on with )")
UNHEARD = "no rank had asked runtime.should_checkpoint() when all were to save"
TAIL_BYTES = 64 * 1024  # the last steps, failures, the end


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure that any node reported; being cancelled is none."""

    node: str
    rank: int | None
    code: int | None
    signal: int | None
    message: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the training is; None is what it did not say."""

    step: int | None = None
    total: int | None = None
    rate_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the nodes of the newest attempt wrote; times are seconds of the epoch.

    `unsaved` says what kept the attempt from saving, where it has not saved since.
    """

    attempt: int
    started_at: float | None = None
    nodes: tuple[str, ...] = ()
    world_size: int | None = None
    progress: Progress = Progress()
    checkpoint: str | None = None
    checkpoint_at: float | None = None
    unsaved: str = ""
    failure: Failure | None = None


def read_evidence(paths: RunPaths) -> Evidence:
    """Read the events of the newest attempt: the head and the tail of each node's file."""
    attempt = paths.newest_attempt()
    events = [event for event in _events(paths.events_dir) if event.get("attempt") == attempt]
    events.sort(key=_time)
    starts = [event for event in events if event.get("type") == "started"]
    worlds = [event for event in events if event.get("type") == "world_ready"]
    saves = [event for event in events if event.get("type") == "checkpoint"]
    return Evidence(
        attempt=attempt,
        started_at=_time(starts[0]) if starts else None,
        nodes=tuple(str(event.get("host") or event.get("node")) for event in starts),
        world_size=_whole(worlds[-1].get("world_size")) if worlds else None,
        progress=_progress([event for event in events if event.get("type") == "step"]),
        checkpoint=str(saves[-1].get("path")) if saves else None,
        checkpoint_at=_time(saves[-1]) if saves else None,
        unsaved=_unsaved(events),
        failure=_failure(events) or _failure_before_events(paths),
    )


def _failure_before_events(paths: RunPaths) -> Failure | None:
    """Find why a run failed before an agent could write: in what its last attempt printed."""
    end = read_end(paths)
    if end is None or end.state is not JobState.FAILED:
        return None
    try:
        lines = _ends(paths.batch_output).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    last = [n for n, line in enumerate(lines) if _WENT_ON.match(line)]
    message = _reason_in(lines[last[-1] + 1 :] if last else lines)
    if not message:
        return None
    return Failure(node="", rank=None, code=end.exit_code, signal=None, message=message)


def _reason_in(lines: list[str]) -> str:
    """Choose the line that says why; what was decided upon it says less."""
    said = [line.removeprefix(SAID) for line in lines if line.startswith(SAID)]
    classifier = Classifier()
    errors = [
        line
        for line in lines
        if not line.startswith((SAID, "srun: ", "slurmstepd: "))
        and classifier.classify("", line.encode()) not in ("", TRACEBACK)
    ]
    reasons = [line for line in said if not _DECIDED.match(line)]
    return next((found[-1] for found in (reasons, errors, said) if found), "")


def _events(directory: Path) -> Iterator[dict[str, Any]]:
    try:
        files = sorted(directory.glob("*.jsonl"))
    except OSError:
        return
    for file in files:
        for line in _ends(file).split(b"\n"):
            event = _parsed(line)
            if event is not None:
                yield event


def _ends(file: Path) -> bytes:
    """Read the first and the last part of a file, whole lines only."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size <= HEAD_BYTES + TAIL_BYTES:
                return stream.read()
            head = stream.read(HEAD_BYTES)
            stream.seek(size - TAIL_BYTES)
            tail = stream.read()
    except OSError:
        return b""
    return head.rpartition(b"\n")[0] + b"\n" + tail.partition(b"\n")[2]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Read one event; a line that is still being written is none yet."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("ts"), (int, float)) else None


def _time(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _progress(steps: list[dict[str, Any]]) -> Progress:
    if not steps:
        return Progress()
    first, last = steps[0], steps[-1]
    step, before = _whole(last.get("step")), _whole(first.get("step"))
    spent_s = _time(last) - _time(first)
    rate = None
    if step is not None and before is not None and step > before and spent_s > 0:
        rate = (step - before) / spent_s
    return Progress(step=step, total=_whole(last.get("total")), rate_per_s=rate)


def _unsaved(events: list[dict[str, Any]]) -> str:
    newest: dict[str, Any] = {}
    for event in events:
        if event.get("type") in ("checkpoint", "unsaved", "interrupted"):
            newest = event
    if newest.get("type") == "unsaved":
        return f"step {newest.get('step')} was not saved: {newest.get('reason')}"
    if newest.get("type") == "interrupted" and newest.get("heard") is False:
        return UNHEARD
    return ""  # there is a checkpoint, or the ranks have been asked for one


def _failure(events: list[dict[str, Any]]) -> Failure | None:
    for event in events:
        if event.get("type") == "failed" and event.get("cause") != Cause.CANCELLED.value:
            return Failure(
                node=str(event.get("node", "")),
                rank=_whole(event.get("rank")),
                code=_whole(event.get("code")),
                signal=_whole(event.get("signal")),
                message=str(event.get("message") or event.get("cause") or ""),
            )
    return None
