"""Fold equal lines of many ranks into one, and keep the lines of a traceback together."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from clusterrun.logformat.lines import LogLine, Speaker, Stream
from clusterrun.logformat.symptoms import Classifier

LEAST_COPIES = 3  # to fold lines of ranks; fewer stay separate
LEAST_WRITERS = 2  # to fold tracebacks, and lines of launchers and agents
WINDOW_US = 2_000_000
QUIET_US = 300_000
HELD_LINES = 10_000
HELD_CHARS = 16 * 1024 * 1024
TRACEBACK_US = 300_000  # that a traceback may wait for its last line
_MAX_LINES = 500  # of a traceback
_MAX_CHARS = 64 * 1024

# Numbers, versions, hexadecimal addresses. Line numbers of tracebacks must not differ.
_NUMBER = r"([0-9](?:x[0-9a-fA-F]+|[0-9]*(?:[.,][0-9]+)*(?:e[-+]?[0-9]+)?))"
_NUMBERS = re.compile(_NUMBER)
_NUMBERS_BUT_LINES = re.compile(rf"(?<!, line )(?<![0-9]){_NUMBER}")
_PROGRESS = re.compile(r"(?:step|loss|epoch)\w{0,30}\W{0,3}[0-9]|[0-9]\s{0,9}(?:it/s|s/it)")
_LETTER = re.compile(r"[^\W\d_]")
_SEPARATOR = "\udc00"  # in no decoded text


class Copies:
    """A text and its writers: lines of several ranks that differ only in numbers."""

    count = 1
    is_open = True
    varying: frozenset[int] = frozenset()  # indexes of the numbers that differ

    def __init__(
        self, line: LogLine, body: str, key: str, numbers: Sequence[str], bit: int
    ) -> None:
        self.line, self.body = line, body
        self.key, self.numbers = key, numbers
        self.taken = bit
        self.last_us = line.epoch_us
        self._is_block = "\n" in body

    @property
    def is_folded(self) -> bool:
        """Return whether there are enough to fold."""
        few = self._is_block or self.line.rank is None
        return self.count >= (LEAST_WRITERS if few else LEAST_COPIES)

    @property
    def text(self) -> str:
        """The text with `<n>` for each number that differs between copies."""
        if not self.varying:
            return self.body
        parts = _numbers_of(self.body).split(self.body)
        for place in self.varying:
            parts[2 * place + 1] = "<n>"
        return "".join(parts)

    def add(self, line: LogLine, numbers: Sequence[str], bit: int) -> None:
        """Add a copy."""
        self.taken |= bit
        self.count += 1
        if line.epoch_us > self.last_us:
            self.last_us = line.epoch_us
        if numbers is not self.numbers and numbers != self.numbers:
            pairs = enumerate(zip(numbers, self.numbers, strict=True))
            self.varying |= {place for place, (one, other) in pairs if one != other}


Write = Callable[[LogLine, str, Copies | None], None]


class Dedup:
    """Holds lines for a moment of log time, and calls `write` once for all copies of a text.

    Lines keep their order; folded ones have the place of their first copy. Copies of one rank stay
    separate. Late copies make another folded line.
    """

    def __init__(self, *, write: Write, world_size: int) -> None:
        self._write, self._world_size = write, world_size
        self._nodes: dict[str, int] = {}  # whose launcher or agent wrote a line, numbered
        self._queue: deque[tuple[Copies, LogLine, str]] = deque()
        self._queued_chars = 0
        # Copies in the queue: a rank's nth line with a text is in its nth entry.
        self._open: dict[tuple[Stream, str], list[Copies]] = {}
        self._now_us = self._due_us = 0

    def feed(self, line: LogLine, body: str) -> None:
        """Take a line; first write the lines that have waited long enough."""
        if line.epoch_us > self._now_us:
            self._now_us = line.epoch_us
            if self._now_us >= self._due_us:
                self._release()
        place = line.rank
        if place is None or place >= self._world_size:  # a rank of a damaged file
            place = self._nodes.setdefault(line.node, len(self._nodes))
        key, numbers = _shape(body)
        copies = self._find(line, body, key, numbers, 1 << place)
        if line is not copies.line and copies.is_folded:
            return
        if not self._queue:
            self._due_us = self._now_us + QUIET_US
        self._queue.append((copies, line, body))
        self._queued_chars += len(body)
        if len(self._queue) > HELD_LINES or self._queued_chars > HELD_CHARS:
            self._release()

    def _find(self, line: LogLine, body: str, key: str, numbers: Sequence[str], bit: int) -> Copies:
        """Add a line to the first copies without its rank, or begin new ones."""
        same = self._open.setdefault((line.stream, key), [])
        nth = 0
        if same and same[0].taken & bit:
            nth = bisect_left(same, True, key=lambda copies: not copies.taken & bit)
        if nth < len(same):
            same[nth].add(line, numbers, bit)
            return same[nth]
        copies = Copies(line, body, key, numbers, bit)
        same.append(copies)
        return copies

    def drain(self) -> None:
        """Write all held lines."""
        self._release(is_last=True)

    def _release(self, *, is_last: bool = False) -> None:
        """Write lines that have waited long enough or exceed the limits; all if `is_last`."""
        queue = self._queue
        at_most = 0 if is_last else HELD_LINES
        quiet_us, old_us = self._now_us - QUIET_US, self._now_us - WINDOW_US
        while queue:
            copies, line, body = queue[0]
            if copies.is_open:
                began_us = copies.line.epoch_us
                if (
                    copies.last_us > quiet_us
                    and began_us > old_us
                    and len(queue) <= at_most
                    and self._queued_chars <= HELD_CHARS
                ):
                    self._due_us = min(copies.last_us + QUIET_US, began_us + WINDOW_US)
                    return
                self._close(copies)
            queue.popleft()
            self._queued_chars -= len(body)
            if not copies.is_folded:
                self._write(line, body, None)
            elif line is copies.line:
                self._write(line, copies.text, copies)

    def _close(self, copies: Copies) -> None:
        """Stop adding lines; entries of one text close in the order in which they began."""
        copies.is_open = False
        text = (copies.line.stream, copies.key)
        self._open[text].pop(0)
        if not self._open[text]:
            del self._open[text]


class LineCount:
    """Counts lines, newest first; `folded` counts copies of many ranks as one.

    The pieces of a line, such as the states of a progress bar, count as one.
    """

    def __init__(self, *, folded: bool) -> None:
        self.count = 0
        self._folded = folded
        self._counted: dict[tuple[Stream, str], tuple[int, set[int | str]]] = {}
        self._sources: set[Speaker] = set()

    def add(self, line: LogLine) -> None:
        """Add the next older line."""
        if line.partial and (line.node, line.rank, line.stream) in self._sources:
            return  # the line that it begins is counted
        self._sources.add((line.node, line.rank, line.stream))
        if not self._folded:
            self.count += 1
            return
        key, _ = _shape(line.text.decode("utf-8", "replace"))
        who: int | str = line.node if line.rank is None else line.rank
        newest_us, writers = self._counted.get((line.stream, key), (0, set[int | str]()))
        if writers and who not in writers and newest_us - line.epoch_us <= WINDOW_US:
            writers.add(who)
            return
        self.count += 1
        self._counted[line.stream, key] = line.epoch_us, {who}


@lru_cache(maxsize=1024)
def _shape(body: str) -> tuple[str, Sequence[str]]:
    """Return the part that copies share, and the numbers that may differ."""
    if "\n" not in body:
        low = body.lower()
        words = "step" in low or "loss" in low or "epoch" in low or "it/s" in low or "s/it" in low
        if words and _PROGRESS.search(low):
            return body, ()
    parts = _numbers_of(body).split(body)
    if len(parts) == 1:
        return body, ()
    key = _SEPARATOR.join(parts[::2])
    if not (key[0].isalpha() or _LETTER.search(key)):  # only numbers
        return body, ()
    return key, parts[1::2]


def _numbers_of(body: str) -> re.Pattern[str]:
    return _NUMBERS_BUT_LINES if ", line " in body else _NUMBERS


@dataclass(kw_only=True)
class Tracebacks:
    """Passes lines to `take`; a traceback as one text, once its last line has arrived."""

    take: Callable[[LogLine, str], None]
    _classifier: Classifier = field(default_factory=Classifier)
    _open: dict[Speaker, tuple[LogLine, list[str]]] = field(default_factory=dict)

    def feed(self, line: LogLine, body: str) -> None:
        """Pass a line on, or hold it with the rest of its traceback."""
        if not self._open and "Traceback (most" not in body:
            self.take(line, body)
            return
        while self._open:  # in the order in which they began
            oldest, (first, _) = next(iter(self._open.items()))
            if line.epoch_us - first.epoch_us <= TRACEBACK_US:
                break
            self._give(oldest)
        source = (line.node, line.rank, line.stream)
        self._classifier.classify(source, line.text)
        is_inside = self._classifier.is_in_traceback(source)
        if not is_inside and source not in self._open:
            self.take(line, body)
            return
        _, bodies = self._open.setdefault(source, (line, []))
        bodies.append(body)
        if not is_inside or len(bodies) >= _MAX_LINES or sum(map(len, bodies)) > _MAX_CHARS:
            self._give(source)

    def drain(self) -> None:
        """Pass on incomplete tracebacks."""
        for source in list(self._open):
            self._give(source)

    def _give(self, source: Speaker) -> None:
        first, bodies = self._open.pop(source)
        self.take(first, "\n".join(bodies))
