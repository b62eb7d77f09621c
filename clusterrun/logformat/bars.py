"""Find the progress in a rank's output: the bars of tqdm, and lines that count steps."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

NINJA: Final = re.compile(r"^\[\d+/\d+\] \S*(?:c\+\+|g\+\+|gcc|clang|nvcc|hipcc|ccache)")
_MARKS: Final = ("step", "iter", "epoch", "batch", "update", "episode", "] loss")
_FRACTION: Final = re.compile(r"\d {0,20}/ {0,20}\d")
_COUNT: Final = r"\d{1,3}(?:,\d{3}){1,4}|\d{1,15}"
# No part of a path, a version, a time, a date or a share: `step-5.pt`, `step 1.2.3`, `step 5 %`
_BOUND: Final = r"(?! ?%|[\w/-]|[.:,]\d|\.\w)"
COUNTER: Final = re.compile(  # in lower case
    r"(?<![\w./=-])(?<!\* )(?P<word>(?:(?:global|train|training|optimizer)[ _])?steps?"
    r"|iter(?:ation)?s?|(?:mini-?)?batch(?:es)?|(?:num_)?updates?|episodes?|epochs?"
    r"|(?:it|ep)(?=[ :=#\[]{1,4}\d{1,9} ?/))\b"
    r"(?=[\s:=#\[('\"])['\"]?\s{0,20}[:=#]?\s{0,20}[\[('\"]? {0,20}"
    rf"(?P<n>{_COUNT})(?P<part>\.\d{{1,6}})?"
    rf"(?: {{0,20}}(?:/|of|out of) {{0,20}}(?P<total>{_COUNT}))?{_BOUND}"
    r"|(?:^|[\[(|]|: ) {0,20}(?P<bare>\d{1,15}) {0,20}/ {0,20}(?P<of>\d{1,15})"
    r"(?=[\s\])|,]|$)(?! \d\d:)"
    r"|^\[\d{1,9}, {1,20}(?P<pair>\d{1,15})\](?= loss)",  # of PyTorch's tutorial
)
_WORD: Final = re.compile(r"[a-z]{2,20}")


class Counter(NamedTuple):
    """A counter in a line, as the bar that it would be."""

    bar: Bar
    position: tuple[float, ...]  # the numbers of the line up to this one
    shape: tuple[str, ...]  # the words around it, the same in lines of one kind
    is_side: bool  # these words are of other work than the training's


def may_count(line: str) -> bool:
    """Return whether a line may have a counter; this is fast."""
    low = line.lower()
    return any(map(low.__contains__, _MARKS)) or ("/" in low and bool(_FRACTION.search(low)))


def counters_in(line: str, at: float) -> list[Counter]:
    """Return the counters of a line in order.

    >>> found = counters_in("Epoch [2/10], Step [100/600], Loss: 0.1", 7.0)
    >>> [(each.bar.description, each.bar.count, each.bar.total) for each in found]
    [('Epoch', 2, 10), ('Epoch [2/10], Step', 100, 600)]
    """
    low = line.lower()
    found: list[Counter] = []
    first: int | None = None  # where the first counter begins
    for match in () if NINJA.search(low) else COUNTER.finditer(low):
        word, begin = match["word"] or "", match.start()
        group = next(name for name in ("n", "bare", "pair") if match[name])  # the one that matched
        number, total = _whole(match[group]), _whole(match["total"] or match["of"] or "")
        is_epoch = word.startswith("ep")
        # Only epochs have a fraction, and no count exceeds its total.
        if (match["part"] and not is_epoch) or (total and number > total):
            continue
        first = begin if first is None else first
        head, following = low[max(0, begin - 80) : begin], _WORD.search(low, match.end())
        after = following[0] if following else ""
        # Mostly the words before a counter name the work, but also: "batch 5/9 saving".
        around = f"{head} {after}" if after.endswith("ing") else head
        side_work = _SIDE_WORK.search(around)
        label = line[first : match.start(group)].strip(" :=#[('\"|")
        level = 0 if is_epoch else 2 if total else 1  # the highest of nested bars is shown
        bar = Bar(
            description=(around[side_work.start() :] if side_work else label)[:SHOWN_LETTERS],
            count=number + float(match["part"]) if match["part"] else number,
            total=total or None,
            rate_per_s=None,
            unit=_unit(word),
            moved_at=at,
            level=level,
        )
        position = (*(each.bar.count for each in found), bar.count)
        shape = (re.sub(r"[\W\d_]+", "", head), word, after)
        found.append(Counter(bar, position, shape, is_side=side_work is not None))
    return found


def _unit(word: str) -> str:
    """Return what a counter counts: `step` for `global_steps`; `it` if no word says it."""
    if not word or word.startswith("it"):
        return "it"
    return re.split("[ _]", word)[-1].rstrip("s")


def _whole(text: str) -> int:
    """Return a whole number, written with or without commas; 0 for ""."""
    return int(text.replace(",", "") or 0)


NEAR_S = 60.0  # bars that moved within this time are nested, one inside the other
DRAWINGS = 16  # the last ones of a text are read: bars are drawn many times a second
LINES = 200  # the last ones that may count steps are read
MOST_LETTERS = 1000  # of a drawing; a longer text is not one
SHOWN_LETTERS = 40  # of a bar's description, and of its unit

_NUMBER = r"\d{1,15}(?:\.\d{1,15})?[kMGTPEZY]?"
_RATE = (
    rf", *(?P<rate>\?|{_NUMBER})"
    r"(?:s/ ?(?P<inverse_unit>[^,\]]+)| ?(?P<unit>[^,\]]*?)/s)[,\]]"
)
_WITH_TOTAL = re.compile(
    rf"\d{{1,3}}%(?:\|[^|]*\|)? (?P<n>{_NUMBER})/(?P<total>{_NUMBER}) \[[\d:]+<[\d:?]+{_RATE}"
)
_WITHOUT_TOTAL = re.compile(rf"(?<![\d./])(?P<n>{_NUMBER}) ?[^\W\d]* \[[\d:]+{_RATE}")
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f]")
_PREFIXES = {prefix: 1000.0**power for power, prefix in enumerate(" kMGTPEZY")}
_SIDE_WORK = re.compile(  # the work of a training before, between and after its steps
    r"\b(adding|building|cast|check|copy|creat|dev\b|download|dropping|eval|extract|fetch|filter|"
    r"flatten|generat|load|map\b|pack|predict|prepar|read|resolv|sampling|sanity|sav|tokeni[sz]|"
    r"test|truncat|upload|val\b|valid|warm|writ)",
    re.IGNORECASE,
)
_SIDE_UNITS = frozenset({"examples", "file", "files", "shard", "shards", "batches of examples"})


class Text(NamedTuple):
    """A printed text and its time in epoch seconds."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A progress bar as last drawn, or lines that count steps."""

    description: str
    count: float
    total: int | None
    rate_per_s: float | None
    unit: str
    moved_at: float  # when its count changed last
    level: int = 2  # the highest of nested bars is shown; 1: lines without a total, 0: epochs


