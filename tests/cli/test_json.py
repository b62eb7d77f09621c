"""What commands print with --json beside docs/reference/json.yaml, both ways."""

from __future__ import annotations

import json
import runpy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends.slurm import query
from clusterrun.cli import diagnose
from clusterrun.diagnosis.collectives import DEFAULT_GROUP, Call, Stuck, StuckKind
from clusterrun.node.watch.hangs import RankPlace
from clusterrun.rundir.end import Cause
from clusterrun.rundir.events import Phase
from clusterrun.rundir.outcome import Next
from clusterrun.verbs.hangs import Hang
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import checkpoint, outcome
from tests.cli.runs import ended, events, queue, running, sampled, started, submitted
from tests.cli.test_scaling import WORLDS, _slurm

__all__ = ["_slurm"]  # the fixture

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
DOCUMENTED: dict[str, tuple[str, dict[str, list[str]]]] = runpy.run_path(
    str(REFERENCE / "generate.py")
)["schemas"]()
# Their rows also have the inputs of a setup, which are described there.
WITH_INPUTS = {"what_if", "recommended", "alternatives"}
TYPES = {
    **dict.fromkeys(("text", "path", "time"), str),
    **dict.fromkeys(("integer", "bytes"), int),
    **dict.fromkeys(("number", "seconds"), (int, float)),
    **{"boolean": bool, "list": list, "object": dict, "any": object},
}


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each field."""
    if isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from _flat(item, f"{at}[]")
    elif isinstance(value, dict):
        for name, below in value.items():
            path = f"{at}.{name}" if at else name
            yield path, below
            yield from _flat(below, path)


def _entry(path: str, fields: Mapping[str, Any]) -> str | None:
    """Return the documented name of a path, `a.*` for any name below `a`."""
    parts = path.split(".")
    names = [path, *(".".join([*parts[:n], "*"]) for n in range(len(parts) - 1, 0, -1))]
    return next((name for name in names if name in fields), None)


class Printed:
    """The objects that commands printed, by their schemas."""

    def __init__(self, here: CommandLine) -> None:
        self.here = here
        self.seen: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def add(self, *args: str, schema: str) -> dict[str, Any]:
        said = self.here(*args)
        found: dict[str, Any] = json.loads(said.out)
        assert found["schema"] == schema, said.err
        inputs = found.get("inputs", {})
        for path, value in _flat(found):
            row, _, name = path.partition("[].")
            is_input = row in WITH_INPUTS and name.partition(".")[0] in inputs
            if path in DOCUMENTED[schema][1] or not is_input:
                self.seen[schema][path].append(value)
        return found

    def check(self) -> None:
        """Compare with the reference."""
        for schema, paths in self.seen.items():
            _, fields = DOCUMENTED[schema]
            used = {path: _entry(path, fields) for path in paths}
            new = sorted(path for path, entry in used.items() if entry is None)
            assert not new, (
                f"{schema} prints {', '.join(new)}: describe them in docs/reference/json.yaml as "
                "`NAME: [TYPE, MEANING]`, then run docs/reference/generate.py"
            )
            missing = [name for name in fields if name not in used.values()]
            above = {name: name.rpartition(".")[0].removesuffix("[]") for name in missing}
            gone = sorted(n for n in missing if not above[n] or any(paths.get(above[n], ())))
            assert not gone, (
                f"no sample of {schema} prints {', '.join(gone)}: remove them from "
                "docs/reference/json.yaml, or add a sample to tests/cli/test_json.py"
            )
            _check_types(schema, fields, paths, used)


def _check_types(
    schema: str,
    fields: Mapping[str, list[str]],
    paths: Mapping[str, list[Any]],
    used: Mapping[str, str | None],
) -> None:
    for path, values in paths.items():
        entry = used[path]
        assert entry is not None
        kind, meaning = fields[entry]
        for value in values:
            if value is None:
                assert kind == "any" or "null" in meaning, f"{schema}: null of {entry}?"
            else:
                wrong = f"{schema}: {entry} is documented as {kind}, and is {value!r}"
                assert isinstance(value, TYPES[kind]), wrong
                assert not (isinstance(value, bool) and kind != "boolean" != kind != "any"), wrong


def test_every_schema_of_the_code_is_documented() -> None:
    package = REFERENCE.parents[1] / "clusterrun"
    rooms = (package / "cli", package / "advice")
    text = "".join(path.read_text() for room in rooms for path in room.rglob("*.py"))
    code = {word for word in text.replace("'", '"').split('"') if word.startswith("clusterrun.")}
    printed = {word for word in code if word.endswith("/1") and "{" not in word}
    assert printed
    assert printed <= DOCUMENTED.keys(), "describe it in docs/reference/json.yaml"


PORT = 'import os\nos.environ["MASTER_PORT"] = "29500"\n'
FAILED_LOG = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 5, in <module>
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[rank1]: RuntimeError: Connection reset by peer
2026-03-01 10:00:00 srun: error: node17: task 3: Exited with exit code 1
"""


