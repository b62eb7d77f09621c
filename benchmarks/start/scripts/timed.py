"""Train as the example does, and write down when: `timed.py DIR SLEEP_S ARGUMENTS…`.

`DIR/<attempt>-<rank>.json` has epoch seconds: `process`, the start of the process (in hundredths);
`script`, its first line; `collective`, the end of the first collective; `step`, the end of the
first step. A rank that exits normally writes `steps`, the seconds of each step, to
`DIR/steps-<attempt>-<rank>.json`. Each step sleeps SLEEP_S.
"""

from __future__ import annotations

import time

times = {"script": time.time()}

import itertools  # noqa: E402
import json  # noqa: E402 - the time of the first line
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import train_lm  # type: ignore[import-not-found]  # noqa: E402 - the example, beside this file

DIRECTORY, SLEEP_S = Path(sys.argv[1]), float(sys.argv[2])
NAME = f"{os.environ.get('CLUSTERRUN_ATTEMPT', '1')}-{os.environ.get('RANK', '0')}.json"
gather, set_rate = train_lm.gather_object, train_lm.Training.set_rate
ended: list[float] = []


def gather_and_note(objects: Any) -> Any:
    gathered = gather(objects)
    times.setdefault("collective", time.time())
    return gathered


def set_rate_and_note(training: Any, step: int) -> float:
    """Note the end of a step: the first call comes before the first step."""
    ended.append(time.time())
    if len(ended) == 2:
        write(NAME, {**times, "step": ended[1], "process": process_start(), "pid": os.getpid()})
    time.sleep(SLEEP_S)
    return float(set_rate(training, step))


def process_start() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def write(name: str, data: dict[str, Any]) -> None:
    (DIRECTORY / f"{name}.tmp").write_text(json.dumps(data))
    (DIRECTORY / f"{name}.tmp").rename(DIRECTORY / name)


train_lm.gather_object = gather_and_note
train_lm.Training.set_rate = set_rate_and_note
train_lm.run(train_lm.parse_arguments(sys.argv[3:]))
write(f"steps-{NAME}", {"steps": [b - a for a, b in itertools.pairwise(ended)]})
