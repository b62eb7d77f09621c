"""Log lines as the ranks wrote them, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from clusterrun.logformat.lines import RECORDS, LogLine, Stream, parse_gap
from clusterrun.logs.joining import Joiner
from clusterrun.logs.text_view import gap_sentence, source_name


class RawView:
    """Calls `write` with the bytes of lines, in order for every rank and stream.

    Lines of several sources are not torn into each other; only one source can be passed on piece
    by piece. `note` reports what was lost, as stdout is for the bytes alone.
    """

    def __init__(
        self, *, write: Callable[[bytes], None], note: Callable[[str], None], one_source: bool
    ) -> None:
        self._put, self._note = write, note
        self._joiner = None if one_source else Joiner(exact=True)
        self._begun = self._joiner.begun if self._joiner else {}

    def show_all(self, lines: Sequence[LogLine]) -> None:
        """Take many lines or pieces, of which nearly all are whole."""
        _, nodes, ranks, streams, texts, partials, _ = zip(*lines, strict=True)
        is_whole = True not in partials and RECORDS.isdisjoint(streams)
        if is_whole and self._begun:
            is_whole = self._begun.keys().isdisjoint(zip(nodes, ranks, streams, strict=True))
        if is_whole:
            self._put(b"\n".join(texts) + b"\n")
            return
        for line in lines:
            self.show(line)

    def show(self, line: LogLine) -> None:
        """Take a line or a piece; what is whole is written."""
        if line.partial or line.stream in RECORDS or self._begun:
            self._show_piece(line)
        else:
            self._put(line.text + b"\n")

    def _show_piece(self, line: LogLine) -> None:
        if line.stream in RECORDS:
            self._show_record(line)
            return
        whole = self._joiner.feed(line) if self._joiner else line
        if whole is not None:
            self._put(whole.text if whole.partial else whole.text + b"\n")

    def pause(self) -> None:
        """Write the pieces that have waited for their end for long."""
        if self._joiner:
            self._put_pieces(self._joiner.pause())

    def drain(self) -> None:
        """Write all pieces."""
        if self._joiner:
            self._put_pieces(self._joiner.drain())

    def start_attempt(self, attempt: int) -> None:
        """Write all that is left of the attempt before."""
        self.drain()

    def _show_record(self, line: LogLine) -> None:
        gap = parse_gap(line.text) if line.stream is Stream.GAP else None
        if gap is None:
            return
        if self._joiner:
            self._put_pieces(self._joiner.cut_off(line.node, line.rank, gap.stream))
        self._note(f"{source_name(line)} ~ {gap_sentence(gap)}")

    def _put_pieces(self, pieces: Iterable[LogLine]) -> None:
        for piece in pieces:
            self._put(piece.text)
