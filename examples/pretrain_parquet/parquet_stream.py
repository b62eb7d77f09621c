"""Read rows of any number of parquet files in constant memory.

Of the whole set, only a table of its row groups (file, number, rows) is kept, read from the files'
footers. Everything else is computed: the order of the row groups from seed and epoch, a rank's rows
from its place in that order, and the order within a shuffle buffer from seed, epoch, lane and the
buffer's number. So row n of an epoch is found without the rows before it, and a resumed run needs
only its step.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    raise SystemExit("error: parquet files need pyarrow: pip install pyarrow") from None

COLUMNS = ("prompt", "response")
READ_ROWS = 128  # rows to decode at once
READ_BYTES = 1 << 16  # of each column, compressed
Row = tuple[str, str]


class DataError(Exception):
    """The data are unusable; the message has one line."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A part of a file that can be read separately."""

    path: Path
    number: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows `start` to `stop` of a row group."""

    group: RowGroup
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.group.path.name}, row group {self.group.number}, row {self.start}"


def find_row_groups(directory: Path) -> list[RowGroup]:
    """List the row groups of all `*.parquet` in a directory. Raises DataError."""
    files = sorted(directory.glob("*.parquet"))
    if not files:
        raise DataError(f"{directory} has no *.parquet")
    groups = [group for path in files for group in _row_groups(path)]
    if not any(group.rows for group in groups):
        raise DataError(f"the *.parquet in {directory} have no rows")
    return groups


def fingerprint(groups: Sequence[RowGroup]) -> str:
    """Return a text that changes with the files: their names, row groups and sizes."""
    sizes = {group.path: group.path.stat().st_size for group in groups}
    table = [(group.path.name, sizes[group.path], group.number, group.rows) for group in groups]
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()


def pieces(groups: Sequence[RowGroup], start: int, stop: int) -> list[Piece]:
    """Return the pieces of rows `start` to `stop` of these row groups, in order."""
    found, first = [], 0
    for group in groups:
        begin, end = max(start - first, 0), min(stop - first, group.rows)
        if begin < end:
            found.append(Piece(group=group, start=begin, stop=end))
        first += group.rows
    return found


def read(wanted: Sequence[Piece]) -> Iterator[Row]:
    """Yield the rows of these pieces; a file is open only while rows of it are read.

    Raises DataError.
    """
    for piece in wanted:
        try:
            yield from _read(piece)
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise DataError(f"{piece.group.path} can't be read: {_first_line(error)}") from error


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The rows that a rank learns from: as many as every other rank, and none of another's.

    An epoch has the row groups in a new order, which is cut into `lanes` runs of whole steps; the
    rows at its end that do not fill a step are left out. A step takes `effective_batch` rows,
    equally many from each lane. The number of lanes is that of the ranks at the start of the
    training, and never changes: with other ranks each reads several lanes or a part of one, and a
    step still has the same rows. `buffer_rows` are shuffled at a time.
    """

    groups: Sequence[RowGroup]
    rank: int
    world_size: int
    lanes: int
    effective_batch: int
    buffer_rows: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps_per_epoch == 0:
            rows, step = self.total_rows, self.effective_batch
            raise DataError(f"{rows} rows are fewer than the {step} rows of one step")

    @property
    def total_rows(self) -> int:
        """Return the rows of all ranks."""
        return sum(group.rows for group in self.groups)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of whole steps in an epoch."""
        return self.total_rows // self.effective_batch

    def rows(self, epoch: int, step: int = 0) -> Iterator[Row]:
        """Yield this rank's rows of an epoch, starting at a step. Raises DataError."""
        lane_rows = self.effective_batch // self.lanes
        own = [
            (self._lane(epoch, lane, step * lane_rows), begin, end)
            for lane, begin, end in self._shares()
        ]
        for _ in range(step, self.steps_per_epoch):
            for rows, begin, end in own:
                yield from list(islice(rows, lane_rows))[begin:end]

    def beginning(self, epoch: int, step: int) -> Piece:
        """Return where reading starts for a step: at the buffer with its first row."""
        lane, _, _ = self._shares()[0]
        first = step * self.effective_batch // self.lanes
        return self.pieces(epoch, lane, first // self.buffer_rows * self.buffer_rows)[0]

    def pieces(self, epoch: int, lane: int, first: int) -> list[Piece]:
        """Return where the rows of a lane are in an epoch, starting at number `first`."""
        order = list(self.groups)
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        size = self.steps_per_epoch * self.effective_batch // self.lanes
        return pieces(order, lane * size + first, (lane + 1) * size)

    def _shares(self) -> list[tuple[int, int, int]]:
        """Return the lanes that this rank reads, and its rows of each in a step."""
        own, lane_rows = self.effective_batch // self.world_size, self.effective_batch // self.lanes
        first = self.rank * own
        return [
            (lane, max(first - lane * lane_rows, 0), min(first + own - lane * lane_rows, lane_rows))
            for lane in range(first // lane_rows, -(-(first + own) // lane_rows))
        ]

    def _lane(self, epoch: int, lane: int, first: int) -> Iterator[Row]:
        buffer, skip = divmod(first, self.buffer_rows)
        source = read(self.pieces(epoch, lane, buffer * self.buffer_rows))
        while rows := list(islice(source, self.buffer_rows)):
            random.Random(f"{self.seed}/{epoch}/{lane}/{buffer}").shuffle(rows)
            rows = rows[skip:][::-1]
            while rows:
                yield rows.pop()  # do not hold it longer than needed
            buffer, skip = buffer + 1, 0


def _row_groups(path: Path) -> Iterator[RowGroup]:
    """Read the footer of a file; report problems before the training starts."""
    try:
        with parquet.ParquetFile(path) as file:
            metadata, names = file.metadata, file.schema_arrow.names
            kinds = {name: file.schema_arrow.field(name).type for name in names}
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not a parquet file: {_first_line(error)}") from error
    for name in COLUMNS:
        if name not in kinds:
            raise DataError(f"{path} has no column {name!r}, only {', '.join(names)}")
        if kinds[name] not in (pyarrow.string(), pyarrow.large_string()):
            raise DataError(f"{path}: column {name!r} has {kinds[name]} instead of text")
    for number in range(metadata.num_row_groups):
        yield RowGroup(path=path, number=number, rows=metadata.row_group(number).num_rows)


def _read(piece: Piece) -> Iterator[Row]:
    # Without pre_buffer=False and a buffer size, pyarrow loads the whole row group into memory.
    opened = parquet.ParquetFile(piece.group.path, pre_buffer=False, buffer_size=READ_BYTES)
    with opened as file:
        first = 0
        for batch in file.iter_batches(
            READ_ROWS, row_groups=[piece.group.number], columns=list(COLUMNS), use_threads=False
        ):
            begin, end = max(piece.start - first, 0), min(piece.stop - first, batch.num_rows)
            if begin < end:
                yield from _texts(batch.slice(begin, end - begin), piece)
            first += batch.num_rows
            if first >= piece.stop:
                return


def _texts(batch: pyarrow.RecordBatch, piece: Piece) -> Iterator[Row]:
    for name in COLUMNS:
        if batch.column(name).null_count:
            place = f"{piece.group.path}, row group {piece.group.number}"
            raise DataError(f"{place} has a row without {name}")
    return zip(*(batch.column(name).to_pylist() for name in COLUMNS), strict=True)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
