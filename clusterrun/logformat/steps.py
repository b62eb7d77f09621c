"""Find the counters in a line that a training printed: `Epoch [2/10], Step [100/600], loss 0.1`."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

_MARKS: Final = ("step", "iter", "epoch", "batch", "update", "episode", "] loss")
_FRACTION: Final = re.compile(r"\d {0,20}/ {0,20}\d")
NINJA: Final = re.compile(r"^\[\d+/\d+\] \S*(?:c\+\+|g\+\+|gcc|clang|nvcc|hipcc|ccache)")
_HEAD_LETTERS: Final = 80  # before a counter
_NUMBER: Final = r"\d{1,3}(?:,\d{3}){1,4}|\d{1,15}"
# No part of a path, a version, a time, a date or a share: `step-5.pt`, `step 1.2.3`, `step 5 %`
_END: Final = r"(?! ?%|[\w/-]|[.:,]\d|\.\w)"
COUNTER: Final = re.compile(
    r"(?<![\w./=-])(?<!\* )(?P<word>(?:(?:global|train|training|optimizer)[ _])?steps?"
    r"|iter(?:ation)?s?|(?:mini-?)?batch(?:es)?|(?:num_)?updates?|episodes?|epochs?|it|ep)\b"
    r"(?=[\s:=#\[('\"])['\"]?\s{0,20}[:=#]?\s{0,20}[\[('\"]? {0,20}"
    rf"(?P<n>{_NUMBER})(?P<part>\.\d{{1,6}})?"
    rf"(?: {{0,20}}(?:/|of|out of) {{0,20}}(?P<total>{_NUMBER}))?{_END}"
    r"|(?:^|[\[(|]|: ) {0,20}(?P<bare>\d{1,15}) {0,20}/ {0,20}(?P<of>\d{1,15})"
    r"(?=[\s\])|,]|$)(?! \d\d:)"
    r"|^\[\d{1,9}, {1,20}(?P<pair>\d{1,15})\](?= loss)",  # of PyTorch's tutorial
)
_WORD: Final = re.compile(r"[a-z]{2,20}")


class Counter(NamedTuple):
    """A counter in a line.

    Lines of one kind have the same `shape`, the words around the counter. `position` are the
    numbers up to it. `head` is the text before it, `label` its name with the counters before it.
    """

    word: str
    number: float
    total: int | None
    shape: tuple[str, ...]
    position: tuple[float, ...]
    head: str
    label: str
    start: int

    @property
    def level(self) -> int:
        """Return how well it shows the progress; what counts epochs has steps of its own."""
        return 0 if self.word.startswith("ep") else 2 if self.total else 1

    @property
    def unit(self) -> str:
        """Return what it counts."""
        word = re.split(r"[ _]", self.word)[-1].rstrip("s")
        return word if word and not word.startswith("it") else "it"


def may_count(line: str) -> bool:
    """Return whether a line may have a counter; this is fast."""
    low = line.lower()
    return any(map(low.__contains__, _MARKS)) or ("/" in low and _FRACTION.search(low) is not None)


def counters_in(line: str) -> list[Counter]:
    """Return the counters of a line in order.

    >>> [found[:3] for found in counters_in("Epoch [2/10], Step [100/600], Loss: 0.1")]
    [('epoch', 2, 10), ('step', 100, 600)]
    """
    low = line.lower()
    if NINJA.search(low):
        return []
    found: list[Counter] = []
    for match in COUNTER.finditer(low):
        counter = _counter(line if len(line) == len(low) else low, match, found)
        is_prose = counter.word in ("it", "ep") and counter.head.rstrip()[-1:].isalpha()
        is_version = counter.number % 1 and counter.word[:2] != "ep"
        if not (is_prose or is_version or counter.number > (counter.total or math.inf)):
            found.append(counter)
    return found


def _counter(line: str, match: re.Match[str], before: list[Counter]) -> Counter:
    word = match["word"] or ""
    name = "n" if word else "bare" if match["bare"] else "pair"
    total = _whole(match["total"] or match["of"])
    after = _WORD.search(match.string, match.end())
    first, at = (before[0].start if before else match.start()), match.start(name)
    head = line[max(0, match.start() - _HEAD_LETTERS) : match.start()]
    number = _whole(match[name]) + (float(match["part"]) if match["part"] else 0)
    return Counter(
        word=word,
        number=number,
        total=total or None,
        shape=(re.sub(r"[\W\d_]+", "", head), word, after[0] if after else ""),
        position=(*(each.number for each in before), number),
        head=head,
        label=re.sub(r"^[ |:]+|[ :=#\[('\"|]+$", "", line[first:at]),
        start=match.start(),
    )


def _whole(text: str | None) -> int:
    return int(text.replace(",", "")) if text else 0
