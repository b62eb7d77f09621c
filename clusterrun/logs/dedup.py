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
WINDOW_US = 2_000_000  # after its first copy, a text takes no more copies
QUIET_US = 300_000  # without a new copy: the text is written
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
        self, line: LogLine, body: str, key: str, numbers: Sequence[str], writer: int
    ) -> None:
        self.line, self.body = line, body
        self.key, self.numbers = key, numbers
        self.writers = writer  # one bit each
        self.last_us = line.epoch_us
        self._least = LEAST_WRITERS if "\n" in body or line.rank is None else LEAST_COPIES

    @property
    def is_folded(self) -> bool:
        """Return whether there are enough to fold."""
        return self.count >= self._least

    @property
    def text(self) -> str:
        """The text with `<n>` for each number that differs between copies."""
        if not self.varying:
            return self.body
        texts, numbers = _split(self.body)
        for place in self.varying:
            numbers[place] = "<n>"
        return "".join(text + number for text, number in zip(texts, [*numbers, ""], strict=True))

    def add(self, line: LogLine, numbers: Sequence[str], writer: int) -> None:
        """Add a copy."""
        self.writers |= writer
        self.count += 1
        if line.epoch_us > self.last_us:
            self.last_us = line.epoch_us
        if numbers is not self.numbers and numbers != self.numbers:  # `_shape` caches its lists
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
        self._now_us = self._due_us = 0  # in log time; no text is due before `_due_us`

    def feed(self, line: LogLine, body: str) -> None:
        """Take a line; first write the lines that have waited long enough."""
        if line.epoch_us > self._now_us:
            self._now_us = line.epoch_us
            if self._now_us >= self._due_us:
                self._release()  # sets _due_us
        copies = self._add_to_copies(line, body)
        if line is not copies.line and copies.is_folded:  # the first copy, queued, stands for all
            return
        if not self._queue:
            self._due_us = self._now_us + QUIET_US
        self._queue.append((copies, line, body))
        self._queued_chars += len(body)
        if len(self._queue) > HELD_LINES or self._queued_chars > HELD_CHARS:
            self._release()

    def _add_to_copies(self, line: LogLine, body: str) -> Copies:
        """Add a line to the first copies without one of its writer, or begin new ones."""
        bit = line.rank
        if bit is None or bit >= self._world_size:  # no rank, or one of a damaged file
            bit = self._nodes.setdefault(line.node, len(self._nodes))
        writer = 1 << bit
        key, numbers = _shape(body)
        same = self._open.setdefault((line.stream, key), [])
        nth = 0
        if same and same[0].writers & writer:  # its lines are in the first entries, without a gap
            nth = bisect_left(same, True, key=lambda copies: not copies.writers & writer)
        if nth < len(same):
            same[nth].add(line, numbers, writer)
            return same[nth]
        copies = Copies(line, body, key, numbers, writer)
        same.append(copies)
        return copies

    def drain(self) -> None:
        """Write all held lines."""
        self._release(is_last=True)

    def _release(self, *, is_last: bool = False) -> None:
        """Write lines that have waited long enough or exceed the limits; all if `is_last`."""
        queue = self._queue
        quiet_us, old_us = self._now_us - QUIET_US, self._now_us - WINDOW_US
        while queue:
            copies, line, body = queue[0]
            if copies.is_open:  # it may still get copies
                began_us = copies.line.epoch_us
                may_wait = copies.last_us > quiet_us and began_us > old_us and not is_last
                if may_wait and len(queue) <= HELD_LINES and self._queued_chars <= HELD_CHARS:
                    self._due_us = min(copies.last_us + QUIET_US, began_us + WINDOW_US)
                    return
                self._close(copies)
            queue.popleft()
            self._queued_chars -= len(body)
            if not copies.is_folded:
                self._write(line, body, None)
            elif line is copies.line:  # it stands for all; further copies are dropped
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
        self._counted: dict[tuple[Stream, str], tuple[int, set[int | str]]] = {}  # time, writers
        self._sources: set[Speaker] = set()

    def add(self, line: LogLine) -> None:
        """Add the next older line. If it is folded into one that was counted, it does not count."""
        source = (line.node, line.rank, line.stream)
        if line.partial and source in self._sources:
            return  # a newer line continues it, and was counted
        self._sources.add(source)
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
    """Return the part that copies share, and the numbers in which they may differ."""
    if "\n" not in body:
        low = body.lower()
        words = "step" in low or "loss" in low or "epoch" in low or "it/s" in low or "s/it" in low
        if words and _PROGRESS.search(low):  # people compare the numbers of ranks: keep them
            return body, ()
    texts, numbers = _split(body)
    key = _SEPARATOR.join(texts)
    if not numbers or not (key[0].isalpha() or _LETTER.search(key)):  # no numbers, or no letters
        return body, ()
    return key, numbers


def _split(body: str) -> tuple[list[str], list[str]]:
    """Return the texts around the numbers of a line, and the numbers, one fewer."""
    parts = (_NUMBERS_BUT_LINES if ", line " in body else _NUMBERS).split(body)
    return parts[::2], parts[1::2]


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
        while self._open:  # first pass on tracebacks that have waited too long, the oldest first
            oldest, (first, _) = next(iter(self._open.items()))
            if line.epoch_us - first.epoch_us <= TRACEBACK_US:
                break
            self._pass_on(oldest)
        source = (line.node, line.rank, line.stream)
        self._classifier.classify(source, line.text)
        has_more = self._classifier.is_in_traceback(source)
        if not has_more and source not in self._open:
            self.take(line, body)
            return
        _, bodies = self._open.setdefault(source, (line, []))
        bodies.append(body)
        if not has_more or len(bodies) >= _MAX_LINES or sum(map(len, bodies)) > _MAX_CHARS:
            self._pass_on(source)

    def drain(self) -> None:
        """Pass on incomplete tracebacks."""
        for source in list(self._open):
            self._pass_on(source)

    def _pass_on(self, source: Speaker) -> None:
        first, bodies = self._open.pop(source)
        self.take(first, "\n".join(bodies))
