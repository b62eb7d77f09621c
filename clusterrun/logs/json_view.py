"""Log lines as programs read them: one JSON object each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from clusterrun.logformat.lines import MAX_SPEAKERS, Gap, LogLine, Stream
from clusterrun.logformat.symptoms import Classifier
from clusterrun.logs.text import utc_time
from clusterrun.logs.view import Joiner, View


def to_json(data: Mapping[str, Any]) -> bytes:
    """Return an object as one line of JSON."""
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


class JsonView(View):
    """Writes one object per line; `file_of` names a node's log within the run directory."""

    def __init__(
        self,
        *,
        write: Callable[[bytes], None],
        file_of: Callable[[int, str], str],
        procs_per_node: int,
        attempt: int,
    ) -> None:
        super().__init__(write, Joiner(exact=True), attempt)
        self._file_of = file_of
        self._procs_per_node = max(procs_per_node, 1)
        self._classifier = Classifier()
        self._frames: dict[tuple[str, int | None, Stream], tuple[str, str]] = {}

    def start_attempt(self, attempt: int) -> None:
        """Write what is left of the previous attempt."""
        super().start_attempt(attempt)
        self._frames.clear()

    def _show_line(self, line: LogLine) -> None:
        source = (line.node, line.rank, line.stream)
        before, after = self._frames.get(source) or self._new_frame(source)
        time = "null" if not line.epoch_us else f'"{utc_time(line.epoch_us)}"'
        level = '"error"' if self._classifier.classify(source, line.text) else "null"
        text = encode_basestring_ascii(line.text.decode("utf-8", "replace"))
        self._put(
            (
                f'{{"type":"line","ts":{time},{before},"level":{level},'
                f'"text":{text},{after},"offset":{line.offset},'
                f'"partial":{"true" if line.partial else "false"}}}\n'
            ).encode()
        )

    def _show_gap(self, line: LogLine, gap: Gap) -> None:
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
