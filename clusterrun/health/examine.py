"""Run the checks of a machine side by side, and compare what many nodes found.

A check that is late is left behind. What nodes have in common is shown once, and what differs.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from clusterrun.errors import ClusterrunError, describe, shortened
from clusterrun.shared.finding import BAD, Finding, Severity, bad, ok, skip
from clusterrun.shared.hostlist import fold_hosts, named
from clusterrun.shared.wording import count

Check = Callable[[], Finding]  # may raise UnknownError, OSError or ClusterrunError


class UnknownError(Exception):
    """A check can find nothing out; the text is the reason."""


def examine(
    checks: Mapping[str, Check],
    deadline_s: float,
    *,
    alone: Collection[str] = (),
    late: Mapping[str, Finding] = MappingProxyType({}),
) -> list[Finding]:
    """Run the checks of each domain (`node` of `node.shm`) in a thread, one after the other.

    A blocked file system, driver or server holds up its own domain only; `alone` are checks that
    have a thread of their own. A check without an answer in time is skipped, or gets what `late`
    has for it. A fault of a check is raised.
    """
    answers: dict[str, Finding | Exception] = {}
    domains: dict[str, list[str]] = {}
    for name in checks:
        domains.setdefault(name if name in alone else name.split(".")[0], []).append(name)
    parts = {each: partial(_run_checks, checks, names, answers) for each, names in domains.items()}
    side_by_side(parts, deadline_s)
    reason = f"no answer within {deadline_s:g} s"
    found = [answers.get(name) or late.get(name) or skip(name, reason) for name in checks]
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each for each in found if isinstance(each, Finding)]


def _run_checks(
    checks: Mapping[str, Check], names: Sequence[str], answers: dict[str, Finding | Exception]
) -> None:
    """Run checks, and put what each finds into `answers`, also after the caller stopped waiting."""
    for name in names:
        try:
            answers[name] = checks[name]()
        except (UnknownError, ClusterrunError, OSError) as error:
            answers[name] = skip(name, describe(error))
        except Exception as error:  # noqa: BLE001  # a fault of ours: the main thread raises it
            answers[name] = error


def side_by_side(parts: Mapping[str, Callable[[], Any]], deadline_s: float) -> dict[str, Any]:
    """Run each part in a thread; return the results by name, without those that are late."""
    found: dict[str, Any] = {}

    def run(name: str, part: Callable[[], Any]) -> None:
        found[name] = part()

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in parts.items()]
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)  # a copy: a late thread may still add its result


# Of many nodes

# The packages of which all nodes need the same version, by its first parts (None: all): ranks
# exchange pickled objects and call the same collectives, and NCCL refuses any other version.
MUST_AGREE: Final = {"python": 2, **dict.fromkeys(("torch", "accelerate", "NCCL", "clusterrun"))}
HINTS: Final = {
    "versions": "install the environment on a file system that all nodes share, or in an image",
    "system": "tell the administrator; leave the node out with --exclude if a job fails on it",
    "hardware": "request identical nodes with --constraint, or leave the others out with --exclude",
    "network": "tell the administrator; compare with: ip -brief link",
    "gpu": "request identical nodes with --constraint, or leave the others out with --exclude",
}
MISSING: Final = "none"
MOST: Final = 16  # findings in a list
_CLOSE: Final = 0.02  # sizes that differ by less are equal: firmware and kernel keep a little
_SIZE: Final = re.compile(r"([0-9.]{1,20}) GiB")
_DIGITS: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_ORDER: Final = (Severity.FAIL, Severity.NOTE, Severity.SKIP, Severity.OK)
_MOST_VALUES: Final = 4
_MOST_FACTS: Final = 5
_VALUE: Final = 100
_Kind = tuple[Severity, str, str]


def differences(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Compare the facts (`group.fact`) of nodes: one check for each group.

    >>> differences({"n1": {"gpu.driver": "550"}, "n2": {"gpu.driver": "560"},
    ...              "n3": {"gpu.driver": "560"}})[0].text
    'driver: n1 has 550, the other 2 have 560'
    """
    names = sorted({name for found in facts.values() for name in found})
    by_group = {group: [each for each in names if each.startswith(f"{group}.")] for group in HINTS}
    return [_compared(group, own, facts) for group, own in by_group.items() if own]


def _compared(group: str, names: Sequence[str], facts: Mapping[str, Mapping[str, str]]) -> Finding:
    """Compare the facts of a group between nodes: it fails if one differs in what must agree."""
    check = f"same.{group}"
    if len(facts) < 2:
        return skip(check, "there is only one node")
    by_fact = {name.partition(".")[2]: _holders(name, facts) for name in names}
    differing = {fact: holders for fact, holders in by_fact.items() if len(holders) > 1}
    if not differing:
        values = [f"{fact} {next(iter(holders))}" for fact, holders in by_fact.items()]
        return ok(check, f"{count(len(facts), 'node')} agree: {join_some(values, 3)}")
    broken = [fact for fact, holders in differing.items() if _breaks_a_job(fact, holders)]
    ordered = sorted(differing, key=lambda fact: fact not in broken)
    text = join_some([f"{fact}: {values_text(differing[fact])}" for fact in ordered])
    return bad(check, text, HINTS[group], is_sure=bool(broken))


