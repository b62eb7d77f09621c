"""Fold lines that many ranks wrote alike into one."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from clusterrun.logs.lines import LogLine, Stream

LEAST_COPIES = 3  # fewer stay separate lines
WINDOW_US = 2_000_000
QUIET_US = 300_000
HELD_LINES = 10_000
HELD_CHARS = 16 * 1024 * 1024
REMEMBERED = 1_000  # folded texts whose late copies are known as such

# Numbers, versions, addresses and hexadecimal ones; within tracebacks, line numbers tell places.
_NUMBER = r"([0-9](?:x[0-9a-fA-F]+|[0-9]*(?:[.,][0-9]+)*(?:e[-+]?[0-9]+)?))"
_NUMBERS = re.compile(_NUMBER)
_NUMBERS_BUT_LINES = re.compile(rf"(?<!, line )(?<![0-9]){_NUMBER}")
_PROGRESS = re.compile(r"(?:step|loss|epoch)\w*\W{0,3}[0-9]|[0-9]\s*(?:it/s|s/it)")
_LETTER = re.compile(r"[^\W\d_]")
_SEPARATOR = "\udc00"  # no decoded text holds it


class Copies:
    """A text, and who wrote it: lines that are alike but for their numbers.

    What some wrote again is in the `next` copies: a rank is in each at most once.
    """

    count = 1
    is_open = True
    before = 0  # who wrote it in copies that have been shown
    varying: frozenset[int] = frozenset()  # places of the numbers that are not the same in all
    next: Copies | None = None
    _hint: Copies | None = None

    def __init__(
        self, line: LogLine, body: str, key: str, numbers: Sequence[str], bit: int
    ) -> None:
        self.line, self.body = line, body
        self.key, self.numbers = key, numbers
        self.taken = bit
        self.last_us = line.epoch_us

    @property
    def is_late(self) -> bool:
        """Say whether others had been shown before these came."""
        return self.before != 0

    @property
    def members(self) -> Iterator[int]:
        """Name the ranks, or for lines of launcher and agents the places of their nodes."""
        digits = bin(self.taken & ~self.before)[:1:-1]
        place = digits.find("1")
        while place >= 0:
            yield place
            place = digits.find("1", place + 1)

    @property
    def text(self) -> str:
        """The text with `<n>` for the numbers that are not the same in all copies."""
        if not self.varying:
            return self.body
        parts = _numbers_of(self.body).split(self.body)
        for place in self.varying:
            parts[2 * place + 1] = "<n>"
        return "".join(parts)

    def add(self, line: LogLine, numbers: Sequence[str], bit: int) -> None:
        """Count one more."""
        self.taken |= bit
        self.count += 1
        if line.epoch_us > self.last_us:
            self.last_us = line.epoch_us
        if numbers is not self.numbers and numbers != self.numbers:
            pairs = enumerate(zip(numbers, self.numbers, strict=True))
            self.varying |= {place for place, (one, other) in pairs if one != other}

    def find_without(self, bit: int) -> Copies | None:
        """Find the first copies, these or later ones, that a rank is not in.

        The search begins where the last one ended, as ranks repeat themselves at the same pace.
        """
        at: Copies | None = self._hint if self._hint and self._hint.taken & bit else self
        while at is not None and at.taken & bit:
            self._hint, at = at, at.next
        return at

    def append(self, copies: Copies) -> None:
        """Put copies behind the last, which the search for a place has found."""
        (self._hint or self).next = copies

    def learn(self, before: Copies) -> None:
        """Take over what those before know of the last place."""
        if before._hint is not before:
            self._hint = before._hint


Write = Callable[[LogLine, str, Copies | None], None]


class Dedup:
    """Holds lines for a moment of log time, and gives `write` one line for all copies of a text.

    Lines keep the order in which they, or their first copies, came. What one rank says twice is
    shown twice. Copies that come too late for their line make another one. `nodes` names the place
    of each node that had a line of its launcher or agent.
    """

    def __init__(self, *, write: Write, world_size: int) -> None:
        self.nodes: dict[str, int] = {}
        self._write, self._world_size = write, world_size
        self._queue: deque[tuple[Copies, LogLine, str]] = deque()
        self._queued_chars = 0
        # What is in the queue: the first copies of each text, and of each key.
        self._by_text: dict[Stream, dict[str, Copies]] = {stream: {} for stream in Stream}
        self._by_key: dict[Stream, dict[str, Copies]] = {stream: {} for stream in Stream}
        self._shown: dict[tuple[Stream, str], int] = {}
        self._now_us = self._due_us = 0

    def feed(self, line: LogLine, body: str) -> None:
        """Take a line; what need not wait any longer is written first."""
        if line.epoch_us > self._now_us:
            self._now_us = line.epoch_us
            if self._now_us >= self._due_us:
                self._release()
        place = line.rank
        if place is None:
            place = self.nodes.setdefault(line.node, len(self.nodes))
        elif place >= self._world_size:  # of a damaged file
            self._enqueue(_lone(line, body), line, body)
            return
        bit = 1 << place
        known = self._by_text[line.stream].get(body)
        if known is None:
            key, numbers = _shape(body)
            known = self._by_key[line.stream].get(key)
        else:
            key, numbers = known.key, known.numbers
        copies = known if known is None or not known.taken & bit else known.find_without(bit)
        if copies is None:
            copies = Copies(line, body, key, numbers, bit)
            self._begin(copies, known)
        else:
            copies.add(line, numbers, bit)
        if copies.count < LEAST_COPIES:
            self._enqueue(copies, line, body)

    def drain(self) -> None:
        """Write all that is held."""
        self._release(at_most=0)

    def _begin(self, copies: Copies, known: Copies | None) -> None:
        stream, bit = copies.line.stream, copies.taken
        if known is None:
            self._by_key[stream][copies.key] = copies
        else:
            known.append(copies)
        self._by_text[stream].setdefault(copies.body, copies)
        shown = self._shown.get((stream, copies.key), 0) if self._shown else 0
        if shown and not shown & bit:
            copies.before = shown
            copies.taken |= shown

    def _enqueue(self, copies: Copies, line: LogLine, body: str) -> None:
        queue = self._queue
        if not queue:
            self._due_us = self._now_us + QUIET_US
        queue.append((copies, line, body))
        self._queued_chars += len(body)
        if len(queue) > HELD_LINES or self._queued_chars > HELD_CHARS:
            self._release()

    def _release(self, *, at_most: int | None = None) -> None:
        """Write what has waited long enough, and more until no more than so much is held."""
        queue = self._queue
        at_most = HELD_LINES if at_most is None else at_most
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
            if copies.count < LEAST_COPIES:
                self._write(line, body, None)
            elif line is copies.line:
                self._write(line, copies.text, copies)

    def _close(self, copies: Copies) -> None:
        copies.is_open = False
        stream, key, body = copies.line.stream, copies.key, copies.body
        by_key, by_text = self._by_key[stream], self._by_text[stream]
        following = copies.next
        if following is None:
            del by_key[key]
        else:  # copies of one key close in the order in which they began
            by_key[key] = following
            following.learn(copies)
        if by_text.get(body) is copies:
            del by_text[body]
            if following is not None and following.body == body:
                by_text[body] = following
        if copies.count >= LEAST_COPIES or copies.before:
            self._shown[stream, key] = copies.taken
            if len(self._shown) > REMEMBERED:
                del self._shown[next(iter(self._shown))]


class LineCount:
    """Counts lines, the newest first; `folded`: those that many ranks wrote alike as one."""

    def __init__(self, *, folded: bool) -> None:
        self.count = 0
        self._folded = folded
        self._seen: dict[tuple[Stream, str], tuple[int, set[int | str]]] = {}

    def add(self, line: LogLine) -> None:
        """Take the line before."""
        if not self._folded:
            self.count += 1
            return
        key, _ = _shape(line.text.decode("utf-8", "replace"))
        who: int | str = line.node if line.rank is None else line.rank
        newest_us, writers = self._seen.get((line.stream, key), (0, set[int | str]()))
        if writers and who not in writers and newest_us - line.epoch_us <= WINDOW_US:
            writers.add(who)
            return
        self.count += 1
        self._seen[line.stream, key] = line.epoch_us, {who}


def _lone(line: LogLine, body: str) -> Copies:
    lone = Copies(line, body, "", (), 0)
    lone.is_open = False
    return lone


def _shape(body: str) -> tuple[str, Sequence[str]]:
    """Give what must be the same in a copy, and the numbers that may differ."""
    if "\n" not in body:
        low = body.lower()
        words = "step" in low or "loss" in low or "epoch" in low or "it/s" in low or "s/it" in low
        if words and _PROGRESS.search(low):
            return body, ()
    parts = _numbers_of(body).split(body)
    if len(parts) == 1:
        return body, ()
    key = _SEPARATOR.join(parts[::2])
    if not (key[0].isalpha() or _LETTER.search(key)):  # numbers are all that it says
        return body, ()
    return key, parts[1::2]


def _numbers_of(body: str) -> re.Pattern[str]:
    return _NUMBERS_BUT_LINES if ", line " in body else _NUMBERS