WAITING = "4711|PENDING||0:00|1:00:00|N/A|N/A|main|2|Resources"
IDLE = "main*|up|infinite|1-infinite|no|1|idle|(null)|64|512000|(null)|node1|none"


def test_jobs(here: CommandLine) -> None:
    printed = Printed(here)
    root = submitted(here, "4711", "-N2", "train.py")
    printed.add("status", "--json", schema="clusterrun.status/1")
    queue(here, "4711|PENDING||0:00|1-00:00:00|2026-03-01T10:00:00|N/A|||Priority")
    printed.add("status", "--json", schema="clusterrun.status/1")
    here.program("sinfo", f"echo '{IDLE}'")
    here.program("squeue", f"echo '{WAITING}'")
    query.forget()
    printed.add("status", "--json", schema="clusterrun.status/1")
    queue(here, running())
    step = {"type": "step", "step": 40, "total": 100, "metrics": {"loss": 2.5}}
    check = {"nodes": ["node18"], "id": "node.tmp", "status": "fail", "text": "full", "hint": "x"}
    events(root, {"type": "preflight", "findings": [check]})
    events(root, {"type": "step", "step": 10, "total": 100}, step | {"ts": 11.0})
    outcome(root, next=Next.RELAUNCH, why="a checkpoint was saved", exclude=("node18",))
    outcome(root, 2, cause=Cause.SIGNAL, node="node18", rank=1, signal=9, message="killed")
    started(root, {Phase.QUEUE: 4e9, Phase.SETUP: 4e9, Phase.LAUNCHER: 4e9})
    checkpoint(root, 40)
    sampled(root, 2)
    printed.add("status", "--json", schema="clusterrun.status/1")
    queue(here)
    ended(root, "FAILED", 137)
    printed.add("status", "--json", schema="clusterrun.status/1")
    printed.add("list", "--json", schema="clusterrun.list/1")
    printed.add("cancel", "4711", "--json", schema="clusterrun.cancel/1")
    changed = ("--time", "30", "--json")
    printed.add("resume", "4711", "--dry-run", *changed, schema="clusterrun.resume/1")
    printed.add("resubmit", "4711", *changed, schema="clusterrun.resubmit/1")
    printed.add("diagnose", "4711", "--json", schema="clusterrun.diagnose/1")
    (here.path / "job.log").write_text(FAILED_LOG)
    printed.add("diagnose", "job.log", "--json", schema="clusterrun.diagnose/1")
    printed.add("diagnose", "/dev/null", "--json", schema="clusterrun.diagnose/1")
    (here.path / "port.py").write_text(PORT)
    for more in ((), ("--env", "NCCL_IB_DISABLE=1")):
        printed.add("check", "--json", *more, "port.py", schema="clusterrun.check/2")
    printed.add("doctor", "--cluster", "local", "--json", schema="clusterrun.doctor/1")
    printed.add("status", "99999", "--json", schema="clusterrun.error/1")
    printed.check()


