"""`python -m benchmarks.diagnose`: how often `diagnose` is right, and what it costs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.diagnose import scale, score


def main() -> None:
    asked = _parser().parse_args()
    if asked.what == "score":
        sys.exit(score.run(asked.directory, least=asked.min))
    scale.run(asked.dir, runs=asked.runs, results=asked.results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnose", description=__doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    scoring = parts.add_parser("score", help="score it on logs whose causes are known")
    scoring.add_argument("directory", type=Path, help="holds NAME/log.txt and NAME/meta.json")
    scoring.add_argument("--min", type=float, default=0.95, help="least share of right answers")
    scaling = parts.add_parser("scale", help="measure it on runs of up to 8,000 ranks")
    scaling.add_argument("--dir", type=Path, required=True, help="where to write 3 GB of logs")
    scaling.add_argument("--runs", type=int, default=5, help="how often each command runs")
    scaling.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=scale.RESULTS,
        help="file name without its end",
    )
    return parser


if __name__ == "__main__":
    main()
