"""Score `diagnose` on a directory of logs whose causes are known.

It has a directory for each log, with `log.txt` and `meta.json`, whose `cause` is the right one. Or
`labels.jsonl`, at any depth, has a line for each log: its `file`, and `causes`, each of which is
right (`[]`: nothing failed). Lines of GPUAlert's corpus have a class instead, as `mode`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.diagnose import gpualert, nvrx
from clusterrun.diagnosis import table

CLUSTERRUN: Final = str(Path(sys.executable).with_name("clusterrun"))
NO_FAILURE: Final = ("success_with_teardown_noise", "benign_warning")
RIGHT, WRONG, SILENT = "right", "wrong", "silent"
# Causes that say more than the one that a sample names.
NARROWER: Final = {
    "user_code_exception": ("module_missing", "device_mismatch", "launcher_failed"),
    "checkpoint_corrupt": ("state_dict_mismatch",),
}


class Answer(NamedTuple):
    """A cause, "" for none, and the line that shows it."""

    cause: str
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A log, and the causes that are right names for why it failed; none: it did not."""

    name: str
    log: Path
    causes: tuple[str, ...]
    word: str = ""  # must be in the line that an answer shows
    label: str = ""  # the class in GPUAlert's corpus
    code: int = 1  # the exit status

    def judge(self, answer: Answer) -> str:
        """Return whether an answer is right."""
        if not self.causes:
            return WRONG if answer.cause else RIGHT
        if not answer.cause:
            return SILENT
        is_right = answer.cause in self.causes and self.word in answer.line
        return RIGHT if is_right else WRONG


def run(directory: Path, *, least: float) -> int:
    """Print the scores; return 1 if too few are right, or a log without a failure got a cause."""
    samples = list(_samples(directory))
    if not samples:
        sys.exit(f"no */log.txt with meta.json, and no labels.jsonl, in {directory}")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda sample: diagnosed(sample.log), samples))
    _print("diagnose", samples, answers, details=True)
    _print("flat list", samples, [flat(sample.log) for sample in samples])
    if nvrx.is_installed():
        _print("NVRx", samples, [named_by_nvrx(sample) for sample in samples])
    else:
        print("NVRx        not compared: nvidia-resiliency-ext is not installed")
    if gpualert.is_installed() and all(sample.label for sample in samples):
        _print("GPUAlert", samples, [named_by_gpualert(sample) for sample in samples])
    else:
        print("GPUAlert    not compared: it is not installed, or these are not logs of its corpus")
    verdicts = [sample.judge(answer) for sample, answer in zip(samples, answers, strict=True)]
    is_bad = any(
        not sample.causes and verdict == WRONG
        for sample, verdict in zip(samples, verdicts, strict=True)
    )
    share = verdicts.count(RIGHT) / len(samples)
    return 1 if is_bad or share < least else 0


def diagnosed(log: Path) -> Answer:
    """Return the cause that the command names."""
    argv = [CLUSTERRUN, "diagnose", "--json", str(log)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        return Answer(f"exit {done.returncode}: {done.stderr.strip()[-200:]}")
    verdict = json.loads(done.stdout)["verdict"]
    return Answer(verdict["class"], verdict["message"]) if verdict else Answer("")


def flat(log: Path) -> Answer:
    """Return the cause of the first line that any pattern of the table matches."""
    for line in log.read_text(errors="replace").splitlines():
        for cause in table.built_in().values():
            if any(sign.role in table.CAUSAL and sign.text.search(line) for sign in cause.signs):
                return Answer(cause.id, line)
    return Answer("")


def named_by_nvrx(sample: Sample) -> Answer:
    """Return NVRx's cause: a right one if its class is one of several names for it."""
    names = nvrx.names(sample.log)
    right = next((cause for cause in sample.causes if cause in names), "")
    return Answer(right or next(iter(names), ""), sample.word if right else "")


def named_by_gpualert(sample: Sample) -> Answer:
    """Return a right cause if GPUAlert's class is the sample's own, else its class."""
    found = gpualert.class_of(sample.log, sample.code)
    return Answer(sample.causes[0], sample.word) if found == sample.label else Answer(found)


def _samples(directory: Path) -> Iterator[Sample]:
    for log in sorted(directory.glob("*/log.txt")):
        cause = json.loads((log.parent / "meta.json").read_text())["cause"]
        causes = () if cause in NO_FAILURE else (cause, *NARROWER.get(cause, ()))
        yield Sample(name=log.parent.name, log=log, causes=causes)
    for labels in sorted(directory.rglob("labels.jsonl")):
        for line in filter(None, labels.read_text().splitlines()):
            yield _labelled(directory, labels.parent, json.loads(line))


def _labelled(directory: Path, beside: Path, row: dict[str, Any]) -> Sample:
    if "mode" in row:  # of GPUAlert's corpus
        label = row["mode"]
        return Sample(
            name=row["id"],
            log=directory / row["log_path"],
            causes=gpualert.CLASSES[label],
            word=gpualert.EXCEPTIONS.get(label, ""),
            label=label,
            code=row["true_exit_code"],
        )
    return Sample(name=row["file"], log=beside / row["file"], causes=tuple(row["causes"]))


def _print(
    name: str, samples: list[Sample], answers: list[Answer], *, details: bool = False
) -> None:
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
            wanted = " or ".join(sample.causes[:3]) or "no failure"
            print(f"  {verdict:<7}{sample.name}: {wanted}, answered {answer.cause or 'nothing'}")
