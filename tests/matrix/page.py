"""Write the tables of docs/compatibility.md from the matrix: `python -m tests.matrix.page`.

A test compares the page with what this script would write.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.checkout import ROOT
from tests.matrix.cells import ALL, DATA, KINDS, RULES, Refused, Trains, outcome

PAGE = ROOT / "docs" / "compatibility.md"
PLACES = {"local": "here", "slurm": "Slurm", "ssh": "ssh"}


def tables() -> dict[str, str]:
    """Return each table by its name."""
    return {"scripts": "\n".join(_scripts()), "refused": "\n".join(_refused())}


def _scripts() -> Iterator[str]:
    yield "| script | runs | tried with | what to know |\n|---|---|---|---|"
    for name, kind in KINDS.items():
        cells = [c for c in ALL if c.kind == name and isinstance(outcome(c), Trains)]
        strategies = dict.fromkeys(cell.strategy for cell in cells)
        places = dict.fromkeys(PLACES[cell.cluster] for cell in cells)
        tried = f"{', '.join(strategies)}; {', '.join(places)}"
        yield f"| {kind.title} | {kind.runs} | {tried} | {kind.note} |"
    yield from (f"| {row} |" for row in DATA["others"])


def _refused() -> Iterator[str]:
    yield "| combination | result |\n|---|---|"
    for rule in RULES:
        then = rule.then
        if isinstance(then, Refused):
            text = f"exit status {then.code}: “{then.message} …”, “{then.hint} …”"
        else:
            text = f"not run: {then.why}"
        yield f"| {rule.about} | {text} |"


def page() -> str:
    """Return the page with its tables made anew."""
    text = PAGE.read_text()
    for name, table in tables().items():
        begin, end = f"<!-- {name}: written by tests/matrix/page.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
