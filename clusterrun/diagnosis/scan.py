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

BEFORE, AFTER = 40, 12  # lines of a process around a sign that `near` and `unless` read
_AROUND: Final = BEFORE + 1 + AFTER
_STEPS_IN_GRACE: Final = 100  # Slurm's KillWait is 30 seconds
_PART: Final = 4  # letters of a literal by which signs are looked up
_MOST_FORMS: Final = 2_000  # of lines, whose possible signs are cached
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
    strays: int = 0  # lines of no traceback, since it began or since it is ignored
    is_chained: bool = False  # the next traceback belongs to the last one
    is_original: bool = False  # this traceback: of another process, raised again by this one
    is_explained: bool = False  # a sign names a cause of this chain
    uncaught: int = 0  # the order of the last exception of this chain that no sign names

    @property
    def line_before(self) -> str:
        """Return the line before the newest; "" if there is none."""
        return self.recent[-2] if len(self.recent) > 1 else ""


@dataclass(kw_only=True)
class _Pending:
    """A sign with conditions on the lines around it: `lines_left` of these are still to come."""

    finding: FoundSign
    sign: Sign
    lines_left: int = AFTER
    fallback: FoundSign | None = None  # is kept if the conditions are not met


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
        self._pending: dict[str, list[_Pending]] = {}
        self._forms: dict[str, tuple[tuple[KnownCause, Sign], ...]] = {}
        self._works: Works[FoundSign] = Works()
        self._teardowns: set[str] = set()  # what any process printed as it ended
        self._signs = [(cause, sign) for cause in table.values() for sign in cause.signs]
        self._literals: dict[str, list[tuple[str, int]]] = defaultdict(list)  # by beginning
        for number, (_, sign) in enumerate(self._signs):
            for literal in map(form_of, sign.text.literals or ("",)):
                beginning = literal[:_PART] if len(literal) >= _PART else ""
                self._literals[beginning].append((literal, number))

    def feed(self, line: PrintedLine) -> None:
        """Take the next line of a log, and find signs and uncaught exceptions in it."""
        self.lines += 1
        if line.rank is not None and len(self.ranks) < _MOST_RANKS:
            self.ranks.add(line.rank)
        process = self._process_of(line.source)
        process.recent = [*process.recent[1 - _AROUND :], line.text]
        self._decide_pending(line.source, at_end=False)  # this line comes after them
        self.trainings[line.file].feed(line)  # signs record how far the training is
        has_sign = self._find_signs(line, process)
        if self._works.left and any(map(line.text.__contains__, WORDS)):
            unnamed = KnownCause(id="")  # `findings` replaces it by a cause of the table
            found = self._new_finding(unnamed, Role.EITHER, line, process)
            self._works.feed(line.text, line.rank, found)
        self._read_traceback(line, process, has_sign=has_sign)

    def _process_of(self, source: str) -> _Process:
        """Return a process; forget the one that was silent the longest if there are too many."""
        process = self._processes.pop(source, None) or _Process()
        self._processes[source] = process  # the newest is the last
        if len(self._processes) > _MOST_PROCESSES:
            silent = next(iter(self._processes))
            self._decide_pending(silent, at_end=True)
            del self._processes[silent]
        return process

    def findings(self) -> list[FoundSign]:
        """Return all findings in order; call it after the last line: it decides pending signs."""
        for source in list(self._pending):
            self._decide_pending(source, at_end=True)
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
        self._keep(self._new_finding(self.table[name], role, line, _Process()))

    def causal(self) -> list[FoundSign]:
        """Return the findings that can be the cause of a failure."""
        return [x for x in self.findings() if x.role in CAUSAL and self._may_have_stopped(x)]

    def _may_have_stopped(self, finding: FoundSign) -> bool:
        """Return whether the training neither continued after the sign nor had ended before it."""
        return not finding.is_after_end and not self._is_passed(finding)

    def leave_out(self, name: str, role: Role) -> None:
        """Forget what was found of a cause in a role."""
        self.findings()  # decides on pending signs: these are forgotten, too
        self._found.pop((name, role), None)

    def _is_passed(self, finding: FoundSign) -> bool:
        """Return whether the training went on; while Slurm ends a job, it may do so for a while."""
        training, needed = self.trainings[finding.line.file], STEPS
        if finding.of_start:
            needed = 1
        elif finding.cause.domain is Domain.POLICY and not training.is_complete:
            needed = _STEPS_IN_GRACE
        return training.steps - finding.steps >= needed

    def _find_signs(self, line: PrintedLine, process: _Process) -> bool:
        """Find signs in a line; return whether any has no conditions and is no noise or advice."""
        has_sign = False
        if process.is_ignored:  # what it prints stopped nothing
            return has_sign
        for cause, sign in self._candidates(line.text):
            is_late = sign.before_steps and self.trainings[line.file].steps
            if is_late or not sign.text.search(line.text):
                continue
            finding = self._new_finding(cause, sign.role, line, process)
            is_of_start = sign.before_steps and sign.role is Role.CONFIRMATION
            finding = dataclasses.replace(finding, of_start=is_of_start, of_victim=sign.of_victim)
            if sign.near or sign.unless:
                pending = _Pending(finding=finding, sign=sign)
                self._pending.setdefault(line.source, []).append(pending)
                continue
            self._keep(finding)
            has_sign |= sign.role not in (Role.NOISE, Role.ADVICE)
            if sign.role is Role.TEARDOWN and len(self._teardowns) < _MOST_KEPT:
                self._teardowns.add(line.text)
            if process.in_traceback and UNCAUGHT in cause.explains and sign.role in CAUSAL:
                # Drop the exceptions that led to this one: its sign says more.
                process.is_explained = True
                for pending in self._pending.get(line.source, ()):
                    pending.fallback = None
                self._drop_uncaught(process)
        return has_sign

    def _drop_uncaught(self, process: _Process) -> None:
        """Drop the last kept exception of the chain of tracebacks, if there is one."""
        if process.uncaught:
            kept = self._found[UNCAUGHT, Role.ROOT]
            kept[:] = [each for each in kept if each.order != process.uncaught]
            process.uncaught = 0

    def _candidates(self, text: str) -> tuple[tuple[KnownCause, Sign], ...]:
        """Return the signs of which the line contains a literal; forms that repeat are cached."""
        form = form_of(text)
        if (known := self._forms.get(form)) is not None:
            return known
        if len(self._forms) >= _MOST_FORMS:
            self._forms.clear()
        # All parts of _PART letters; the last is "", under which shorter literals are listed.
        parts = self._literals.keys() & {form[at : at + _PART] for at in range(len(form) + 1)}
        literals = (each for part in parts for each in self._literals[part])
        found = sorted({number for literal, number in literals if literal in form})
        return self._forms.setdefault(form, tuple(self._signs[number] for number in found))

    def _read_traceback(self, line: PrintedLine, process: _Process, *, has_sign: bool) -> None:
        """Follow tracebacks to the exceptions that end them; `has_sign`: a sign is in the line."""
        text = line.text
        if _IGNORED.match(text):
            process.is_ignored, process.strays = True, 0
        elif "Traceback (most recent call last)" in text and (found := _TRACEBACK.search(text)):
            self._begin_traceback(text[: found.start()], process)
        elif _FRAME.match(text):
            if not process.in_traceback:
                self._begin_traceback("", process)
            process.frames = [*process.frames[-7:], text.strip("│| \t")]  # the last eight
        elif _CHAINED.match(text):
            process.is_ignored, process.strays = process.was_ignored, 0
            process.is_chained = True
        elif text.startswith("╰─") and not process.in_traceback:  # of rich, cut at its beginning
            self._begin_traceback("", process)
        elif text[:1] not in _CONTINUED:
            self._read_other(line, process, has_sign=has_sign)

    def _begin_traceback(self, prefix: str, process: _Process) -> None:
        """Begin a traceback; `prefix` and the line before tell whether it stopped the process."""
        if not process.in_traceback:
            is_still_ignored = process.is_ignored and process.strays <= 1  # at most a line between
            is_caught = bool(_MILD.search(prefix) or _CAUGHT.search(process.line_before))
            process.is_ignored = is_still_ignored or is_caught
        process.in_traceback, process.frames, process.strays = True, [], 0
        process.is_original = prefix.endswith("Original ")
        if not (process.is_chained or process.is_original):
            process.is_explained, process.uncaught = False, 0
        process.is_chained = False

    def _read_other(self, line: PrintedLine, process: _Process, *, has_sign: bool) -> None:
        """Read a line without a traceback's form: the exception that ends one, or any other."""
        text = line.text
        if not (process.in_traceback or process.is_ignored):
            if not has_sign and ": " in text and _BARE.match(text):
                self._keep_uncaught(line, process, Role.CONFIRMATION)  # without a traceback
            return
        is_after_frame = process.line_before[:1] in (" ", "╰")
        is_exception = _EXCEPTION.match(text) or (is_after_frame and _AFTER_FRAME.match(text))
        if is_exception:
            self._read_exception(line, process, has_sign=has_sign)
        process.strays += 1
        if is_exception or process.strays > _MOST_BETWEEN:
            process.was_ignored = process.is_ignored
            process.in_traceback = process.is_ignored = False

    def _read_exception(self, line: PrintedLine, process: _Process, *, has_sign: bool) -> None:
        """Keep the exception of a traceback if it stopped something and no sign names it."""
        exception = hash((line.source, line.text))
        if process.is_ignored and ": " in line.text and len(self._ignored) < _MOST_RANKS:
            self._ignored.add(exception)  # it may be printed again
        is_known = has_sign or process.is_explained or exception in self._ignored
        is_raised = process.in_traceback and not process.is_ignored
        if is_raised and not is_known and not _LOGGED.search(line.text[:40]):  # "WARNING ..."
            self._keep_uncaught(line, process, Role.ROOT)

    def _keep_uncaught(self, line: PrintedLine, process: _Process, role: Role) -> None:
        """Keep an exception; if a sign in its line is pending, only as that sign's fallback."""
        cause = self.table.get(UNCAUGHT)
        if cause is None:
            return
        finding = self._new_finding(cause, role, line, process)
        for pending in self._pending.get(line.source, ()):
            if pending.finding.order == self.lines:  # it is in this line
                pending.fallback = finding
                return
        if process.is_original:  # it says more than the one that wraps it
            self._drop_uncaught(process)
        self._keep(finding)
        process.uncaught = finding.order if role is Role.ROOT else 0

    def _new_finding(
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

    def _decide_pending(self, source: str, *, at_end: bool) -> None:
        """Decide on a process's signs whose AFTER lines have come; `at_end`, on all of them."""
        for pending in self._pending.pop(source, ()):
            if not at_end:
                pending.lines_left -= 1
                if pending.lines_left > 0:
                    self._pending.setdefault(source, []).append(pending)
                    continue
            recent, sign = self._processes[source].recent, pending.sign
            around = "\n".join(recent[pending.lines_left - _AROUND :])  # fewer if some did not come
            is_excluded = sign.unless and sign.unless.search("\n".join((around, *self._teardowns)))
            is_met = not is_excluded and (sign.near is None or sign.near.search(around))
            if kept := pending.finding if is_met else pending.fallback:
                self._keep(kept)

    def _keep(self, finding: FoundSign) -> None:
        """Count a finding, and keep it; beyond _MOST_KEPT, keep only its rank and node."""
        key = (finding.cause.id, finding.role)
        if self._counted.get(finding.cause.id) != finding.order:  # a line counts once per cause
            self.counts[finding.cause.id] += 1
            self._counted[finding.cause.id] = finding.order
        if finding.line.rank in self.ranks:
            self.seen_on.setdefault(key, set()).add(finding.line.rank)
        kept = self._found.setdefault(key, [])
        # If the training went on after a sign, it stopped nothing.
        kept[:] = [each for each in kept if not self._is_passed(each)]
        if len(kept) < _MOST_KEPT:
            kept.append(finding)
            self._more.pop(key, None)  # the training has passed these signs as well
            return
        by_form, form = self._more.setdefault(key, {}), _common_key(finding)
        places = by_form.get(form, set())
        if len(places) < _MOST_RANKS and (places or len(by_form) < _MOST_KEPT):
            by_form.setdefault(form, places).add((finding.line.rank, finding.line.node))

    def more_places(self, finding: FoundSign) -> set[tuple[int | None, str]]:
        """Return ranks and nodes of findings like this one that are not among the kept ones."""
        return self._more.get((finding.cause.id, finding.role), {}).get(_common_key(finding), set())


def _common_key(finding: FoundSign) -> str:
    """Return what findings of its cause have in common; of a generic cause, the text decides."""
    return form_of(finding.line.text) if finding.cause.generic else ""


def form_of(text: str) -> str:
    """Return what all lines that differ in digits and letter case have in common."""
    return text.translate(_DIGITS).lower()
