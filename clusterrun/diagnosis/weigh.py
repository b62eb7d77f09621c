"""Choose the cause among what was found, and what was its consequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from clusterrun.diagnosis.kinds import INSTALLED, Certainty, Retry
from clusterrun.diagnosis.lines import PrintedLine
from clusterrun.diagnosis.scan import FoundSign, Scanner, form_of
from clusterrun.diagnosis.table import EVERYTHING, LATER, Domain, KnownCause, Role

NAN, DIVERGED, STUCK = "loss_nan", "loss_divergence", "hang_no_timeout"
_EVIDENCE: Final = 5
_NO_CONSEQUENCE: Final = (Role.NOISE, Role.ADVICE, Role.TEARDOWN)


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """A cause's sign that followed from the verdict."""

    cause: KnownCause
    count: int
    ranks: tuple[int, ...]
    first: PrintedLine


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The cause, its evidence (the first line is the first sign of it) and its consequences."""

    cause: KnownCause
    status: Certainty
    evidence: tuple[FoundSign, ...]
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    consequences: tuple[Consequence, ...] = ()
    is_shared: bool = False  # all ranks of the log raised the same exception at the same line

    @property
    def first(self) -> FoundSign:
        """Return the first sign."""
        return self.evidence[0]

    @property
    def frame(self) -> str:
        """Return the innermost frame of the user's code, or of any code; "" if there is none."""
        frames = [frame for each in self.evidence for frame in reversed(each.frames)]
        of_user = [frame for frame in frames if not INSTALLED.search(frame)]
        return (of_user or frames or [""])[0]

    @property
    def retry(self) -> Retry:
        """Return whether another try helps; a cause that is not confirmed leaves it open."""
        if self.cause.repeats is not None:
            would_repeat = self.is_shared or self.cause.repeats.compiled.match(
                self.first.line.text.strip()
            )
            return Retry.NO if would_repeat else self.cause.retry
        return Retry.MAYBE if self.status is Certainty.UNCONFIRMED else self.cause.retry


def verdict_of(scanner: Scanner) -> Verdict | None:
    """Return why a run failed; None if its log shows no cause.

    The cause is the strongest one that no other explains. Later signs of it are evidence; of a
    generic cause, only those with the same text.
    """
    findings, causal = scanner.findings(), scanner.causal()
    unexplained = [x for x in causal if not any(_explains(other, x) for other in causal)]
    chosen = min(unexplained, key=_strength_key, default=None) or by_numbers(scanner)
    if chosen is None:
        return None
    same_cause = [x for x in findings if x.cause.id == chosen.cause.id and x.order >= chosen.order]
    if chosen.cause.generic:
        form = form_of(chosen.line.text)
        same_cause = [each for each in same_cause if form_of(each.line.text) == form]
    of_cause = _of_failed_nodes(chosen, same_cause)
    places = _places(scanner, chosen, of_cause)
    ranks = {rank for rank, _ in places if rank is not None}
    evidence: dict[str, FoundSign] = {}  # the first sign of each form of line
    for each in of_cause:
        evidence.setdefault(form_of(each.line.text.strip()), each)
    status = Certainty.ESTABLISHED
    if chosen.role is Role.CONFIRMATION:
        status = Certainty.UNCONFIRMED
    elif chosen.role is Role.EITHER or chosen.cause.generic:
        status = Certainty.LIKELY
    is_on_all = len(ranks) > 1 and ranks >= scanner.ranks
    raised_at = {each.frames[-1:] for each in of_cause} - {()}
    return Verdict(
        cause=chosen.cause,
        status=status,
        evidence=tuple(evidence.values())[:_EVIDENCE] or (chosen,),  # of `by_numbers`: no sign
        ranks=tuple(sorted(ranks)),
        nodes=tuple(sorted({node for _, node in places if node})),
        consequences=_consequences(scanner, findings, of_cause or [chosen]),
        is_shared=is_on_all and len(raised_at) == 1,
    )


def _places(
    scanner: Scanner, chosen: FoundSign, of_cause: Sequence[FoundSign]
) -> set[tuple[int | None, str]]:
    """Return the ranks and nodes to blame; none for a decision about the whole job."""
    if chosen.cause.domain is Domain.POLICY:
        return set()
    places = {(each.line.rank, each.line.node) for each in of_cause if not each.of_victim}
    return places if chosen.of_victim else places | scanner.more_places(chosen)


