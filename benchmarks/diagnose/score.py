"""Score `diagnose --log` on a directory of logs whose causes are known.

It has a directory for each log, with `log.txt` and `meta.json`, whose `cause` is the right one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.diagnose import nvrx
from clusterrun.diagnosis import table

CLUSTERRUN: Final = str(Path(sys.executable).with_name("clusterrun"))
NO_FAILURE: Final = ("success_with_teardown_noise", "benign_warning")
RIGHT, WRONG, SILENT = "right", "wrong", "silent"
# Causes that say more than the one that a sample names.
NARROWER: Final = {
    "user_code_exception": ("module_missing", "device_mismatch", "launcher_failed"),
    "checkpoint_corrupt": ("state_dict_mismatch",),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A log and its cause."""

    name: str
    log: Path
    cause: str

    def judge(self, answer: str) -> str:
        """Return whether an answer is right; "" is no cause."""
        if self.cause in NO_FAILURE:
            return WRONG if answer else RIGHT
        if not answer:
            return SILENT
        return RIGHT if answer in (self.cause, *NARROWER.get(self.cause, ())) else WRONG


def run(directory: Path, *, least: float) -> int:
    """Print the scores; return 1 if too few are right, or a log without a failure got a cause."""
    samples = list(_samples(directory))
    if not samples:
        sys.exit(f"no */log.txt with meta.json in {directory}")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda sample: diagnosed(sample.log), samples))
    _print("diagnose", samples, answers, details=True)
    _print("flat list", samples, [flat(sample.log) for sample in samples], details=False)
    if nvrx.is_installed():
        _print("NVRx", samples, [named_by_nvrx(sample) for sample in samples], details=False)
    else:
        print("NVRx        not compared: nvidia-resiliency-ext is not installed")
    verdicts = [sample.judge(answer) for sample, answer in zip(samples, answers, strict=True)]
    is_bad = any(
        sample.cause in NO_FAILURE and verdict == WRONG
        for sample, verdict in zip(samples, verdicts, strict=True)
    )
    share = verdicts.count(RIGHT) / len(samples)
    return 1 if is_bad or share < least else 0


def diagnosed(log: Path) -> str:
    """Return the cause that the command names."""
    argv = [CLUSTERRUN, "diagnose", "--json", str(log)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        return f"exit {done.returncode}: {done.stderr.strip()[-200:]}"
    verdict = json.loads(done.stdout)["verdict"]
    return str(verdict["class"]) if verdict else ""


def flat(log: Path) -> str:
    """Return the cause of the first line that any pattern of the table matches."""
    for line in log.read_text(errors="replace").splitlines():
        for cause in table.built_in().values():
            if any(sign.role in table.CAUSAL and sign.text.search(line) for sign in cause.signs):
                return cause.id
    return ""


def named_by_nvrx(sample: Sample) -> str:
    """Return NVRx's cause: the right one if its class is one of several names for it."""
    names = nvrx.names(sample.log)
    return sample.cause if sample.cause in names else next(iter(names), "")


def _samples(directory: Path) -> list[Sample]:
    return [
        Sample(
            name=log.parent.name,
            log=log,
            cause=json.loads((log.parent / "meta.json").read_text())["cause"],
        )
        for log in sorted(directory.glob("*/log.txt"))
    ]


def _print(name: str, samples: list[Sample], answers: list[str], *, details: bool) -> None:
    judged = [(s, a, s.judge(a)) for s, a in zip(samples, answers, strict=True)]
    found = Counter(verdict for _, _, verdict in judged)
    print(
        f"{name:<12}"
        + "  ".join(
            f"{kind} {found[kind]} ({found[kind] / len(samples):.0%})"
            for kind in (RIGHT, WRONG, SILENT)
        )
    )
    for sample, answer, verdict in judged if details else ():
        if verdict != RIGHT:
            print(f"  {verdict:<7}{sample.name}: {sample.cause}, answered {answer or 'nothing'}")