def find_bar(printed: Iterable[Text]) -> Bar | None:
    """Return the bar that best shows the progress in a rank's texts; none that counts bytes."""
    bars: dict[tuple[str, int | None, str], Bar] = {}  # the last drawn at the end
    lines: deque[Text] = deque(maxlen=LINES)
    rises: dict[tuple[object, ...], _Rise] = {}
    for at, text in printed:
        for drawing in re.split(r"[\r\n]+", text)[-DRAWINGS:]:
            if bar := _parse(drawing, at):
                # The bars of "Epoch 1" and "Epoch 2" are one.
                key = (re.sub(r"[\d.]+", "", bar.description), bar.total, bar.unit)
                last = bars.pop(key, None)
                if last and last.count == bar.count:
                    bar = replace(bar, moved_at=last.moved_at)
                bars[key] = bar
            elif len(drawing) <= MOST_LETTERS and may_count(drawing):
                lines.append(Text(at, drawing))
    for at, text in lines:
        for counter in counters_in(_CONTROL.sub("", text.replace("\t", " ")), at):
            rises.setdefault((*counter.shape, counter.bar.total), _Rise()).see(counter)
    return _best([*bars.values(), *(rise.bar for rise in rises.values() if rise.bar)])


@dataclass(kw_only=True)
class _Rise:
    """Follows the counter of lines that differ in their numbers only; a bar once it has risen."""

    bar: Bar | None = None
    _position: tuple[float, ...] = (math.inf,)  # before the first line, which so begins anew
    _began: tuple[float, float] = (0.0, 0.0)  # number and time from which the rate is measured
    _rate: float | None = None

    def see(self, counter: Counter) -> None:
        """Take the counter of the next line; one that fell back, as in a new epoch, began anew."""
        before, self._position = self._position, counter.position
        if before == counter.position:  # it has not moved
            return
        bar = counter.bar
        is_set_back = counter.position < before  # or the first line
        is_new_epoch = bar.count <= before[-1]  # "epoch 2, step 1": only the last number fell
        if is_set_back or is_new_epoch:
            self._began = (bar.count, bar.moved_at)
        # A counter has to rise to be shown; other work than the training's also needs a total.
        if is_set_back or (counter.is_side and bar.total is None):
            return
        number, since = self._began
        if bar.count != number and bar.moved_at > since:
            self._rate = (bar.count - number) / (bar.moved_at - since)
        self.bar = replace(bar, rate_per_s=self._rate)


