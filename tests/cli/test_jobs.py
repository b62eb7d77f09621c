"""`status`, `list` and `cancel`: what they print about jobs whose files and scheduler say so."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import pytest

from clusterrun.backends import status
from clusterrun.cli.shared import job_view
from clusterrun.cli.status import HEAD, READ_MARK
from clusterrun.diagnosis.kinds import Advice, Certainty, Retry
from clusterrun.rundir.attempt import amend_attempt
from clusterrun.rundir.end import Cause
from clusterrun.rundir.outcome import ShortVerdict, VerdictRule
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import current_user
from tests.cli.conftest import CommandLine
from tests.cli.outcomes import checkpoint, outcome
from tests.cli.runs import ended, events, queue, running, sampled, submitted

OOM = ShortVerdict(
    cause="cuda_oom",
    means="A GPU ran out of memory.",
    status=Certainty.ESTABLISHED,
    retry=Retry.NO,
    text="OutOfMemoryError: CUDA \x1b[2Jout of memory",
    ranks=(3,),
    nodes=("node18",),
    advice=(
        Advice(text="halve the micro-batch"),
        Advice(text="or shard more"),
        Advice(text="see", run="clusterrun plan"),
    ),
    place="rank 3 on node18",
    victims=3,
)


def test_status_of_a_running_job(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    now = time.time()
    events(
        root,
        {"type": "started", "host": "node17"},
        {"type": "world_ready", "world_size": 2},
        {"type": "step", "step": 100, "total": 1100, "ts": now - 50},
        {
            "type": "step", "step": 200, "total": 1100, "ts": now,
            "metrics": {"loss": 2.16438, "samples_per_s": 3200.4, "phase": "warm-up"},
        },
        {"type": "checkpoint", "path": "/saved/200", "step": 200},
    )  # fmt: skip
    said = here("status", "4711")
    assert said.code == 0
    assert said.out == (
        "job        4711  train\n"
        "state      RUNNING  05:10:40 / 1-00:00:00\n"
        "nodes      node[17-18]\n"
        "world      2 ranks in one world = 2 nodes x 1 rank\n"
        "step       200/1100  2 steps/s, 00:07:30 to go\n"
        "metrics    loss 2.164, samples_per_s 3,200\n"
        "checkpoint /saved/200\n"
        f"run dir    {root}\n"
        "logs       clusterrun logs 4711\n"
    )
    assert said.err == ""


def test_what_a_job_says_does_nothing_to_the_terminal(here: CommandLine) -> None:
    root = submitted(here)
    words = "a\x1b]52;c;ZWNobw==\x07b\x1b[2J\x1b]0;title\x07c\x9bd"
    outcome(root, cause=Cause.EXCEPTION, message=words, reason=words)
    ended(root, "FAILED", 137)
    for command in (("status", "4711"), ("list",)):
        said = here(*command)
        assert "abcd" in said.out
        assert not set("\x1b\x07\r\x9b") & set(said.out + said.err)


def test_status_without_a_job_takes_the_newest_and_says_so(here: CommandLine) -> None:
    submitted(here)
    queue(here, running())
    said = here("status")
    assert said.out.startswith("job        4711  train\n")
    assert said.err == "using job 4711 (train, newest run in runs)\n"
    (here.path / "clusterrun.yaml").write_text("script: [\n")
    assert here("status", "4711").code == 0


def test_a_run_of_another_user_names_its_owner_and_stays_as_it_is(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, me = submitted(here), current_user()
    queue(here, running())
    before, other = here.files(), os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert f"\nowner      {me}, another user\n" in here("status", str(root)).out
    closed = PermissionError(13, "Permission denied", "attempts")
    monkeypatch.setattr(status, "read_evidence", Mock(side_effect=closed))
    assert here("status", str(root)).err == "note: you cannot read attempts\n"
    (root / "job.json").write_text("{")
    assert f"hint: ask its owner, {me}, for access\n" in here("status", str(root)).err
    assert here.files() == before


def test_status_of_several_jobs_asks_once_and_the_worst_decides(here: CommandLine) -> None:
    ended(submitted(here, "4711"), "FAILED", 1)
    submitted(here, "4712")
    queue(here, running("4712"))
    said = here("status", "4711", "4712", "--exit-status")
    assert said.code == 3
    assert "\n\njob        4712  train\nstate      RUNNING" in said.out
    assert here.asked("squeue").count("--jobs=4711,4712") == 1
    answer = json.loads(here("status", "4711", "4712", "--json").out)
    assert [job["state"] for job in answer["jobs"]] == ["FAILED", "RUNNING"]


def test_a_name_of_several_runs_says_which(here: CommandLine) -> None:
    for job_id in ("4711", "4712"):
        submitted(here, job_id)
    queue(here, running(), running("4712"))
    announced = "using job 4712 (train, newest of its name)\n"
    for command in (["status"], ["logs"], ["resubmit", "--dry-run"], ["cancel"]):
        assert here(*command, "train").err.startswith(announced)
        assert "using job" not in here(*command, "4712").err


def test_a_job_is_found_from_elsewhere(here: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(here)
    queue(here, running())
    elsewhere = here.path.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    said = here("status", "4711")
    assert (said.code, said.err) == (0, f"using job 4711 (train) of {here.path}\n")
    assert here("list", "--ids-only").out == "4711\n"
    head, row = here("list").out.splitlines()
    assert (head.split()[0], row.split()[:2]) == ("PROJECT", [str(here.path), "4711"])
    assert here("cancel", "4711").out.endswith(f", in {here.path})\n")
    message = f"error: no job or run 'L99' in {elsewhere}/runs or in 1 other project\n"
    assert here("status", "L99").err.startswith(message)


def test_status_of_a_pending_job_says_why_it_waits(here: CommandLine) -> None:
    submitted(here)
    queue(here, "4711|PENDING||0:00|1:00:00|N/A|N/A|||Resources")
    assert "state      PENDING\nwaits      waiting for free nodes\n" in here("status", "4711").out
    answer = json.loads(here("status", "4711", "--json").out)
    assert answer["reason"] == {
        "code": "Resources",
        "text": "waiting for free nodes",
        "can_start": True,
        "facts": [],
        "sooner": [],
    }
    assert answer["elapsed_s"] is None


def test_status_of_a_failed_job_names_the_first_failure(here: CommandLine) -> None:
    root = submitted(here)
    message = "RuntimeError: no such\n  tokenizer"
    failure = {"rank": 3, "code": 1, "message": message}
    outcome(root, cause=Cause.EXCEPTION, node="node18", **failure)
    ended(root, "FAILED", 1)
    said = here("status", "4711", "--exit-status")
    assert said.code == 3
    assert (
        "failed     rank 3 on node18: exit 1: RuntimeError: no such\n             tokenizer\n"
    ) in said.out
    assert "world      2 nodes x 1 rank, never joined a process group\n" in said.out
    answer = json.loads(here("status", "4711", "--json").out)
    cause = {"class": None, "means": None, "status": None}
    assert answer["verdict"] == {"node": "node18", "signal": None, **failure, **cause}


def test_status_and_list_name_the_cause_of_a_failure(here: CommandLine) -> None:
    root, rule = submitted(here), VerdictRule.WOULD_REPEAT
    outcome(root, cause=Cause.EXIT, node="node18", code=1, verdict=OOM, rule=rule, why="no")
    ended(root, "FAILED", 1)
    line = "A GPU ran out of memory (cuda_oom, rank 3 on node18)"
    said = here("status", "4711").out
    assert "no restart no [would-repeat]\n" in said
    assert line in here("list").out
    answer = json.loads(here("status", "4711", "--json").out)
    assert answer["verdict"]["class"] == "cuda_oom"
    assert answer["attempts"][0]["rule"] == "would-repeat"
    assert answer["exit"] == {"code": 1, "signal": None}
    assert answer["end"] == "1970-01-01T00:00:07.500Z"
    assert here("status", "4711").code == 0


def test_a_failed_job_ends_with_one_block_wherever_its_end_is_printed(here: CommandLine) -> None:
    argv = ("-N2", "--nproc-per-node", "2", "--device", "cpu", "train.py", "--batch-size", "8")
    root = submitted(here, "4711", *argv, "--accumulation", "2")
    checkpoint(root, 100, world=4)
    frame = f'File "{here.path}/train.py", line 61, in step'
    verdict = dataclasses.replace(OOM, frame=frame)
    of_victim = {"rank": 0, "node": "node17", "message": "RuntimeError: closed by peer"}
    outcome(root, cause=Cause.EXCEPTION, code=1, verdict=verdict, **of_victim)
    ended(root, "FAILED", 1)
    (root / "logs" / "a1").mkdir(parents=True)
    block = f"""\
