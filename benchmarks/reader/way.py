"""One way to read every row of a parquet set as Python text, in a separate process.

`python -m benchmarks.reader.way WAY DIRECTORY [BYTES]` prints how many bytes of text it saw, and
fails if they are not BYTES.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pyarrow import parquet  # type: ignore[import-untyped]  # it has no types

from benchmarks.reader import EXAMPLE, WAYS

BATCH_ROWS = 128
BUFFER_ROWS = 1000
Rows = Iterator[tuple[str, str]]


def stream(directory: Path) -> Rows:
    """Read as the example does: shuffled, with a fifth of its default buffer."""
    sys.path.insert(0, str(EXAMPLE))
    import parquet_stream  # type: ignore[import-not-found]  # of the example

    yield from parquet_stream.Stream(
        groups=parquet_stream.find_row_groups(directory),
        rank=0,
        world_size=1,
        lanes=1,
        effective_batch=1,
        buffer_rows=BUFFER_ROWS,
        seed=0,
    ).rows(epoch=0)


def iter_batches(directory: Path) -> Rows:
    """Read batch by batch, file by file, with pyarrow's other defaults."""
    for path in sorted(directory.glob("*.parquet")):
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def read_table(directory: Path) -> Rows:
    """Read everything, then iterate over it batch by batch."""
    table = parquet.read_table(directory)
    for first in range(0, table.num_rows, BATCH_ROWS):
        columns = table.slice(first, BATCH_ROWS).columns
        yield from zip(*(column.to_pylist() for column in columns), strict=True)


def nothing(directory: Path) -> Rows:
    """Import pyarrow, and read nothing."""
    yield from ()


def main() -> None:
    name, directory, *expected = sys.argv[1:]
    ways = dict(zip(WAYS, (nothing, stream, iter_batches, read_table), strict=True))
    seen = sum(len(prompt) + len(response) for prompt, response in ways[name](Path(directory)))
    print(seen)
    if expected and name != "nothing" and seen != int(expected[0]):
        sys.exit(f"{name} saw {seen} bytes of text instead of {expected[0]}")


if __name__ == "__main__":
    main()
