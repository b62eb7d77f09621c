"""Store results: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Value = str | float | int | None


@dataclass(kw_only=True)
class Section:
    """A table with one row per measurement; column names end in their unit."""

    title: str
    about: str
    rows: list[dict[str, Value]] = field(default_factory=list)


def spread(values: Sequence[float]) -> str:
    """Return the smallest and the largest value as text."""
    return f"{min(values):.3g}-{max(values):.3g}"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def write(stem: Path, facts: dict[str, str], sections: Sequence[Section], *, of: str) -> None:
    """Write both files about measurements `of` something.

    Sections of an earlier run that this run did not measure stay.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    target = stem.with_suffix(".json")
    kept: dict[str, dict[str, object]] = {}
    if target.exists():
        kept = {str(s["title"]): s for s in json.loads(target.read_text())["sections"]}
    kept |= {s.title: {**asdict(s), "machine": facts} for s in sections}
    target.write_text(json.dumps({"sections": list(kept.values())}, indent=2) + "\n")
    stem.with_suffix(".md").write_text("\n".join(_markdown(list(kept.values()), of)))


def _markdown(sections: list[dict[str, object]], of: str) -> list[str]:
    lines = [
        f"# Measurements of {of}",
        "",
        "See [README](../README.md) for what is compared, and how.",
    ]
    told = ""
    for section in sections:
        about = "; ".join(f"{k} {v}" for k, v in dict(section["machine"]).items())  # type: ignore[call-overload]  # JSON
        lines += ["", f"## {section['title']}", "", str(section["about"])]
        if about != told:
            lines += ["", f"Machine: {about}."]
            told = about
        lines += ["", *table(section["rows"])]  # type: ignore[arg-type]  # JSON
    return [*lines, ""]


def table(rows: list[dict[str, Value]]) -> list[str]:
    """Write rows as a Markdown table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    body = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    head = [name.replace("_", " ") for name in columns]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(columns), *body)]


def _cell(name: str, value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int) or name.endswith("_MB"):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