def _breaks_a_job(fact: str, values: Iterable[str]) -> bool:
    """Return whether values differ in the parts of a version in which all nodes must agree."""
    parts = MUST_AGREE.get(fact, 0)  # the first ones; 0: none, None: all
    return len({tuple(value.split(".")[:parts]) for value in values}) > 1


def join_some(texts: Sequence[str], most: int = _MOST_FACTS) -> str:
    """Join texts; of many the first ones, and the number of the others."""
    more = [f"{len(texts) - most} more"] if len(texts) > most else []
    return "; ".join([*texts[:most], *more])


def _holders(name: str, facts: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return which nodes have which value; a size close to the most common one counts as that."""
    holders: dict[str, list[str]] = defaultdict(list)
    for node, found in facts.items():
        value = " ".join((found.get(name) or MISSING).split())
        holders[shortened(value, _VALUE)].append(node)
    if not all(map(_SIZE.fullmatch, holders)):
        return dict(holders)
    sizes = {value: float(value.removesuffix(" GiB")) for value in holders}
    common = max(holders, key=lambda value: len(holders[value]))
    joined: dict[str, list[str]] = defaultdict(list)
    for value, nodes in holders.items():
        is_close = abs(sizes[value] - sizes[common]) <= _CLOSE * sizes[common]
        joined[common if is_close else value] += nodes
    return dict(joined)


def values_text(holders: Mapping[str, Sequence[str]]) -> str:
    """Return which nodes have which value, those with a rare one first; only count the others.

    >>> values_text({"560": ["n1", "n2", "n4"], "550": ["n3"]})
    'n3 has 550, the other 3 have 560'
    >>> values_text({str(n): ["n1"] * n for n in range(1, 7)}).split(", ")[4]
    '5 nodes have other values'
    """
    *rare, (common, nodes) = sorted(holders.items(), key=lambda each: (len(each[1]), each[0]))
    shown, hidden = rare[:_MOST_VALUES], rare[_MOST_VALUES:]
    parts = [f"{named(few)} {'has' if len(few) == 1 else 'have'} {value}" for value, few in shown]
    if hidden:
        parts.append(f"{sum(len(few) for _, few in hidden)} nodes have other values")
    last = f"{nodes[0]} has" if len(nodes) == 1 else f"the other {len(nodes)} have"
    return ", ".join([*parts, f"{last} {common}"])


def findings(checks: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Merge the notes and failures of nodes, failures first; leave out what is beyond a few."""
    found = [each for each in merged(checks) if each.severity in BAD]
    return sorted(found, key=lambda each: BAD.index(each.severity))[:MOST]


def merged(checks: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Merge the checks of nodes: one for each id and finding, the worst and most frequent first.

    Texts that differ only in numbers are one finding, with the text of its first node. What is ok
    is left out if the check found something on another node. A check that is missing on a node is
    skipped there.
    """
    ids = list(dict.fromkeys(each.id for found in checks.values() for each in found))
    by_node = {node: {each.id: each for each in found} for node, found in checks.items()}
    return [each for name in ids for each in _merged(name, by_node)]


def _merged(name: str, by_node: Mapping[str, Mapping[str, Finding]]) -> Iterator[Finding]:
    """Yield the findings of one check; beyond a few, only one more for each severity."""
    groups: dict[_Kind, list[tuple[str, Finding]]] = defaultdict(list)
    for node, found in by_node.items():
        check = found.get(name) or skip(name, "the node did not report it")
        groups[_kind(node, check)].append((node, check))
    ordered = [(severity, members) for (severity, *_), members in groups.items()]
    if any(severity in BAD for severity, _ in ordered):
        ordered = [each for each in ordered if each[0] is not Severity.OK]
    ordered.sort(key=lambda each: (_ORDER.index(each[0]), -len(each[1])))
    rest: dict[Severity, list[tuple[str, Finding]]] = defaultdict(list)
    for severity, members in ordered[_MOST_VALUES:]:
        rest[severity] += members
    for severity, members in [*ordered[:_MOST_VALUES], *rest.items()]:
        yield _joined(name, severity, members)


def _joined(name: str, severity: Severity, members: Sequence[tuple[str, Finding]]) -> Finding:
    """Return one finding for nodes: that of the first, with the names of all in its hint."""
    node, first = members[0]
    nodes = tuple(each for each, _ in members)
    where = "" if all(each.text == first.text for _, each in members) else f" (on {node})"
    of_node = rf"(?<![\w.-]){re.escape(node)}(?![\w.-])"
    fix = re.sub(of_node, lambda _: named(nodes), first.fix)
    return Finding(id=name, severity=severity, text=f"{first.text}{where}", fix=fix, nodes=nodes)


def _kind(node: str, check: Finding) -> _Kind:
    """Return a key that is equal for findings that differ only in numbers and the node's name."""
    if check.severity is Severity.OK:
        return check.severity, "", ""
    text, hint = (_DIGITS.sub("0", each.replace(node, "")) for each in (check.text, check.fix))
    return check.severity, text, hint


def to_exclude(checks: Mapping[str, Sequence[Finding]]) -> str:
    """Return a host list of the nodes on which a check failed that did not fail on all; "" if none.

    A failure on all nodes is not the fault of a node.
    """
    pairs = ((node, each) for node, found in checks.items() for each in found)
    failed = {(node, each.id) for node, each in pairs if each.severity is Severity.FAIL}
    times = Counter(name for _, name in failed)
    return fold_hosts(node for node, name in failed if times[name] < len(checks))
