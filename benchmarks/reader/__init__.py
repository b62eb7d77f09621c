"""Measure the memory of the example's parquet reader for growing data."""

from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_parquet"
WAYS = ("nothing", "stream", "iter_batches", "read_table")  # see `way`, which imports pyarrow
