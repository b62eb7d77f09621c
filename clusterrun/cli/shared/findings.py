"""Print findings, of whatever looked."""

from __future__ import annotations

from typing import Final

import click

from clusterrun.cli.shared import output
from clusterrun.shared.finding import Finding, Severity

_WORDS: Final = {
    Severity.OK: ("ok", "green"),
    Severity.NOTE: ("note", "cyan"),
    Severity.FAIL: ("FAIL", "red"),
    Severity.SKIP: ("skip", "bright_black"),
}


def show(found: Finding, where: str = "") -> None:
    """Print a finding and what to do; `where` it is in a script."""
    word, colour = _WORDS[found.severity]
    text = " ".join(f"{where}: {found.summary}".removeprefix(": ").split())
    output.answer(f"{click.style(f'{word:<4}', fg=colour)}  {found.id:<18}  {text}", indent=6)
    if found.fix:
        output.answer(f"      hint: {found.fix}", indent=12)