failed     rank 3 on node18: OutOfMemoryError: CUDA out of memory
           File "train.py", line 61, in step
           3 other ranks failed because of it
cause      A GPU ran out of memory (cuda_oom, rank 3 on node18)
next       lower the micro-batch from 8 to 4 and raise the accumulation from 2 to 4: the effective \
batch stays 64:
             clusterrun resume 4711 -- --batch-size 4 --accumulation 4
           or shard more
           the same configuration will fail again
lost       40 steps (about 00:00:40): the newest checkpoint is 100
more       clusterrun diagnose 4711
           clusterrun logs 4711 --errors
run dir    {root}
"""
    said = here("status", "4711")
    assert said.out.endswith(f"\n{block}")
    assert "closed by peer" not in said.out
    told = here("logs", "-f", "4711").err
    assert told.endswith("".join(f"  {line}\n" for line in block.splitlines()))


def test_status_says_that_no_rank_has_joined_yet(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    events(root, {"type": "started"})
    assert "world      2 nodes x 1 rank, not joined yet\n" in here("status", "4711").out
    events(root, {"type": "world_ready", "world_size": 2})
    assert "world      2 ranks in one world = 2 nodes x 1 rank\n" in here("status", "4711").out


def test_status_shows_what_failed_in_preflight(here: CommandLine) -> None:
    root = submitted(here)
    queue(here, running())
    check = {
        "id": "node.tmp",
        "status": "fail",
        "text": "only 0.0 GiB are free",
        "hint": "make room",
    }
    events(root, {"type": "started"})
    events(root, {"type": "preflight", "findings": [{"nodes": ["node18"], **check}]})
    line = "preflight  node18: node.tmp: only 0.0 GiB are free; hint: make room\n"
    assert line in here("status", "4711").out
    answer = json.loads(here("status", "4711", "--json").out)
    assert answer["preflight"] == [{**check, "nodes": "node18", "line": None}]
    events(root, {"type": "preflight", "findings": [{"nodes": 7}]})  # as a rank may write
    assert json.loads(here("status", "4711", "--json").out)["preflight"] == []


def test_wait_returns_when_the_job_has_ended(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = submitted(here)
    queue(here, running())
    monkeypatch.setattr(job_view.time, "sleep", lambda _: ended(root, "FAILED", 9))
    said = here("status", "4711", "--wait", "--exit-status")
    assert said.code == 3
    assert "state      FAILED  exit 9" in said.out
    hint = "note: pass --exit-status to exit with 3 if the job did not complete\n"
    assert hint not in said.err
    said = here("status", "4711", "--wait")
    assert said.code == 0
    assert said.err.endswith(hint)


def test_list_shows_what_runs_and_why_the_rest_does_not(here: CommandLine) -> None:
    failed = submitted(here, "4698", "-N2", "--gpus-per-node", "4", "train.py")
    ended(failed, "FAILED", 1)
    oom = {"rank": 1, "node": "node17", "code": 1, "message": "CUDA out of memory"}
    outcome(failed, cause=Cause.EXCEPTION, step=None, **oom)
    submitted(here, "4711", "-J", "a-name-that-is-longer-than-any-column-would-be", "train.py")
    submitted(here, "4713")
    now = int(time.time())
    started = running("4711").replace("|N/A|N/A|", f"|{now}|N/A|")
    at = f"{datetime.fromtimestamp(now):%H:%M}"
    queue(here, started, "4713|PENDING||0:00|UNLIMITED|N/A|N/A|||Priority")
    head, *rows = here("list").out.splitlines()
    starts = [head.index(name) for name in HEAD]
    cells = [
        [row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for row in rows
    ]
    long_name = "a-name-that-is-longer-than-any-column-would-be"
    assert cells == [
        [
            *("4713", "train", "PENDING", "2", "-", "-", "- / -", "-"),
            "jobs with higher priority are ahead",
        ],
        ["4711", long_name, "RUNNING", "1", "-", at, "05:10:40 / 1-00:00:00", "-", "node[17-18]"],
        [
            *("4698", "train", "FAILED", "2", "8", "-", "- / -", "-"),
            "rank 1 on node17: exit 1: CUDA out of memory",
        ],
    ]


def test_list_is_short_by_default_and_says_what_it_left_out(here: CommandLine) -> None:
    for number in range(7):
        ended(submitted(here, str(4711 + number)), "COMPLETED", 0)
    said = here("list")
    assert len(said.out.splitlines()) == 1 + 5
    assert said.err == "note: --all lists 2 more runs that ended earlier\n"
    assert here("list", "--state", "failed").err == "no runs to show\n"
    assert len(here("list", "--all").out.splitlines()) == 1 + 7
    assert here("list", "-n", "1", "--ids-only").out == "4717\n"
    assert here("list", "--state", "running", "--ids-only").out == ""
    assert len(here("list", "--state", "completed", "--ids-only").out.splitlines()) == 7


def test_cancel_ends_a_job_and_says_how_it_stood(here: CommandLine) -> None:
    submitted(here)
    queue(here, running())
    assert here("cancel", "-y", "4711", "99").code == 4  # one unknown job: none is ended
    assert here.asked("scancel") == []
    said = here("cancel", "4711", "4711")
    assert (said.code, said.out) == (0, "cancelled 4711  (train, was RUNNING 05:10:40)\n")
    assert here.asked("scancel") == ["4711"]


def test_cancelling_what_has_ended_is_no_mistake(here: CommandLine) -> None:
    ended(submitted(here), "COMPLETED", 0)
    said = here("cancel", "4711")
    assert (said.code, said.out) == (0, "")
    assert said.err == "note: job 4711 had already ended: COMPLETED\n"
    assert here.asked("scancel") == []
    (told,) = json.loads(here("cancel", "4711", "--json").out)["jobs"]
    assert (told["state_before"], told["cancelled"]) == ("COMPLETED", False)


# A training that reports no steps: what rank 0 printed, and when


BAR = "\rEpoch 3:  {n}%|####      | {n}/100 [00:30<00:37, {rate}it/s]"


@pytest.fixture(name="root")
def _root(here: CommandLine) -> Path:
    """Start a job on two nodes; rank 0 is on node17."""
    root = submitted(here)
    (root / "attempts/1").mkdir(parents=True)
    amend_attempt(RunPaths(root=root), 1, nodes=("node17", "node18"), procs_per_node=1)
    queue(here, running())
    return root


def printed(root: Path, *lines: tuple[float, str, str]) -> None:
    """Write the log of rank 0's node: for each line how long ago, by whom, and the text."""
    log = root / "logs/a1/node17.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    now = time.time()
    with log.open("a") as file:
        for age_s, head, text in lines:
            file.write(f"{int((now - age_s) * 1e6)} {head} {text}\n")


