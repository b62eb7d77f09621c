"""Find the signs of causes in a log, line by line."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from clusterrun.diagnosis.collectives import WORDS, Works
from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.table import CAUSAL, Domain, KnownCause, Role, Sign, Table
from clusterrun.diagnosis.training import STEPS, TrainingLog
from clusterrun.logformat.literals import literals_of

BEFORE, AFTER = 40, 12  # lines of a process around a sign that `near` and `unless` read
_AROUND: Final = BEFORE + 1 + AFTER
_STEPS_IN_GRACE: Final = 100  # Slurm's KillWait is 30 seconds
_PART: Final = 4  # letters of a literal by which signs are looked up
_MOST_FORMS: Final = 2_000
_MOST_KEPT: Final = 64  # findings of a sign
_MOST_RANKS: Final = 50_000
_MOST_PROCESSES: Final = 5_000  # a number before a colon may be a step and no rank
_DIGITS: Final = str.maketrans("123456789", "0" * 9)

UNCAUGHT: Final = "user_code_exception"
_TRACEBACK: Final = re.compile(r"Traceback \(most recent call last\)(?::| [─-]+[╮+])\s*$")
_FRAME: Final = re.compile(r'^\s+File "[^"]+", line \d+, in |^[│|] \S*:\d+ in \S')
_CONTINUED: Final = (" ", "\t", "", "│", "|", "╰", "╭", "+")  # first letters in a traceback
_IGNORED: Final = re.compile(
    r"^Exception ignored |^Error in atexit|^Exception in thread QueueFeeder|^-+ Logging error -+$"
)
_CAUGHT: Final = re.compile(
    r"(?i)\b(?:fail\w{0,12}|errors?|exception|could not|cannot|unable)\b.{0,400}"
    r"\b(?:retry|retrying|falling back|ignored|ignoring|skipped|skipping)\b"
    r"|\bwarn(?:ing)?\b.{0,400}\b(?:fail\w{0,12}|errors?|exception|could not|cannot|unable)\b"
    r"|\bnot (?:available|installed|found)\b.{0,400}"
    r"\b(?:not be enabled|disabled|will be used|using)\b"
)
_MILD: Final = re.compile(r"\b(?:WARN|WARNING|INFO|DEBUG)\b")
_EXCEPTION: Final = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*\w*"
    r"(?:Error|Exception|Exit|Interrupt|Failure|NotFound|Timeout|Expired|Iteration)(?:\(\w+\))?(?::\s.*|:)?$"
)
_AFTER_FRAME: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)+(?:[A-Z]\w*|error)(?::\s.*|:)?$")
_BARE: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): \S")
_CHAINED: Final = re.compile(r"^(?:During handling of the above|The above exception was)")
_MOST_BETWEEN: Final = 20  # lines of other processes in a traceback
_LOGGED: Final = re.compile(r"(?i)\bwarn(?:ing)?\b|\bretry(?:ing)?\b")


@dataclass(frozen=True, kw_only=True)
class FoundSign:
    """A sign that was found."""

    cause: KnownCause
    role: Role
    line: PrintedLine
    order: int  # the number of the line among all
    steps: int = 0  # how far the training of its file was
    is_after_end: bool = False
    of_start: bool = False  # a hint at a failed start, which the first step refutes
    frames: tuple[str, ...] = ()  # of its traceback
    of_victim: bool = False  # its rank only noticed it


@dataclass(kw_only=True, slots=True)
class _Process:
    """The last lines of a process, and the traceback that it is printing."""

    recent: list[str] = field(default_factory=list)  # the newest line included
    frames: list[str] = field(default_factory=list)
    in_traceback: bool = False
    is_ignored: bool = False  # this traceback, or what is printed, stopped nothing
    was_ignored: bool = False  # the last traceback
    others: int = 0  # lines since its last frame, or since it is ignored, that are no traceback's
    is_chained: bool = False  # the next traceback belongs to the last one
    is_original: bool = False  # this traceback: of another process, raised again by this one
    is_explained: bool = False  # a sign names a cause of this chain
    uncaught: int = 0  # the order of the last exception of this chain that no sign names

    @property
    def line_before(self) -> str:
        """Return the line before the newest; "" if there is none."""
        return self.recent[-2] if len(self.recent) > 1 else ""


@dataclass(kw_only=True)
class _Waiting:
    """A sign of which `left` lines after it are still to come; `otherwise` is kept if it fails."""

    finding: FoundSign
    sign: Sign
    left: int = AFTER
    otherwise: FoundSign | None = None


class Scanner:
    """Collects the findings of one run's logs."""

    def __init__(self, *, table: Table, ranks: Iterable[int] = ()) -> None:
        self.table, self.lines = table, 0
        self.ranks = set(ranks)  # those of the run, or that printed a line
        self.trainings: dict[str, TrainingLog] = defaultdict(TrainingLog)  # by file
        self.counts: Counter[str] = Counter()  # lines with a sign of each cause
        self.seen_on: dict[tuple[str, Role], set[int]] = {}
        self._found: dict[tuple[str, Role], list[FoundSign]] = {}
        # Ranks and nodes of findings that are not kept, by what findings have in common.
        self._more: dict[tuple[str, Role], dict[str, set[tuple[int | None, str]]]] = {}
        self._counted: dict[str, int] = {}  # the newest line of each cause
        self._processes: dict[str, _Process] = {}
        self._ignored: set[int] = set()  # exceptions that stopped nothing
        self._waiting: dict[str, list[_Waiting]] = {}
        self._forms: dict[str, tuple[tuple[KnownCause, Sign], ...]] = {}
        self._works: Works[FoundSign] = Works()
        self._left: set[str] = set()  # what any process printed as it left
        self._signs = [(cause, sign) for cause in table.values() for sign in cause.signs]
        self._literals: dict[str, list[tuple[str, int]]] = defaultdict(list)  # by beginning
        for number, (_, sign) in enumerate(self._signs):
            for literal in map(form_of, literals_of(sign.text) or ("",)):
                part = literal[:_PART] if len(literal) >= _PART else ""
                self._literals[part].append((literal, number))

    def feed(self, line: PrintedLine) -> None:
        """Take the next line."""
        self.lines += 1
        if line.rank is not None and len(self.ranks) < _MOST_RANKS:
            self.ranks.add(line.rank)
        process = self._process_of(line.source)
        process.recent = [*process.recent[1 - _AROUND :], line.text]
        self._settle(line.source, at_end=False)
        self.trainings[line.file].feed(line)
        is_matched = self._match(line, process)
        if self._works.left and any(map(line.text.__contains__, WORDS)):
            found = self._finding(KnownCause(id=""), Role.EITHER, line, process)  # see `findings`
            self._works.feed(line.text, line.rank, found)
        self._read_traceback(line, process, is_matched=is_matched)

    def _process_of(self, source: str) -> _Process:
        """Return a process; forget the one that was silent the longest if there are too many."""
        process = self._processes.pop(source, None) or _Process()
        self._processes[source] = process
        if len(self._processes) > _MOST_PROCESSES:
            silent = next(iter(self._processes))
            self._settle(silent, at_end=True)
            del self._processes[silent]
        return process

    def findings(self) -> list[FoundSign]:
        """Return what was found, in order; call it when all lines were fed."""
        for source in list(self._waiting):
            self._settle(source, at_end=True)
        found = [finding for kept in self._found.values() for finding in kept]
        found += [
            dataclasses.replace(finding, cause=self.table[name])
            for name, finding in self._works.conclusions()
            if name in self.table
        ]
        return sorted(found, key=lambda each: each.order)

    def add(self, name: str, role: Role, line: PrintedLine) -> None:
        """Add a sign that is in no log, such as a job's state."""
        self.lines += 1
        self._keep(self._finding(self.table[name], role, line, _Process()))

    def causal(self) -> list[FoundSign]:
        """Return what can be a cause: lasting, or with no end before it and no steps after it."""
        return [
            each
            for each in self.findings()
            if each.role in CAUSAL
            and (each.cause.lasting or not (each.is_after_end or self._is_passed(each)))
        ]

    def leave_out(self, name: str, role: Role) -> None:
        """Forget what was found of a cause in a role."""
        self.findings()  # what waits for its surroundings, too
        self._found.pop((name, role), None)

    def _is_passed(self, finding: FoundSign) -> bool:
        """Return whether the training went on; while Slurm ends a job, it may for a while."""
        training, needed = self.trainings[finding.line.file], STEPS
        if finding.of_start:
            needed = 1
        elif finding.cause.domain is Domain.POLICY and not training.is_complete:
            needed = _STEPS_IN_GRACE
        return training.steps - finding.steps >= needed

    def _match(self, line: PrintedLine, process: _Process) -> bool:
        """Find signs in a line; return whether any has no conditions, and is no noise or advice."""
        is_matched = False
        if process.is_ignored:
            return is_matched
        for cause, sign in self._candidates(line.text):
            is_late = sign.before_steps and self.trainings[line.file].steps
            if is_late or not sign.text.search(line.text):
                continue
            finding = self._finding(cause, sign.role, line, process)
            is_of_start = sign.before_steps and sign.role is Role.CONFIRMATION
            finding = dataclasses.replace(finding, of_start=is_of_start, of_victim=sign.of_victim)
            if sign.near or sign.unless:
                waiting = _Waiting(finding=finding, sign=sign)
                self._waiting.setdefault(line.source, []).append(waiting)
                continue
            self._keep(finding)
            is_matched |= sign.role not in (Role.NOISE, Role.ADVICE)
            if sign.role is Role.TEARDOWN and len(self._left) < _MOST_KEPT:
                self._left.add(line.text)
            if process.in_traceback and UNCAUGHT in cause.explains and sign.role in CAUSAL:
                # Take back the exceptions that led to this one: its sign says more.
                process.is_explained = True
                for waiting in self._waiting.get(line.source, ()):
                    waiting.otherwise = None
                self._take_back(process)
        return is_matched

    def _take_back(self, process: _Process) -> None:
        """Drop the last exception of the chain."""
        if process.uncaught:
            kept = self._found[UNCAUGHT, Role.ROOT]
            kept[:] = [each for each in kept if each.order != process.uncaught]
            process.uncaught = 0

    def _candidates(self, text: str) -> tuple[tuple[KnownCause, Sign], ...]:
        """Return the signs that a line of this form may have; lines that repeat cost nothing."""
        form = form_of(text)
        if (known := self._forms.get(form)) is not None:
            return known
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        # The last part is "", which stands for literals of fewer than _PART letters.
        parts = self._literals.keys() & {form[at : at + _PART] for at in range(len(form) + 1)}
        near = (each for part in parts for each in self._literals[part])
        found = sorted({number for literal, number in near if literal in form})
        return self._forms.setdefault(form, tuple(self._signs[number] for number in found))

    def _read_traceback(self, line: PrintedLine, process: _Process, *, is_matched: bool) -> None:
        """Follow the tracebacks that a process prints, and find the exceptions that end them."""
        text = line.text
        if _IGNORED.match(text):
            process.is_ignored, process.others = True, 0
        elif "Traceback (most recent call last)" in text and (found := _TRACEBACK.search(text)):
            self._begin_traceback(text[: found.start()], process)
        elif _FRAME.match(text):
            if not process.in_traceback:
                self._begin_traceback("", process)
            process.frames = [*process.frames[-7:], text.strip("│| \t")]  # the last eight
        elif _CHAINED.match(text):
            process.is_ignored, process.others = process.was_ignored, 0
            process.is_chained = True
        elif text.startswith("╰─") and not process.in_traceback:  # of rich, cut at its beginning
            self._begin_traceback("", process)
        elif text[:1] not in _CONTINUED:
            self._end_traceback(line, process, is_matched=is_matched)

    def _begin_traceback(self, prefix: str, process: _Process) -> None:
        """Begin a traceback; `prefix` and the line before tell whether it stopped the process."""
        if not process.in_traceback:
            is_still_ignored = process.is_ignored and process.others <= 1  # at most a line between
            is_caught = bool(_MILD.search(prefix) or _CAUGHT.search(process.line_before))
            process.is_ignored = is_still_ignored or is_caught
        process.in_traceback, process.frames, process.others = True, [], 0
        process.is_original = prefix.endswith("Original ")
        if not (process.is_chained or process.is_original):
            process.is_explained, process.uncaught = False, 0
        process.is_chained = False

    def _end_traceback(self, line: PrintedLine, process: _Process, *, is_matched: bool) -> None:
        """Take a line that has no form of a traceback's: an exception, or another line."""
        text = line.text
        if not (process.in_traceback or process.is_ignored):
            if not is_matched and ": " in text and _BARE.match(text):
                self._keep_uncaught(line, process, Role.CONFIRMATION)  # without a traceback
            return
        is_after_frame = process.line_before[:1] in (" ", "╰")
        is_exception = _EXCEPTION.match(text) or (is_after_frame and _AFTER_FRAME.match(text))
        if is_exception:
            self._take_exception(line, process, is_matched=is_matched)
        process.others += 1
        if is_exception or process.others > _MOST_BETWEEN:
            process.was_ignored = process.is_ignored
            process.in_traceback = process.is_ignored = False

    def _take_exception(self, line: PrintedLine, process: _Process, *, is_matched: bool) -> None:
        """Keep the exception of a traceback if it stopped something and no sign names it."""
        exception = hash((line.source, line.text))
        if process.is_ignored and ": " in line.text and len(self._ignored) < _MOST_RANKS:
            self._ignored.add(exception)
        is_known = is_matched or process.is_explained or exception in self._ignored
        is_raised = process.in_traceback and not process.is_ignored
        if is_raised and not is_known and not _LOGGED.search(line.text[:40]):  # "WARNING ..."
            self._keep_uncaught(line, process, Role.ROOT)

    def _keep_uncaught(self, line: PrintedLine, process: _Process, role: Role) -> None:
        """Keep an exception; while a sign in its line waits, only in case that the sign fails."""
        cause = self.table.get(UNCAUGHT)
        if cause is None:
            return
        finding = self._finding(cause, role, line, process)
        for each in self._waiting.get(line.source, ()):
            if each.finding.order == self.lines:
                each.otherwise = finding
                return
        if process.is_original:  # it says more than the one that wraps it
            self._take_back(process)
        self._keep(finding)
        process.uncaught = finding.order if role is Role.ROOT else 0

    def _finding(
        self, cause: KnownCause, role: Role, line: PrintedLine, process: _Process
    ) -> FoundSign:
        """Return a sign in the newest line, with how far its training and its traceback are."""
        return FoundSign(
            cause=cause,
            role=role,
            line=line,
            order=self.lines,
            steps=self.trainings[line.file].steps,
            is_after_end=self.trainings[line.file].is_complete,
            frames=tuple(process.frames) if process.in_traceback else (),
        )

    def _settle(self, source: str, *, at_end: bool) -> None:
        """Decide on signs whose surroundings are complete: after another line, or `at_end`."""
        for each in self._waiting.pop(source, ()):
            if not at_end:
                each.left -= 1
                if each.left > 0:
                    self._waiting.setdefault(source, []).append(each)
                    continue
            recent, sign = self._processes[source].recent, each.sign
            text = "\n".join(recent[each.left - _AROUND :])  # `left` lines after it did not come
            is_other = sign.unless and sign.unless.search("\n".join((text, *self._left)))
            is_fit = not is_other and (sign.near is None or sign.near.search(text))
            if kept := each.finding if is_fit else each.otherwise:
                self._keep(kept)

    def _keep(self, finding: FoundSign) -> None:
        """Count a finding, and keep it; beyond _MOST_KEPT, keep only its rank and node."""
        key = (finding.cause.id, finding.role)
        if self._counted.get(finding.cause.id) != finding.order:  # several signs of one line
            self.counts[finding.cause.id] += 1
            self._counted[finding.cause.id] = finding.order
        if finding.line.rank in self.ranks:
            self.seen_on.setdefault(key, set()).add(finding.line.rank)
        kept = self._found.setdefault(key, [])
        if not finding.cause.lasting:  # the training went on: it stopped nothing
            kept[:] = [each for each in kept if not self._is_passed(each)]
        if len(kept) < _MOST_KEPT:
            kept.append(finding)
            self._more.pop(key, None)  # the training has passed these signs as well
            return
        more, like = self._more.setdefault(key, {}), _like(finding)
        places = more.get(like, set())
        if len(places) < _MOST_RANKS and (places or len(more) < _MOST_KEPT):
            more.setdefault(like, places).add((finding.line.rank, finding.line.node))

    def more_places(self, finding: FoundSign) -> set[tuple[int | None, str]]:
        """Return ranks and nodes of findings like this one that are not among the kept ones."""
        return self._more.get((finding.cause.id, finding.role), {}).get(_like(finding), set())


def _like(finding: FoundSign) -> str:
    """Return what findings of its cause have in common; of a generic cause, the text decides."""
    return form_of(finding.line.text) if finding.cause.generic else ""


def form_of(text: str) -> str:
    """Return what all lines that differ in digits and letter case have in common."""
    return text.translate(_DIGITS).lower()
