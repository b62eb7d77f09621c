"""The page of each id that diagnose, doctor, the preflight or check prints."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from clusterrun.cli.shared import output
from clusterrun.errors import UsageError

_WIDTH: Final = 90  # of a page's text


class Explanation(NamedTuple):
    """What an id stands for; `rows` have a label and a text each."""

    id: str
    summary: str
    rows: list[tuple[str, str]]


def pages(*kinds: str) -> list[Explanation]:
    """Return the pages of kinds of ids; of all kinds without any."""
    return [page for kind in kinds or _KINDS for page in _KINDS[kind]()]


def explain(name: str, *kinds: str) -> None:
    """Print the page of an id, or list the ids that begin so. Raises UsageError if there is none.

    Ids of other kinds have a page, too, but are not listed.
    """
    for page in (page for page in pages() if page.id == name):
        output.answer_page(f"{page.id}  {page.summary}", page.rows)
        return
    known = pages(*kinds)
    listed = [page for page in known if name == "all" or page.id.startswith(name)]
    if not listed:
        near = difflib.get_close_matches(name, [page.id for page in known], n=1)
        hint = f"use '{near[0]}'" if near else "list the ids with: clusterrun explain all"
        raise UsageError(f"nothing has the id '{name}'", hint=hint)
    output.answer_table(("ID", "ABOUT"), [(page.id, page.summary) for page in listed])


def _causes() -> Iterator[Explanation]:
    from clusterrun.verbs.causes import known_causes

    for cause in known_causes().values():
        signs = [f"{sign.written}  [{sign.seen or 'any version'}]" for sign in cause.signs]
        rows = [("do", str(advice)) for advice in cause.do] + [("sign", text) for text in signs]
        yield Explanation(cause.id, cause.means, rows)


def _checks() -> Iterator[Explanation]:
    from clusterrun.health.checks import pages
    from clusterrun.verbs.doctor import places

    for name, page in pages().items():
        texts = (("FAIL if", page.fails), ("note if", page.notes), ("then", page.why))
        rows = []
        for label, text in texts:
            lines = textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
            rows += [("" if number else label, line) for number, line in enumerate(lines)]
        rows += [("fix", text) for text in page.fix]  # never wrapped: they are copied
        rows += [("runs on", text) for text in places(name)]
        yield Explanation(name, f"looks at {page.looks_at}", rows)


def _rules() -> Iterator[Explanation]:
    from clusterrun.linting.rule import rules

    for rule in rules().values():
        yield Explanation(rule.id, rule.reason, [("fix", rule.fix)])


CAUSE, CHECK, RULE = "cause", "check", "rule"
_KINDS: Final[dict[str, Callable[[], Iterable[Explanation]]]] = {
    CAUSE: _causes,
    CHECK: _checks,
    RULE: _rules,
}
