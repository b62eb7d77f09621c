"""`diagnose --stacks` and `--fr`: where the ranks of a running job are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clusterrun.cli.shared import output
from clusterrun.cli.shared.job_text import find_announced
from clusterrun.errors import Exit
from clusterrun.shared.hostlist import fold_hosts, fold_ranks
from clusterrun.shared.wording import count
from clusterrun.verbs.hangs import LASTING_S, SAMPLES_S, Group, Hang, groups, look, sentences
from clusterrun.verbs.status import status

SCHEMA = "clusterrun.look/1"


def show_look(job: str | None, *, stacks: bool, with_dumps: bool, as_json: bool) -> Exit:
    """Print where the ranks are; return Exit.NO if ranks miss a collective."""
    found = status(find_announced(job))
    hang = look(found, with_dumps=with_dumps, samples=2 if stacks else 1)
    head = {"job_id": found.record.job_id, "attempt": found.attempt}
    if as_json:
        output.answer_json({"schema": SCHEMA, **head, **_object(hang)})
    else:
        output.answer(f"job {head['job_id']} {found.record.name}, attempt {found.attempt}")
        for text in _lines(hang, with_dumps=with_dumps):
            output.answer(text)
    return Exit.NO if hang.is_lasting else Exit.OK


def _lines(hang: Hang, *, with_dumps: bool) -> Iterator[str]:
    for group in groups(hang):
        nodes = {hang.nodes.get(rank, "?") for rank in group.ranks}
        ranks = f"{count(len(group.ranks), 'rank')}: {fold_ranks(group.ranks)}"
        yield f"STACKS  {ranks} on {fold_hosts(sorted(nodes))}{_state(group)}"
        yield f"        {group.where}"
    if hang.before:
        moved = sum(group.moved or 0 for group in groups(hang))
        yield f"        {moved} of {len(hang.places)} ranks moved in {SAMPLES_S:.0f} s"
    if with_dumps:
        stuck = hang.stuck if hang.is_lasting else None
        texts = [text for _, text in sentences(hang, stuck)] if stuck else []
        if hang.dumped and not texts:
            texts = [f"no rank has waited in a collective for {LASTING_S:.0f} s"]
        yield from (f"FR      {text}" for text in texts)
        if stuck and stuck.since:
            yield f"        for {hang.looked_at - stuck.since:.0f} s"
        if hang.dumped < len(hang.nodes):
            missing = len(hang.nodes) - hang.dumped
            label = "" if texts else "FR"
            yield f"{label:<8}{count(missing, 'rank')} left no dump: torch records none, or hangs"
    if hang.silent:
        yield f"SILENT  {fold_hosts(hang.silent)} did not answer"


def _state(group: Group) -> str:
    waits = ", waiting" if group.is_waiting else ""
    if group.moved is None:
        return waits
    return f"{waits}, moving" if group.moved else f"{waits}, not moving"


def _object(hang: Hang) -> dict[str, Any]:
    stuck = hang.stuck if hang.is_lasting else None
    return {
        "groups": [
            {
                "ranks": fold_ranks(group.ranks),
                "where": group.where,
                "is_waiting": group.is_waiting,
                "moved": group.moved,
            }
            for group in groups(hang)
        ],
        "stuck": stuck
        and {
            "kind": stuck.kind.value,
            "group": stuck.group,
            "collective": stuck.call.op,
            "number": stuck.number,
            "where": stuck.call.where,
            "waiting": fold_ranks(stuck.waiting),
            "ranks": fold_ranks(stuck.odd),
            "nodes": sorted({hang.nodes.get(rank, "?") for rank in stuck.odd}),
            "since": stuck.since or None,
        },
        "dumped": hang.dumped,
        "silent": list(hang.silent),
    }