def bar(n: int, rate: float = 2.0) -> str:
    return BAR.format(n=n, rate=rate)


def test_a_bar_of_rank_0_is_shown_as_what_it_is(here: CommandLine, root: Path) -> None:
    # A drawing is cut in two, another rank has a bar, and the agent's line is no output.
    printed(
        root,
        (9, "0 E", bar(40)[:20]),
        (7, "0 E", bar(40)[20:] + bar(50)),
        (5, "0 o", "saved"),
        (5, "1 E", bar(77)),
        (1, "- a", "node17 says something"),
    )
    out = here("status", "4711").out
    assert "step       50/100  2 it/s, 00:00:25 to go  (from its output: Epoch 3)\n" in out
    assert "output     last written 00:00:05 ago\n" in out
    listed = here("list")
    assert f"50/100{READ_MARK} 2 it/s, 00:00:25 left" in listed.out
    assert "note: progress marked * was read from the output" in listed.err
    told = json.loads(here("status", "4711", "--json").out)["progress"]
    assert {told.pop("reported")} != {None}
    assert 5 <= told.pop("last_output_s") < 5 + 60
    assert told == {
        "step": 50,
        "total": 100,
        "rate_per_s": 2.0,
        "eta_s": 25.0,
        "source": "output",
        "bar": "Epoch 3",
        "metrics": {},
    }


