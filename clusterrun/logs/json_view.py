"""Log lines as programs read them: one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from clusterrun.logformat.lines import MAX_SPEAKERS, Gap, LogLine, Stream
from clusterrun.logformat.symptoms import Classifier
from clusterrun.logs.dedup import Copies, Dedup
from clusterrun.logs.text import utc_time
from clusterrun.logs.view import Joiner, View
from clusterrun.shared.hostlist import fold_hosts, fold_ranks

_LEVELS = {"!": '"error"', " ": "null"}  # the mark is part of the text, so that copies share it


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


class JsonView(View):
    """Writes one object per line, or with `dedup` one for all copies of a text.

    `file_of` names a node's log of an attempt, relative to the run directory.
    """

    def __init__(
        self,
        *,
        write: Callable[[bytes], None],
        file_of: Callable[[int, str], str],
        world_size: int,
        procs_per_node: int,
        attempt: int,
        dedup: bool = False,
    ) -> None:
        super().__init__(write, Joiner(exact=True), attempt)
        self._file_of = file_of
        self._procs_per_node = max(procs_per_node, 1)
        self._classifier = Classifier()
        self._dedup = Dedup(write=self._write, world_size=world_size)
        self._folders = (self._dedup,)
        self._take = self._dedup.feed if dedup else self._write
        self._frames: dict[tuple[str, int | None, Stream], tuple[str, str]] = {}

    def start_attempt(self, attempt: int) -> None:
        """Write what is left of the previous attempt."""
        super().start_attempt(attempt)
        self._frames.clear()

    def _show_line(self, line: LogLine) -> None:
        source = (line.node, line.rank, line.stream)
        mark = "!" if self._classifier.classify(source, line.text) else " "
        self._take(line, mark + line.text.decode("utf-8", "replace"))

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
        self.write_held()
        record = {
            "type": "gap",
            "ts": utc_time(line.epoch_us),
            "node": line.node,
            "rank": line.rank,
            "stream": gap.stream.label,
            "bytes": gap.size_bytes,
            "reason": gap.reason,
        }
        self._put(to_json(record))

    def _write(self, line: LogLine, marked: str, copies: Copies | None = None) -> None:
        if copies:
            self._write_copies(line, marked, copies)
            return
        source = (line.node, line.rank, line.stream)
        before, after = self._frames.get(source) or self._new_frame(source)
        time = "null" if not line.epoch_us else f'"{utc_time(line.epoch_us)}"'
        self._put(
            (
                f'{{"type":"line","ts":{time},{before},"level":{_LEVELS[marked[0]]},'
                f'"text":{encode_basestring_ascii(marked[1:])},{after},"offset":{line.offset},'
                f'"partial":{"true" if line.partial else "false"}}}\n'
            ).encode()
        )

    def _new_frame(self, source: tuple[str, int | None, Stream]) -> tuple[str, str]:
        """Format once the fields that all lines of a source share."""
        node, rank, stream = source
        before = {
            "node": node,
            "rank": rank,
            "local_rank": None if rank is None else rank % self._procs_per_node,
            "stream": stream.label,
            "attempt": self._attempt,
        }
        after = {"file": self._file_of(self._attempt, node)}
        frame = to_json(before).decode()[1:-2], to_json(after).decode()[1:-2]
        if len(self._frames) < MAX_SPEAKERS:
            self._frames[source] = frame
        return frame

    def _write_copies(self, line: LogLine, marked: str, copies: Copies) -> None:
        if line.rank is None:
            names = list(self._dedup.nodes)
            who = {"nodes": fold_hosts(names[place] for place in copies.members)}
        else:
            who = {"ranks": fold_ranks(copies.members)}
        dup = {
            "type": "dup",
            "ts": utc_time(line.epoch_us),
            "last_ts": utc_time(copies.last_us),
            "count": copies.count,
            **who,
            "stream": line.stream.label,
            "attempt": self._attempt,
            "level": "error" if marked[0] == "!" else None,
            "text": marked[1:],
        }
        self._put(to_json(dup))
