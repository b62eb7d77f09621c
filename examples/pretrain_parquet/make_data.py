"""Write a parquet set of any size with columns `prompt` and `response`, for experiments.

Prompts ask what somebody sells, and responses answer in sentences of one pattern: a small model
learns that in a minute. The same options give the same rows.
"""

from __future__ import annotations

import argparse
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    raise SystemExit("error: parquet files need pyarrow: pip install pyarrow") from None

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo"]
GOODS = {"baker": "bread", "miller": "flour", "tailor": "coats", "potter": "bowls"}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
PLACES = ["market", "harbour", "station", "bridge"]


def row(numbers: random.Random, sentences: int) -> tuple[str, str]:
    """Return a random question, and its answer of `sentences` sentences."""
    name, trade = numbers.choice(NAMES), numbers.choice(list(GOODS))
    prompt = f"What does {name} the {trade} sell?"
    answers = (
        f"On {numbers.choice(DAYS)} {name} sells {GOODS[trade]} at the {numbers.choice(PLACES)}."
        for _ in range(sentences)
    )
    return prompt, " ".join(answers)


def write_part(args: argparse.Namespace, part: str, rows: int) -> None:
    """Write the files of `train` or `held_out`, and remove those of an earlier call."""
    folder = args.directory / part
    folder.mkdir(parents=True, exist_ok=True)
    written = set()
    for number, size in enumerate(_shares(rows, args.file_rows)):
        path = folder / f"part-{number:05}.parquet"
        seed = f"{args.seed}/{part}/{number}"
        write_file(path, seed, size, group_rows=args.group_rows, sentences=args.sentences)
        written.add(path)
    for path in set(folder.glob("*.parquet")) - written:
        path.unlink()


def write_file(path: Path, seed: str, rows: int, *, group_rows: int, sentences: int) -> None:
    """Write a file completely or not at all, one row group after another."""
    numbers = random.Random(seed)
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("response", pyarrow.string())])
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    with parquet.ParquetWriter(unfinished, schema) as file:
        for size in _shares(rows, group_rows):
            columns = zip(*(row(numbers, sentences) for _ in range(size)), strict=True)
            file.write_table(pyarrow.table(list(columns), schema=schema), row_group_size=size)
    unfinished.rename(path)


def _shares(total: int, share: int) -> Iterator[int]:
    for first in range(0, total, share):
        yield min(share, total - first)


def main() -> None:
    """Write the set that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("directory", type=Path, help="directory for `train/` and `held_out/`")
    add("--rows", type=int, default=20_000, help="training rows; a twentieth as many are held out")
    add("--file-rows", type=int, default=5_000, help="rows per file")
    add("--group-rows", type=int, default=1_000, help="rows per row group")
    add("--sentences", type=int, default=1, help="sentences per response")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.rows, args.file_rows, args.group_rows, args.sentences) < 1:
        parser.error("rows and sentences must be at least 1")
    for part, rows in (("train", args.rows), ("held_out", max(1, args.rows // 20))):
        write_part(args, part, rows)
    files = list(args.directory.rglob("*.parquet"))
    size_mb = sum(path.stat().st_size for path in files) / 1e6
    print(f"{args.rows} rows to train on in {args.directory}: {len(files)} files, {size_mb:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        raise SystemExit(f"error: {error}") from None