def test_a_look_at_a_running_job(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, schema = Printed(here), "clusterrun.look/1"
    submitted(here, "4711", "-N2", "train.py")
    queue(here, running())
    call = Call(op="all_reduce", shape="[[7]] Float", where="train.py:88 in step")
    stuck = Stuck(
        kind=StuckKind.MISSING, group=DEFAULT_GROUP, number=3, call=call, waiting=(0, 2), odd=(1,)
    )
    at = [
        RankPlace(rank=rank, node="node17", where="train.py:88 in step", is_waiting=rank != 1)
        for rank in range(3)
    ]
    nodes = dict.fromkeys(range(3), "node17")
    quiet = Hang(places=tuple(at), nodes=nodes, silent=("node18",))
    hang = Hang(stuck=stuck, places=tuple(at), nodes=nodes, dumped=3, looked_at=100.0)
    answers = iter([quiet, hang, replace(hang, stuck=replace(stuck, since=95.0))])
    monkeypatch.setattr(diagnose, "locate_ranks", lambda *_, **__: next(answers))
    found = printed.add("diagnose", "4711", "--stacks", "--json", schema=schema)
    assert (found["stuck"], found["silent"]) == (None, ["node18"])
    found = printed.add("diagnose", "4711", "--stacks", "--json", schema=schema)
    assert (found["stuck"]["ranks"], found["stuck"]["nodes"]) == ("1", ["node17"])
    found = printed.add("diagnose", "4711", "--stacks", "--json", schema=schema)
    assert found["stuck"] is None, "five seconds are no hang"
    printed.check()


PLAN = ("plan", "--model", "llama-3.1-8b", "--seq-len", "4096", "--gpu", "a100-80g")


def test_estimates(slurm: CommandLine) -> None:
    printed, schema = Printed(slurm), "clusterrun.plan/1"
    file = slurm.path / "clusterrun.yaml"
    file.write_text("script: train.py\ntraining: {params: 1000}\n")
    assert slurm("scaling", *WORLDS).code == 0
    printed.add("plan", *WORLDS[2:], "-N", "2", "--json", schema=schema)  # with its speed-up
    printed.add("plan", "--compare", "103", "--json", schema=schema)
    file.unlink()
    nodes = ("-N", "2", "--gpus-per-node", "8", "--samples", "9999", "--time", "60")
    rates = ("--lr", "1e-4", "--base-batch", "64", "--save-every", "100")
    printed.add(*PLAN, *nodes, *rates, "--strategy", "zero3", "--json", schema=schema)
    printed.add(*PLAN, "--what-if", "strategy", "--json", schema=schema)  # does not fit
    wanted = ("--gpus-per-node", "8", "--effective-batch", "64", "--recommend", "--json")
    printed.add(*PLAN, *wanted, schema=schema)
    printed.add("plan", "--params", "1e9", "--device", "cpu", "--json", schema=schema)
    printed.add("plan", "--params", "x", "--json", schema="clusterrun.error/1")
    printed.check()


def test_configuration(here: CommandLine) -> None:
    printed = Printed(here)
    (here.path / "clusterrun.yaml").write_text("script: train.py\nnodes: 2\n")
    printed.add("config", "validate", "--json", schema="clusterrun.config-validate/1")
    (here.path / "clusterrun.yaml").write_text("script: train.py\n")
    printed.add("config", "show", "--json", schema="clusterrun.config-show/1")
    here.slurm()
    printed.add("render", "--json", schema="clusterrun.render/1")
    printed.check()


def test_submissions(slurm: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Printed(slurm)
    submit = ("submit", "-N2", "--nproc-per-node", "2", "--device", "cpu", "--json")
    assert printed.add(*submit, "train.py", schema="clusterrun.submit/1")["state"] is None
    found = printed.add(*submit, "--wait", "train.py", schema="clusterrun.submit/1")
    assert (found["state"], found["exit"]) == ("COMPLETED", {"code": 0, "signal": None})
    monkeypatch.setenv("FAKE_FAILED", "2")
    said = slurm(*submit, "--wait", "train.py")
    found = json.loads(said.out)
    assert (said.code, found["state"], found["exit"]["code"]) == (1, "FAILED", 1)
    printed.add("scaling", *WORLDS, "--json", "train.py", schema="clusterrun.scaling/1")
    printed.check()


def test_a_wait_that_is_interrupted_still_prints_the_job(
    slurm: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clusterrun.verbs.status.wait", interrupted)
    said = slurm("submit", "-N2", "--device", "cpu", "--wait", "--json", "train.py")
    assert said.code == 130
    assert (json.loads(said.out)["job_id"], json.loads(said.out)["state"]) == ("101", None)