def test_reported_steps_win_over_a_bar(here: CommandLine, root: Path) -> None:
    printed(root, (5, "0 E", bar(50)), (5, "0 o", "step 1/50"), (5, "0 o", "step 2/50"))
    now = time.time()
    events(root, *[{"type": "step", "step": n, "total": 9, "ts": now - 9 + n} for n in (1, 3)])
    told = json.loads(here("list", "--json").out)["jobs"][0]["progress"]
    assert (told["step"], told["total"], told["source"], told["bar"]) == (3, 9, "reported", None)
    assert (told["rate_per_s"], told["eta_s"]) == (1.0, 6.0)
    assert told["last_output_s"] >= 5
    assert READ_MARK not in here("list").out
    assert "(from its output" not in here("status", "4711").out


@pytest.mark.parametrize(("ago", "is_told"), [(290, False), (400, True)])
def test_a_silent_job_may_hang(here: CommandLine, root: Path, ago: int, *, is_told: bool) -> None:
    printed(root, (ago, "0 o", "hello"))
    hint = "\n           if the job hangs, see where: clusterrun diagnose 4711 --stacks\n"
    assert (hint in here("status", "4711").out) == is_told


def test_a_bar_that_stands_still_is_not_estimated(here: CommandLine, root: Path) -> None:
    printed(root, (125, "0 E", bar(50)), (65, "0 E", bar(50)))
    out = here("status", "4711").out
    assert "50/100  2 it/s, last moved 00:02:0" in out
    assert "output     last written 00:01:0" in out
    assert "left" not in here("list").out


