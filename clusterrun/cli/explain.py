"""`explain`: print the page of what diagnose, doctor, the preflight or check names."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Final, NamedTuple

import click

from clusterrun.cli.shared import output
from clusterrun.diagnosis.table import built_in
from clusterrun.errors import UsageError
from clusterrun.health import checks
from clusterrun.linting.rule import rules
from clusterrun.shared.wording import nearest
from clusterrun.verbs.doctor import places

_WIDTH: Final = 90  # of a page's text


@click.command()
@click.argument("name", metavar="ID")
def command(name: str) -> None:
    """Explain a cause, a check or a rule.

    ID is what diagnose, doctor, the preflight or check printed. 'all', or a beginning such as gpu,
    lists ids.

    \b
    clusterrun explain cuda_oom
    clusterrun explain node.shm
    clusterrun explain gpu
    """
    known = pages()
    if page := next((page for page in known if page.id == name), None):
        output.answer(f"{page.id}  {page.summary}")
        output.answer_rows(page.rows)
        return
    listed = [page for page in known if name == "all" or page.id.startswith(name)]
    if not listed:
        near = nearest(name, (page.id for page in known))
        hint = f"use '{near}'" if near else "list the ids with: clusterrun explain all"
        raise UsageError(f"nothing has the id '{name}'", hint=hint)
    output.answer_table(("ID", "ABOUT"), [(page.id, page.summary) for page in listed])


class Explanation(NamedTuple):
    """What an id stands for; `rows` have a label and a text each."""

    id: str
    summary: str
    rows: list[tuple[str, str]]


def pages() -> list[Explanation]:
    """Return the pages of all ids."""
    about_rules = (Explanation(x.id, x.reason, [("fix", x.fix)]) for x in rules().values())
    return [*_causes(), *_checks(), *about_rules]


def _causes() -> Iterator[Explanation]:
    for cause in built_in().values():
        signs = [f"{sign.written}  [{sign.seen or 'any version'}]" for sign in cause.signs]
        rows = [("do", str(advice)) for advice in cause.do] + [("sign", text) for text in signs]
        yield Explanation(cause.id, cause.means, rows)


def _checks() -> Iterator[Explanation]:
    for name, page in checks.pages().items():
        texts = (("FAIL if", page.fails), ("note if", page.notes), ("then", page.why))
        rows = []
        for label, text in texts:
            lines = textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
            rows += [("" if number else label, line) for number, line in enumerate(lines)]
        rows += [("fix", text) for text in page.fix]  # never wrapped: they are copied
        rows += [("runs on", text) for text in places(name)]
        yield Explanation(name, f"looks at {page.looks_at}", rows)
