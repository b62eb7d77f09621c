"""Keep the lines of a Python traceback together, so that whole tracebacks can be compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from clusterrun.logformat.lines import LogLine, Stream
from clusterrun.logformat.symptoms import Classifier

WAIT_US = 300_000
_MAX_LINES = 500
_MAX_CHARS = 64 * 1024

Take = Callable[[LogLine, str], None]


@dataclass(kw_only=True)
class _Block:
    first: LogLine
    bodies: list[str] = field(default_factory=list)
    chars: int = 0


@dataclass(kw_only=True)
class Tracebacks:
    """Passes lines to `take`; a traceback as one text, once its last line has arrived."""

    take: Take
    _classifier: Classifier = field(default_factory=Classifier)
    _open: dict[tuple[str, int | None, Stream], _Block] = field(default_factory=dict)

    def feed(self, line: LogLine, body: str) -> None:
        """Pass a line on, or hold it with the rest of its traceback."""
        if not self._open and "Traceback (most" not in body:
            self.take(line, body)
            return
        self._give_late_ones(line.epoch_us)
        source = (line.node, line.rank, line.stream)
        self._classifier.classify(source, line.text)
        is_inside = self._classifier.is_in_traceback(source)
        if not is_inside and source not in self._open:
            self.take(line, body)
            return
        block = self._open.setdefault(source, _Block(first=line))
        block.bodies.append(body)
        block.chars += len(body)
        if not is_inside or len(block.bodies) >= _MAX_LINES or block.chars > _MAX_CHARS:
            self._give(source)

    def drain(self) -> None:
        """Pass on incomplete tracebacks."""
        for source in list(self._open):
            self._give(source)

    def _give_late_ones(self, now_us: int) -> None:
        while self._open:  # in the order in which they began
            source, block = next(iter(self._open.items()))
            if now_us - block.first.epoch_us <= WAIT_US:
                return
            self._give(source)

    def _give(self, source: tuple[str, int | None, Stream]) -> None:
        block = self._open.pop(source, None)
        if block:
            self.take(block.first, "\n".join(block.bodies))
