"""The table of causes: what each means, and the lines that are signs of it (`causes/*.yaml`)."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from clusterrun.diagnosis.kinds import Advice, Retry

CAUSES: Final = Path(__file__).parent / "causes"
GENERATED: Final = "causes.json"  # docs/reference/generate.py writes it
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


class SignPattern:
    """A pattern of the table, which is compiled when a text is first matched with it.

    `literals` are texts of which each match contains one, but for letter case; none: unknown.
    """

    def __init__(self, written: str, literals: Sequence[str] | None = None) -> None:
        self.written = written
        self._literals = literals

    @functools.cached_property
    def compiled(self) -> re.Pattern[str]:
        """The pattern, with a limit on each repeat. Raises re.error."""
        return bounded(self.written)

    @functools.cached_property
    def literals(self) -> tuple[str, ...]:
        """The literals: those of the generated file, else read from the pattern."""
        if self._literals is not None:
            return tuple(self._literals)
        from clusterrun.logformat.literals import literals_of  # slow to import

        return literals_of(self.compiled)

    def search(self, text: str) -> re.Match[str] | None:
        """Find the first match in a text."""
        return self.compiled.search(text)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A line that points to a cause."""

    text: SignPattern
    role: Role
    seen: str = ""  # programs and versions that print it
    near: SignPattern | None = None  # must be in the lines of its process around it
    unless: SignPattern | None = None  # must not be there
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
    repeats: SignPattern | None = None  # the beginning of a sign: a new try fails again
    means: str = ""
    do: tuple[Advice, ...] = ()
    explains: frozenset[str] = frozenset()  # causes that are its consequences if both are found
    signs: tuple[Sign, ...] = ()


Table = Mapping[str, KnownCause]


@functools.cache
def built_in() -> Table:
    """Return the causes by id, from the generated file if it is that of the YAML files."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        known = json.loads((CAUSES / GENERATED).read_text(encoding="utf-8"))
        if known["files"] == _checksums():
            causes = [_cause(row, iter(literals)) for row, literals in known["causes"]]
            return {cause.id: cause for cause in causes}
    return parse(file.read_text(encoding="utf-8") for file in sorted(CAUSES.glob("*.yaml")))


def _checksums() -> dict[str, int]:
    return {file.name: zlib.crc32(file.read_bytes()) for file in sorted(CAUSES.glob("*.yaml"))}


def generated() -> str:
    """Return the content of the generated file, with which no YAML and no pattern is parsed."""
    rows = _rows(file.read_text(encoding="utf-8") for file in sorted(CAUSES.glob("*.yaml")))
    pairs = [[row, [x.text.literals for x in _cause(row, iter(())).signs]] for row in rows]
    lines = ",\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs)  # to be compared
    return f'{{"files": {json.dumps(_checksums())}, "causes": [\n{lines}\n]}}\n'


def parse(texts: Iterable[str]) -> Table:
    """Read YAML lists of causes. Raises YAMLError, re.error and others."""
    causes = [_cause(row, iter(())) for row in _rows(texts)]
    patterns = [x for each in causes for sign in each.signs for x in (sign.text, sign.near)]
    patterns += [sign.unless for each in causes for sign in each.signs]
    for pattern in filter(None, (*patterns, *(each.repeats for each in causes))):
        _ = pattern.compiled  # a plug-in's mistake is found here
    return {cause.id: cause for cause in causes}


def _rows(texts: Iterable[str]) -> list[Any]:
    import yaml  # slow to import

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [row for text in texts for row in yaml.load(text, Loader=loader)]


def _cause(row: Any, literals: Iterator[Sequence[str]]) -> KnownCause:
    """Read a cause, whose `role` is the default of its signs; `literals` are theirs, or none."""
    values = {**row, "id": str(row["id"])}
    role = Role(values.pop("role", Role.ROOT))
    do, repeats = values.pop("do", ()), values.pop("repeats", None)
    advice = [do] if isinstance(do, str) else do  # texts, or mappings with a text and a command
    return KnownCause(
        domain=Domain(values.pop("domain", Domain.UNKNOWN)),
        retry=Retry(values.pop("retry", Retry.MAYBE)),
        repeats=SignPattern(repeats) if repeats else None,
        do=tuple(
            Advice(**each) if isinstance(each, dict) else Advice(text=str(each)) for each in advice
        ),
        explains=frozenset(values.pop("explains", ())),
        signs=tuple(_sign(sign, role, literals) for sign in values.pop("signs", ())),
        **values,
    )


def _sign(row: Any, role: Role, literals: Iterator[Sequence[str]]) -> Sign:
    """Read a sign: a pattern, or a mapping with the pattern as `text`."""
    values = {"text": row} if isinstance(row, str) else dict(row)
    values["text"] = SignPattern(values["text"], next(literals, None))
    for name in ("near", "unless"):
        if name in values:
            values[name] = SignPattern(values[name])
    return Sign(**{**values, "role": Role(values.get("role", role))})


def bounded(pattern: str) -> re.Pattern[str]:
    """Compile a pattern with a limit on each repeat, which bounds the time that a line takes."""

    def limited(found: re.Match[str]) -> str:
        if not found["repeat"]:  # an escaped letter, or a set of letters
            return found[0]
        least = "1" if found["repeat"] == "+" else found["least"] or "0"
        return f"{{{least},{_MOST}}}"

    return re.compile(_REPEAT.sub(limited, pattern))