def test_nan_is_null_in_json(here: CommandLine, root: Path) -> None:
    metrics = {"loss": float("nan"), "norm": float("inf"), "lr": 0.5}
    events(root, {"type": "step", "step": 3, "total": 9, "ts": time.time(), "metrics": metrics})
    for command in (("status", "4711", "--json"), ("list", "--json")):
        out = here(*command).out
        assert "NaN" not in out
        assert "Infinity" not in out
        found = json.loads(out)
        shown = found["jobs"][0] if "jobs" in found else found
        assert shown["progress"]["metrics"] == {"loss": None, "norm": None, "lr": 0.5}


def test_only_the_end_of_a_log_is_read_also_after_the_end(
    here: CommandLine, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(root, (9, "0 E", bar(50)), *[(8, "1 o", "x" * 60_000)] * 3)
    out = here("status", "4711").out
    assert "step " not in out
    assert "last written 00:00:0" in out
    printed(root, (1, "0 E", bar(60)))
    assert "step       60/100" in here("status", "4711").out
    ended(root, "FAILED", 1)
    queue(here)
    out = here("status", "4711").out
    assert "step       60/100" in out
    assert "output " not in out
    assert "60/100" in here("list").out
    assert "60/100" not in here("list", "--all").out  # hundreds of logs


def test_the_fullest_memory_is_shown_and_at_the_end_the_peaks(
    here: CommandLine, root: Path
) -> None:
    assert "memory  " not in here("status").out, "there is no sample"
    sampled(root)
    sampled(root, node="node18", host=500)
    host, gpu = "host {} % of 2,000 GiB (node17)", "GPU {} % of 80 GiB (GPU 2 of node17)"
    both = f"{host}, {gpu}"
    assert f"memory     {both.format(31, 64)}\n" in here("status").out
    queue(here)
    ended(root, "COMPLETED", 0)
    assert f"memory     peaks: {both.format(36, 88)}\n" in here("status").out
    RunPaths(root=root).attempt(2).mkdir()
    assert "memory  " not in here("status").out, "no sample of the new attempt"
