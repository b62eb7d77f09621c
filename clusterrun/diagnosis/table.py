"""The table of causes: what each means, and the lines that are signs of it (`causes/*.yaml`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import yaml

from clusterrun.diagnosis.kinds import Advice, Retry

CAUSES: Final = Path(__file__).parent / "causes"
EVERYTHING, LATER = "everything", "later"  # in `explains`: any other cause, any later one
_MOST: Final = 1000  # letters that a repeat of a pattern takes
_REPEAT: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<repeat>[*+]|\{(?P<least>\d*),\})")


class Role(str, Enum):
    """What a sign can be in a failure.

    `ROOT` starts one. `EITHER` is the cause only if nothing else is. `CONFIRMATION` supports
    its cause, and makes it probable if nothing else is found. The rest are never a cause.
    """

    ROOT = "root"
    EITHER = "either"
    CONFIRMATION = "confirmation"
    CASCADE = "cascade"
    TEARDOWN = "teardown"
    NOISE = "noise"
    ADVICE = "advice"


CAUSAL: Final = (Role.ROOT, Role.EITHER, Role.CONFIRMATION)


class Domain(str, Enum):
    """Who can fix a cause: the user, the site, or neither (a policy of the cluster)."""

    WORKLOAD = "workload"
    INFRASTRUCTURE = "infrastructure"
    POLICY = "policy"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A line that points to a cause."""

    text: re.Pattern[str]
    role: Role
    written: str = ""  # the text as the table has it
    seen: str = ""  # programs and versions that print it
    near: re.Pattern[str] | None = None  # must be in the lines of its process around it
    unless: re.Pattern[str] | None = None  # must not be there
    before_steps: bool = False  # counts only before the first training step
    of_victim: bool = False  # the rank that prints it suffers from another one


@dataclass(frozen=True, kw_only=True)
class KnownCause:
    """A reason why runs fail."""

    id: str
    domain: Domain = Domain.UNKNOWN
    retry: Retry = Retry.MAYBE
    blames_node: bool = False
    generic: bool = False  # yields to specific causes
    repeats: re.Pattern[str] | None = None  # the beginning of a sign: a new try fails again
    means: str = ""
    do: tuple[Advice, ...] = ()
    explains: frozenset[str] = frozenset()  # causes that are its consequences if both are found
    signs: tuple[Sign, ...] = ()


Table = Mapping[str, KnownCause]


@functools.cache
def built_in() -> Table:
    """Return the causes by id."""
    return parse(file.read_text(encoding="utf-8") for file in sorted(CAUSES.glob("*.yaml")))


def parse(texts: Iterable[str]) -> Table:
    """Read YAML lists of causes."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    causes = [_cause(row) for text in texts for row in yaml.load(text, Loader=loader)]
    return {cause.id: cause for cause in causes}


def _cause(row: Any) -> KnownCause:
    """Read a cause from a mapping, whose `role` is the default role of its signs."""
    values = {**row, "id": str(row["id"])}
    role = Role(values.pop("role", Role.ROOT))
    do, repeats = values.pop("do", ()), values.pop("repeats", None)
    advice = [do] if isinstance(do, str) else do  # texts, or mappings with a text and a command
    return KnownCause(
        domain=Domain(values.pop("domain", Domain.UNKNOWN)),
        retry=Retry(values.pop("retry", Retry.MAYBE)),
        repeats=bounded(repeats) if repeats else None,
        do=tuple(
            Advice(**each) if isinstance(each, dict) else Advice(text=str(each)) for each in advice
        ),
        explains=frozenset(values.pop("explains", ())),
        signs=tuple(_sign(sign, role) for sign in values.pop("signs", ())),
        **values,
    )


def _sign(row: Any, role: Role) -> Sign:
    """Read a sign: a pattern, or a mapping with the pattern as `text`."""
    values = {"text": row} if isinstance(row, str) else dict(row)
    written = values["text"]
    for name in ("text", "near", "unless"):
        if name in values:
            values[name] = bounded(values[name])
    return Sign(**{**values, "written": written, "role": Role(values.get("role", role))})


def bounded(pattern: str) -> re.Pattern[str]:
    """Compile a pattern with a limit on each repeat, which bounds the time that a line takes."""

    def limited(found: re.Match[str]) -> str:
        if not found["repeat"]:  # an escaped letter, or a set of letters
            return found[0]
        least = "1" if found["repeat"] == "+" else found["least"] or "0"
        return f"{{{least},{_MOST}}}"

    return re.compile(_REPEAT.sub(limited, pattern))
