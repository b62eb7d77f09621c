"""The site's own verdict on a node: a command that its configuration names."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from clusterrun.errors import ClusterrunError, shortened
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, Severity, fail, note, ok, skip
from clusterrun.shared.wording import count

NAME: Final = "node.site"
ADVICE: Final = "tell the administrator, and leave this node out with --exclude"
LETTERS: Final = 200
OUTPUT: Final = 1 << 20  # bytes of each stream that are kept
_MOST: Final = 10_000  # objects of an answer
# DCGM (`dcgmi diag -j`), NVIDIA's health checks and those of sites name them so, in any case.
_STATUSES: Final = frozenset({"status", "result", "health", "state", "verdict", "outcome"})
_FLAGS: Final = frozenset({"healthy", "passed", "success", "ok"})
_NAMES: Final = ("name", "check", "test", "category", "component")
_TEXTS: Final = ("message", "warnings", "warning", "error", "reason", "detail", "details", "info")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORDS: Final = {
    **dict.fromkeys(("pass", "passed", "ok", "healthy", "success", "good"), Severity.OK),
    **dict.fromkeys(("warn", "warning", "degraded"), Severity.NOTE),
    **dict.fromkeys(("fail", "failed", "failure", "error", "unhealthy", "critical"), Severity.FAIL),
}


@dataclass(frozen=True)
class _Verdict:
    status: Severity
    test: str
    text: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.test, self.text)))


def site_verdict(command: str, timeout_s: float) -> Finding:
    """Run the command, without a shell; its exit status and the JSON that it prints decide.

    A command that does not answer in time is killed, and skipped.
    """
    try:
        argv = shlex.split(command)
    except ValueError as error:
        return skip(NAME, f"launch.health_command cannot be read: {error}")
    if not argv:
        return skip(NAME, "the configuration names no launch.health_command")
    program = os.path.basename(argv[0])
    if shell.find(argv[0]) is None:
        hint = "correct launch.health_command, or install it on this node"
        return note(NAME, f"{_line(argv[0])} was not found", hint)
    try:
        done = shell.run_once(argv, timeout_s, most=OUTPUT)
    except ClusterrunError as error:
        return skip(NAME, f"{program} did not start: {_line(str(error.cause))}")
    if done.rc == shell.TIMED_OUT:
        return skip(NAME, f"{program} did not answer within {timeout_s:g} s")
    return _judged(program, done)


def _judged(program: str, done: shell.Completed) -> Finding:
    found = _found(done.stdout)
    if failed := _worst(found, Severity.FAIL):
        return fail(NAME, f"{program}: {failed}", ADVICE)
    if done.rc != 0:
        words = done.stderr if found else f"{done.stdout}\n{done.stderr}"
        first = next((_line(x) for x in words.splitlines() if _line(x)), "no message")
        return fail(NAME, f"{program} exited with status {done.rc}: {first}", ADVICE)
    if warned := _worst(found, Severity.NOTE):
        return note(NAME, f"{program}: {warned}", ADVICE)
    passed = sum(each.status is Severity.OK for each in found)
    return ok(
        NAME,
        f"{program}: {count(passed, 'test')} passed" if passed else f"{program}: exit status 0",
    )


def _worst(found: list[_Verdict], status: Severity) -> str:
    """Return the verdicts of a status in words, those with a reason first."""
    mine = sorted((x for x in found if x.status is status), key=lambda x: not x.text)
    texts = list(dict.fromkeys(filter(None, map(str, mine))))
    if not texts:
        return status.value if mine else ""
    return f"{texts[0]}; {len(texts) - 1} more" if len(texts) > 1 else texts[0]


def _found(text: str) -> list[_Verdict]:
    """Return the verdicts in the JSON that a text is or ends with; none without any."""
    start = re.search(r"^\s*[\[{]", text, re.MULTILINE)
    try:
        data = json.loads(text[start.start() :]) if start else None
        return list(islice(_verdicts(data, "", ""), _MOST))
    except (ValueError, RecursionError):
        return []


def _verdicts(data: Any, test: str, where: str) -> Iterator[_Verdict]:
    """Yield each verdict in an answer of any nesting; an object's name is that of its parts."""
    if isinstance(data, list):
        for each in data:
            yield from _verdicts(each, test, where)
    if not isinstance(data, Mapping):
        return
    fields = {str(key).lower(): value for key, value in data.items()}
    test = next((_line(fields[x]) for x in _NAMES if isinstance(fields.get(x), str)), test)
    where = _entity(fields) or where
    if status := _status(fields):
        label = f"{test} ({where})" if where and test else test or where
        yield _Verdict(status, label, _text([fields[x] for x in _TEXTS if x in fields]))
    for value in data.values():
        yield from _verdicts(value, test, where)


def _status(fields: Mapping[str, Any]) -> Severity | None:
    words = (str(fields[key]).strip().lower() for key in _STATUSES & fields.keys())
    known = [_WORDS[word] for word in words if word in _WORDS]
    flags = [fields[key] for key in _FLAGS & fields.keys() if isinstance(fields[key], bool)]
    known += [Severity.OK if flag else Severity.FAIL for flag in flags]
    return max(known, key=(Severity.OK, Severity.NOTE, Severity.FAIL).index) if known else None


def _entity(fields: Mapping[str, Any]) -> str:
    """Return the GPU that a result of DCGM is about."""
    number = fields.get("gpu_id", fields.get("gpu_ids", fields.get("entity_id")))
    return f"GPU {_line(str(number))}" if isinstance(number, str | int) else ""


def _text(value: Any) -> str:
    """Return the first words in a value of any nesting."""
    if isinstance(value, str):
        return _line(value)
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value, key=lambda key: key not in _TEXTS)]
    return next(filter(None, map(_text, value)), "") if isinstance(value, list) else ""


def _line(text: str) -> str:
    """Return a text of the command as one line that no terminal interprets."""
    words = _COLOUR.sub("", text[: 20 * LETTERS])
    plain = "".join(letter if letter.isprintable() else " " for letter in words)
    return shortened(" ".join(plain.split()), LETTERS)