def _of_failed_nodes(chosen: FoundSign, found: Sequence[FoundSign]) -> list[FoundSign]:
    """Leave out weak signs on nodes without a strong one: a failed node ends the step on all."""
    limit = _weakness(chosen)  # strong signs are as strong as the chosen one
    named = {each.line.node for each in found if each.line.node}
    nodes = {each.line.node for each in found if each.line.node and _weakness(each) <= limit}
    if not nodes and len(named) == 1:  # only weak signs name a node, but they agree
        return list(found)
    return [each for each in found if _weakness(each) <= limit or each.line.node in {"", *nodes}]


def _explains(other: FoundSign, finding: FoundSign) -> bool:
    """Return whether a finding follows from one of another cause, which is at least as strong."""
    if other.cause.id == finding.cause.id or other.cause.id in finding.cause.explains:
        return False
    explained, is_later = other.cause.explains, finding.order > other.order
    is_named = finding.cause.id in explained
    if finding.cause.domain is Domain.POLICY and other.role is Role.EITHER:
        # The cluster ended the job because it was stuck.
        return is_later or is_named
    if _weakness(other) > _weakness(finding):
        return False
    explains_any = EVERYTHING in explained or (LATER in explained and is_later)
    return is_named or (explains_any and EVERYTHING not in finding.cause.explains)


def _strength_key(finding: FoundSign) -> tuple[int, int]:
    """Return the sorting key: strength, then time. Generic causes and policies are weak roots."""
    cause, weakness = finding.cause, _weakness(finding)
    if finding.role is Role.ROOT and (cause.generic or cause.domain is Domain.POLICY):
        weakness = 1
    return weakness, finding.order


def _weakness(finding: FoundSign) -> int:
    """Return 0 for the strongest role; 1 is for weak roots (`_strength_key`)."""
    return {Role.ROOT: 0, Role.EITHER: 2}.get(finding.role, 3)


def by_numbers(scanner: Scanner) -> FoundSign | None:
    """Return the cause that losses and steps show, for a log in which no message names one."""
    if not scanner.trainings:
        return None
    training = max(scanner.trainings.values(), key=lambda each: each.steps)
    line = training.first_nan or training.last_step
    if line is None or training.is_complete:
        return None
    shown = {
        NAN: training.is_nan or training.is_overflowing,
        DIVERGED: training.is_diverged,
        STUCK: training.is_stuck,
    }
    names = [name for name, is_shown in shown.items() if is_shown]
    cause = scanner.table.get(names[0]) if names else None
    if cause is None:
        return None
    return FoundSign(cause=cause, role=Role.EITHER, line=line, order=0, steps=training.steps)


def _consequences(
    scanner: Scanner, findings: Sequence[FoundSign], of_cause: Sequence[FoundSign]
) -> tuple[Consequence, ...]:
    """Return the first sign of each other cause that is not just another name for this one."""
    cause = of_cause[0].cause
    lines = {each.order for each in of_cause}
    ranks = {each.line.rank for each in of_cause} - {None}
    first: dict[str, FoundSign] = {}
    for each in findings:
        is_same_cause_or_line = each.cause.id == cause.id or each.order in lines
        # A job is ended by one decision of the cluster, which may have two names.
        is_same_decision = {cause.domain, each.cause.domain} == {Domain.POLICY}
        if is_same_cause_or_line or is_same_decision or each.role in _NO_CONSEQUENCE:
            continue
        # A weak sign of the failed rank, or of an unknown one, is about the end of the failed rank.
        is_weak = each.role in (Role.CONFIRMATION, Role.CASCADE)
        may_be_of_failed = bool(ranks) and (each.line.rank is None or each.line.rank in ranks)
        if not (is_weak and may_be_of_failed):
            first.setdefault(each.cause.id, each)
    return tuple(
        Consequence(
            cause=each.cause,
            count=scanner.counts[each.cause.id],
            ranks=tuple(sorted(scanner.seen_on.get((each.cause.id, each.role), ()))),
            first=each.line,
        )
        for each in first.values()
    )
