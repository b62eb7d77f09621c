"""Find the counters in a line that a training printed: `Epoch [2/10], Step [100/600], loss 0.1`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

NINJA: Final = re.compile(r"^\[\d+/\d+\] \S*(?:c\+\+|g\+\+|gcc|clang|nvcc|hipcc|ccache)")
_MARKS: Final = ("step", "iter", "epoch", "batch", "update", "episode", "] loss")
_FRACTION: Final = re.compile(r"\d {0,20}/ {0,20}\d")
_NUMBER: Final = r"\d{1,3}(?:,\d{3}){1,4}|\d{1,15}"
# No part of a path, a version, a time, a date or a share: `step-5.pt`, `step 1.2.3`, `step 5 %`
_END: Final = r"(?! ?%|[\w/-]|[.:,]\d|\.\w)"
COUNTER: Final = re.compile(  # in lower case
    r"(?<![\w./=-])(?<!\* )(?P<word>(?:(?:global|train|training|optimizer)[ _])?steps?"
    r"|iter(?:ation)?s?|(?:mini-?)?batch(?:es)?|(?:num_)?updates?|episodes?|epochs?"
    r"|(?:it|ep)(?=[ :=#\[]{1,4}\d{1,9} ?/))\b"
    r"(?=[\s:=#\[('\"])['\"]?\s{0,20}[:=#]?\s{0,20}[\[('\"]? {0,20}"
    rf"(?P<n>{_NUMBER})(?P<part>\.\d{{1,6}})?"
    rf"(?: {{0,20}}(?:/|of|out of) {{0,20}}(?P<total>{_NUMBER}))?{_END}"
    r"|(?:^|[\[(|]|: ) {0,20}(?P<bare>\d{1,15}) {0,20}/ {0,20}(?P<of>\d{1,15})"
    r"(?=[\s\])|,]|$)(?! \d\d:)"
    r"|^\[\d{1,9}, {1,20}(?P<pair>\d{1,15})\](?= loss)",  # of PyTorch's tutorial
)
_WORD: Final = re.compile(r"[a-z]{2,20}")


class Counter(NamedTuple):
    """A counter in a line; lines of one kind have the same `shape`, the words around it.

    `position` are the numbers up to it, `head` is the text before it. Counters of a higher `level`
    show the progress better: epochs have steps of their own.
    """

    label: str
    number: float
    total: int | None
    unit: str
    level: int
    shape: tuple[str, ...]
    position: tuple[float, ...]
    head: str


def may_count(line: str) -> bool:
    """Return whether a line may have a counter; this is fast."""
    low = line.lower()
    return any(map(low.__contains__, _MARKS)) or ("/" in low and bool(_FRACTION.search(low)))


def counters_in(line: str) -> list[Counter]:
    """Return the counters of a line in order.

    >>> [found[:3] for found in counters_in("Epoch [2/10], Step [100/600], Loss: 0.1")]
    [('Epoch', 2, 10), ('Epoch [2/10], Step', 100, 600)]
    """
    low = line.lower()
    found: list[Counter] = []
    first = -1
    for match in () if NINJA.search(low) else COUNTER.finditer(low):
        word, begin = match["word"] or "", match.start()
        name = next(name for name in ("n", "bare", "pair") if match[name])
        number, total = _whole(match[name]), _whole(match["total"] or match["of"] or "")
        is_epoch = word.startswith("ep")
        if (match["part"] and not is_epoch) or number > (total or number):
            continue
        first = begin if first < 0 else first
        head, after = low[max(0, begin - 80) : begin], _WORD.search(low, match.end())
        exact = number + float(match["part"]) if match["part"] else number
        counter = Counter(
            label=line[first : match.start(name)].strip(" :=#[('\"|"),
            number=exact,
            total=total or None,
            unit="it" if word[:2] in ("", "it") else re.split("[ _]", word)[-1].rstrip("s"),
            level=0 if is_epoch else 2 if total else 1,
            shape=(re.sub(r"[\W\d_]+", "", head), word, after[0] if after else ""),
            position=(*(each.number for each in found), exact),
            head=head,
        )
        found.append(counter)
    return found


def _whole(text: str) -> int:
    return int(text.replace(",", "") or 0)
