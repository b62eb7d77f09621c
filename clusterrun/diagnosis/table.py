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
_REPEAT: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([*+]|\{\d*,\})")


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
    """A line that points to a cause.

    It counts if `near` is found and `unless` is not, in the lines around it from the same
    process, and with `before_steps` only before the first training step. `seen` names programs
    and versions that print it. `of_victim`: the rank that prints it suffers from another one.
    `written` is the text as the table has it.
    """

    text: re.Pattern[str]
    role: Role
    written: str = ""
    seen: str = ""
    near: re.Pattern[str] | None = None
    unless: re.Pattern[str] | None = None
    before_steps: bool = False
    of_victim: bool = False


@dataclass(frozen=True, kw_only=True)
class KnownCause:
    """A reason why runs fail.

    `generic` causes yield to specific ones. `explains` names the causes that are consequences of
    this one if both are found. A `lasting` cause counts even if the training made progress
    after its sign. Another try `repeats` a failure whose sign begins like this.
    """

    id: str
    domain: Domain = Domain.UNKNOWN
    retry: Retry = Retry.MAYBE
    blames_node: bool = False
    generic: bool = False
    lasting: bool = False
    repeats: re.Pattern[str] | None = None
    means: str = ""
    do: tuple[Advice, ...] = ()
    explains: frozenset[str] = frozenset()
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
    values = {**row, "id": str(row["id"])}
    role = Role(values.pop("role", Role.ROOT))
    do, repeats = values.pop("do", ()), values.pop("repeats", None)
    return KnownCause(
        domain=Domain(values.pop("domain", Domain.UNKNOWN)),
        retry=Retry(values.pop("retry", Retry.MAYBE)),
        repeats=bounded(repeats) if repeats else None,
        do=tuple(
            Advice(**row) if isinstance(row, dict) else Advice(text=str(row))
            for row in ((do,) if isinstance(do, str) else do)
        ),
        explains=frozenset(values.pop("explains", ())),
        signs=tuple(_sign(sign, role) for sign in values.pop("signs", ())),
        **values,
    )


def _sign(row: Any, role: Role) -> Sign:
    values = {"text": row} if isinstance(row, str) else dict(row)
    written = values["text"]
    for name in ("text", "near", "unless"):
        if name in values:
            values[name] = bounded(values[name])
    return Sign(**{**values, "written": written, "role": Role(values.get("role", role))})


def bounded(pattern: str) -> re.Pattern[str]:
    """Compile a pattern so that each repeat ends: a line takes time by its length only."""

    def limited(found: re.Match[str]) -> str:
        least = {"*": "0", "+": "1"}.get(found[1] or "", (found[1] or "")[1:-2] or "0")
        return f"{{{least},{_MOST}}}" if found[1] else found[0]

    return re.compile(_REPEAT.sub(limited, pattern))
