"""Log lines as the ranks wrote them, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from clusterrun.logformat.lines import RECORDS, Gap, LogLine
from clusterrun.logs.joining import HELD_BYTES, Joiner
from clusterrun.logs.text_view import gap_sentence, source_name
from clusterrun.logs.view import View


class RawView(View):
    """Writes the bytes of lines, in order for every rank and stream.

    Lines of several sources are never interleaved; a single source is passed on piece by piece.
    `note` reports what was lost: stdout is for the bytes only.
    """

    def __init__(
        self, *, write: Callable[[bytes], None], note: Callable[[str], None], one_source: bool
    ) -> None:
        super().__init__(write, Joiner(exact=True, most_held=0 if one_source else HELD_BYTES))
        self._note = note

    def show_all(self, lines: Sequence[LogLine]) -> None:
        """Write many lines or pieces; nearly all are whole."""
        _, nodes, ranks, streams, texts, partials, _ = zip(*lines, strict=True)
        is_whole = True not in partials and RECORDS.isdisjoint(streams)
        if is_whole and self._joiner.begun:
            is_whole = self._joiner.begun.keys().isdisjoint(zip(nodes, ranks, streams, strict=True))
        if is_whole:
            self._put(b"\n".join(texts) + b"\n")
        else:
            super().show_all(lines)

    def _show_line(self, line: LogLine) -> None:
        self._put(line.text if line.partial else line.text + b"\n")

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        self._note(f"{source_name(line)} ~ {gap_sentence(gap)}")
