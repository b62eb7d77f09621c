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
    """The cause, its evidence (the first line is the first sign of it) and its consequences.

    `is_shared`: all ranks of the log raised the same exception, at the same line.
    """

    cause: KnownCause
    status: Certainty
    evidence: tuple[FoundSign, ...]
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    consequences: tuple[Consequence, ...] = ()
    is_shared: bool = False

    @property
    def first(self) -> FoundSign:
        """Return the first sign."""
        return self.evidence[0]

    @property
    def frame(self) -> str:
        """Return the last frame in the user's code, or the last frame, or ""."""
        frames = [frame for each in self.evidence for frame in reversed(each.frames)]
        own = (frame for frame in frames if not INSTALLED.search(frame))
        return next(own, "") or next(iter(frames), "")

    @property
    def retry(self) -> Retry:
        """Return whether another try helps; a cause that is not confirmed leaves it open."""
        if self.cause.repeats is not None:
            is_same = self.cause.repeats.match(self.first.line.text.strip())
            return Retry.NO if is_same or self.is_shared else self.cause.retry
        return Retry.MAYBE if self.status is Certainty.UNCONFIRMED else self.cause.retry


def verdict_of(scanner: Scanner) -> Verdict | None:
    """Return why a run failed; None if its log shows no cause."""
    findings = scanner.findings()
    causal = scanner.causal()  # the first sign of the strongest cause that no other explains
    left = [each for each in causal if not any(_explains(other, each) for other in causal)]
    chosen = min(left, key=_order, default=None) or by_numbers(scanner)
    if chosen is None:
        return None
    # Of a generic cause, only the like of a finding support it.
    form = form_of(chosen.line.text) if chosen.cause.generic else ""
    later = [x for x in findings if x.cause.id == chosen.cause.id and x.order >= chosen.order]
    own = [each for each in later if not form or form_of(each.line.text) == form]
    of_cause = _of_its_nodes(chosen, own)
    # A decision about the whole job began on no rank and no node.
    blamed = [each for each in of_cause if not each.of_victim]
    places = {(each.line.rank, each.line.node) for each in blamed}
    if not chosen.of_victim:
        places |= scanner.more_places(chosen)
    if chosen.cause.domain is Domain.POLICY:
        places = set()
    evidence: dict[str, FoundSign] = {}
    for each in of_cause:
        evidence.setdefault(form_of(each.line.text.strip()), each)
    ranks = {rank for rank, _ in places if rank is not None}
    is_weak = chosen.role is Role.EITHER or chosen.cause.generic
    status = Certainty.LIKELY if is_weak else Certainty.ESTABLISHED
    raised_at = {each.frames[-1:] for each in of_cause}
    return Verdict(
        cause=chosen.cause,
        status=Certainty.UNCONFIRMED if chosen.role is Role.CONFIRMATION else status,
        evidence=tuple(evidence.values())[:_EVIDENCE] or (chosen,),
        ranks=tuple(sorted(ranks)),
        nodes=tuple(sorted({node for _, node in places if node})),
        consequences=_consequences(scanner, findings, of_cause or [chosen]),
        is_shared=len(ranks) > 1 and ranks >= scanner.ranks and len(raised_at - {()}) == 1,
    )


def _of_its_nodes(chosen: FoundSign, found: Sequence[FoundSign]) -> list[FoundSign]:
    """Leave out weaker signs on other nodes: a step is killed on all nodes for the sake of one."""
    most = _weakness(chosen)
    own = {each.line.node for each in found if each.line.node and _weakness(each) <= most}
    named = own or {each.line.node for each in found if each.line.node}
    allowed = {"", *named} if own or len(named) == 1 else {""}
    return [each for each in found if _weakness(each) <= most or each.line.node in allowed]


def _explains(other: FoundSign, finding: FoundSign) -> bool:
    """Return whether a finding follows from one of another cause, which is at least as strong."""
    if other.cause.id == finding.cause.id:
        return False
    names, own = other.cause.explains, finding.cause.explains
    is_later = finding.order > other.order
    if finding.cause.domain is Domain.POLICY and other.role is Role.EITHER:
        # The job was ended because it was stuck.
        return (is_later or finding.cause.id in names) and other.cause.id not in own
    if _weakness(other) > _weakness(finding) or other.cause.id in own:
        return False
    is_meant = EVERYTHING in names or (LATER in names and is_later)
    return finding.cause.id in names or (is_meant and EVERYTHING not in own)


def _order(finding: FoundSign) -> tuple[int, int]:
    """Sort by strength, then by time: what ended a job counts only if nothing failed before."""
    cause = finding.cause
    return _weakness(finding) or int(cause.generic or cause.domain is Domain.POLICY), finding.order


def _weakness(finding: FoundSign) -> int:
    return {Role.ROOT: 0, Role.EITHER: 2}.get(finding.role, 3)


def by_numbers(scanner: Scanner) -> FoundSign | None:
    """Return what the training's own numbers show; it counts if no message names a cause."""
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
    name = next((name for name, is_shown in shown.items() if is_shown), "")
    if (cause := scanner.table.get(name)) is None:
        return None
    return FoundSign(cause=cause, role=Role.EITHER, line=line, order=0, steps=training.steps)


def _consequences(
    scanner: Scanner, findings: Sequence[FoundSign], of_cause: Sequence[FoundSign]
) -> tuple[Consequence, ...]:
    cause = of_cause[0].cause
    orders = {each.order for each in of_cause}
    ranks = {each.line.rank for each in of_cause} - {None}
    first: dict[str, FoundSign] = {}
    for each in findings:
        # A guess about the end of the same rank, or of no rank, is what the cause explains.
        is_guess = each.role in (Role.CONFIRMATION, Role.CASCADE) and bool(ranks)
        is_same = each.order in orders or (is_guess and each.line.rank in {None, *ranks})
        is_same |= cause.domain is each.cause.domain is Domain.POLICY  # one decision, two names
        if each.cause.id != cause.id and each.role not in _NO_CONSEQUENCE and not is_same:
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
