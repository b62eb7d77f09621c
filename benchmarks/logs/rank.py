"""The measured rank: it prints on request, and reports how long it took.

Called as `rank.py DESK`, under clusterrun or by plain python; it needs only the standard library.
Each `DESK/<n>.ask` is a JSON object and is answered by `DESK/<n>.answer`:
`{"lines": 1000, "width": 60, "buffering": "own"}` prints lines of a width (its newline included),
with `"buffering": "block"` through a file of 8 KiB blocks on the same descriptor, else as Python
set up stdout; `{"times": 100, "least_s": 0.05, "most_s": 0.5}` prints the time at random intervals;
`{"end": true}` exits.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, TextIO

LOOK_S = 0.005
BLOCK_BYTES = 8192
OVERDUE_S = 900  # without a request: the benchmark was killed


def main() -> None:
    desk = Path(sys.argv[1])
    (desk / "here").write_text(str(os.getpid()))
    number = 0
    while (asked := _next(desk / f"{number}.ask")) is not None:
        answer = {} if asked.get("end") else _do(asked)
        done = desk / f"{number}.tmp"
        done.write_text(json.dumps(answer))
        done.rename(desk / f"{number}.answer")
        if asked.get("end"):
            return
        number += 1


def _next(path: Path) -> dict[str, Any] | None:
    deadline = time.monotonic() + OVERDUE_S
    while not path.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(LOOK_S)
    asked: dict[str, Any] = json.loads(path.read_text())
    return asked


def _do(asked: dict[str, Any]) -> dict[str, Any]:
    if "times" in asked:
        return _print_times(asked)
    if asked["buffering"] == "block":
        with open(1, "w", buffering=BLOCK_BYTES, closefd=False) as out:
            return _print_lines(asked, out)
    return _print_lines(asked, sys.stdout)


def _print_lines(asked: dict[str, Any], out: TextIO) -> dict[str, Any]:
    rest = "x" * (asked["width"] - 10)
    begin, cpu = time.perf_counter(), time.process_time()
    for number in range(asked["lines"]):
        print(f"{number:08} {rest}", file=out)
    out.flush()
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "write_through": bool(getattr(out, "write_through", False)),
        "line_buffering": bool(getattr(out, "line_buffering", False)),
    }


def _print_times(asked: dict[str, Any]) -> dict[str, Any]:
    for _ in range(asked["times"]):
        time.sleep(random.uniform(asked["least_s"], asked["most_s"]))
        print(f"now {time.time():.6f}", flush=True)
    return {}


if __name__ == "__main__":
    main()
