"""A damaged file of one run costs that run its facts, and other runs nothing."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends import status
from clusterrun.errors import ClusterrunError
from clusterrun.rundir import record
from clusterrun.rundir.attempt import AttemptRecord, amend_attempt, read_attempt
from clusterrun.rundir.events import Phase
from clusterrun.rundir.paths import RunPaths
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import checkpoint, outcome
from tests.cli.runs import ended, events, started, submitted

CONTROLLER = '{"schema": "clusterrun.controller/1", "pid": 1, "identity": "x", "started_at": 1}'
TEXTS = (b"", b"\0" * 64, b"\xff\xfe\x00", b"null", b"[]", b"{}", b"7", b'"x"', b"\x1b[2J\x07")
DEEP = (b"[" * 100_000, b'{"a":' * 100_000)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 10**30, 1e300, float("nan"), "x", "../" * 9, "\x1b]0;x\x07", "9" * 40),
    *([], {}, [None], {"a": {}}),
)
RECORDS = ("job.json", "end.json", "attempts/1/outcome.json", "attempts/1/attempt.json")
OTHERS = ("controller.json", "plan.json", "events/node17.jsonl")
FORMS = 20  # what may become of any file; wrong values follow
PLAIN = ("resolved.yaml", "logs/a1/node17.log", "slurm/batch.out")


def finished(here: CommandLine, job_id: str) -> Path:
    """Leave a run that failed at its second attempt."""
    root = submitted(here, job_id, "-N2", "--job-name", f"run{job_id}", "train.py")
    paths = RunPaths(root=root)
    for number in (1, 2):
        outcome(root, number, job_id=job_id)
        started(root, {phase: 1000.0 + at for at, phase in enumerate(Phase)}, number)
        amend_attempt(paths, number, owner="4711", taken_at=1000.0)
    events(root, {"type": "started", "host": "node17"}, {"type": "step", "step": 3, "total": 9})
    checkpoint(root, 100)
    paths.controller.write_text(CONTROLLER)
    (root / "logs/a1").mkdir(parents=True)
    (root / "logs/a1/node17.log").write_text("1000000000 0 out step 3\n")
    paths.batch_output.write_text("clusterrun: node17: gone\n")
    ended(root, "FAILED", 137)
    return root


def damages(file: Path) -> Iterator[Callable[[], object]]:
    """Yield what may become of a file."""
    whole = file.read_bytes()
    noise = random.Random(7).randbytes(5000)
    for text in (*TEXTS, *DEEP, noise, whole[: len(whole) // 2], whole * 2, noise + whole):
        yield lambda text=text: file.write_bytes(text)
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        yield lambda make=make: make(file)
    for target in (file.name, "gone"):
        yield lambda target=target: file.symlink_to(target)
    if file.suffix.startswith(".json"):
        yield from _wrong_values(
            file, json.loads(whole.splitlines()[-1] if file.suffix[5:] else whole)
        )


def _wrong_values(file: Path, good: dict[str, Any]) -> Iterator[Callable[[], object]]:
    for value in VALUES:
        for names in ([name] for name in good) if file.name in RECORDS[:2] else (list(good),):
            wrong = json.dumps(
                {**good, **dict.fromkeys(names, value), "schema": good.get("schema")}
            )
            yield lambda wrong=wrong: file.write_text(wrong + "\n")


def row(here: CommandLine, job_id: str) -> dict[str, Any]:
    """Return what `list` says of a job."""
    said = here("list", "--all", "--json")
    assert said.code == 0, said.err
    jobs: list[dict[str, Any]] = json.loads(said.out)["jobs"]
    assert len(jobs) == 2
    return next(job for job in jobs if job["job_id"] == job_id)


def is_refused(file: Path) -> bool:
    """Return whether the one reader of job.json refuses its values: no command sees them then."""
    if file.name != "job.json":
        return False
    try:
        record.read(RunPaths(root=file.parent))
    except ClusterrunError:
        return True
    return False


@pytest.mark.parametrize("name", [*RECORDS, *OTHERS, *PLAIN])
def test_a_damaged_file_costs_one_row(here: CommandLine, name: str) -> None:
    finished(here, "4711")
    file = finished(here, "4712") / name
    healthy, whole = row(here, "4711"), file.read_bytes()
    assert row(here, "4712")["damaged"] == []
    for number, damage in enumerate(damages(file)):
        if not file.is_symlink() and file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
        damage()
        if number >= FORMS and number % 9 and is_refused(file):
            continue
        assert row(here, "4711") == healthy, number
        said = here("list", "--all")
        assert "clusterrun itself failed" not in said.err, number
        for command in ("status", "logs", "diagnose") if number % 5 == 0 else ("status",):
            told = here(command, "4712")
            assert "clusterrun itself failed" not in told.err, (number, command)
            assert not {"\x1b", "\x07"} & {*told.out, *told.err}, (number, command)
    file.unlink()
    file.write_bytes(whole)
    assert row(here, "4712")["damaged"] == []


@pytest.mark.parametrize("name", [*RECORDS[:3], "attempts/2/attempt.json"])
def test_a_damaged_record_is_named(here: CommandLine, name: str) -> None:
    finished(here, "4711")
    root = finished(here, "4712")
    (root / name).write_text("{")
    said = here("list", "--all").out.splitlines()
    assert [line.rsplit("  ", 1)[-1] for line in said if "damaged" in line] == [f"damaged: {name}"]
    told = here("status", str(root))
    assert (name if name != "job.json" else f"cannot read {root}/job.json") in told.err


@pytest.mark.parametrize(
    "text", ['["../../x"], "procs_per_node": 1', '["n1"], "procs_per_node": 5000']
)
def test_a_world_of_others_names_no_path_and_no_endless_ranks(here: CommandLine, text: str) -> None:
    paths = RunPaths(root=finished(here, "4711"))
    paths.attempt_record(2).write_text(f'{{"nodes": {text}}}')
    assert read_attempt(paths, 2) == AttemptRecord()
    assert "damaged: attempts/2/attempt.json" in here("status", "4711").err


def test_a_fault_of_ours_costs_one_row_and_keeps_its_traceback(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(here, "4711")
    finished(here, "4712")
    healthy, read = row(here, "4711"), status.read_evidence

    def broken(paths: RunPaths) -> Any:
        return read(paths) if "run4711" in str(paths.root) else paths.nothing

    monkeypatch.setattr(status, "read_evidence", broken)
    assert row(here, "4711") == healthy
    (note,) = row(here, "4712")["notes"]
    assert note.startswith("clusterrun failed to read this run: AttributeError: ")
    assert "in broken" in Path(note.rsplit(" ", 1)[1]).read_text()