def _best(bars: list[Bar]) -> Bar | None:
    """Prefer bars that are not done, and training over other work.

    Of nested bars take the longest: an epoch's steps, not the epochs, nor those of an evaluation.
    """
    live = [bar for bar in bars if bar.total is None or bar.count < bar.total]
    training = [bar for bar in bars if bar.unit not in _SIDE_UNITS]
    steps = [bar for bar in training if not _SIDE_WORK.search(bar.description)]
    chosen = [bar for bar in live if bar in steps] or live or steps
    newest = max((bar.moved_at for bar in chosen), default=0.0)
    near = [bar for bar in chosen if newest - bar.moved_at <= NEAR_S]  # those that may be nested
    # Of equals, the last one that was drawn.
    return max(reversed(near), key=lambda bar: (bar.level, bar.total or bar.count), default=None)


def _parse(drawing: str, at: float) -> Bar | None:
    """Parse one drawing of a bar; None for other text.

    >>> bar = _parse("Epoch 1:  45%|####5     | 450/1000 [00:30<00:37, 14.9it/s, loss=2]", 7.0)
    >>> bar.description, bar.count, bar.total, bar.rate_per_s, bar.unit
    ('Epoch 1', 450, 1000, 14.9, 'it')
    """
    if "[" not in drawing or len(drawing) > MOST_LETTERS:
        return None
    found = _WITH_TOTAL.search(drawing) or _WITHOUT_TOTAL.search(drawing)
    if found is None:
        return None
    parts = found.groupdict()
    unit = _CONTROL.sub("", parts["inverse_unit"] or parts["unit"] or "it").strip()
    if unit == "B":  # bytes: a download
        return None
    head = _CONTROL.sub("", drawing[: found.start()]).strip().removesuffix(":")
    rate = 0.0 if parts["rate"] == "?" else _number(parts["rate"])
    return Bar(
        description=head[:SHOWN_LETTERS],
        count=round(_number(parts["n"])),
        total=round(_number(parts["total"])) if parts.get("total") else None,
        rate_per_s=(1 / rate if parts["inverse_unit"] else rate) if rate else None,  # 2.5s/it
        unit=unit[:SHOWN_LETTERS],
        moved_at=at,
    )


def _number(text: str) -> float:
    """Parse a number as tqdm abbreviates it.

    >>> _number("450"), _number("1.05k")
    (450.0, 1050.0)
    """
    return float(text[:-1]) * _PREFIXES[text[-1]] if text[-1] in _PREFIXES else float(text)
