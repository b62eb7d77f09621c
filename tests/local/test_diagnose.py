"""`diagnose` of failures made for real, on two simulated nodes of two ranks each."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from clusterrun.health.machine import own_group
from tests.local.test_main_road_local import FOUR
from tests.namespaces import small_disk
from tests.patience import wait_for
from tests.road import Project

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(240)]

HANG = ("--hang-timeout", "20s")
SOON = ("--timeout", "20s")
COUNTED = any(kills is not None for kills in own_group().kills())
KILLED = ("sigkill_external", "likely") if COUNTED else ("host_oom", "unconfirmed")
# What rank 2 of `broken.py` does, options, the cause, and how sure it is.
OF_ONE_RANK = [
    ("raise", (), "user_code_exception", "likely"),
    ("kill", (), *KILLED),
    ("segv", (), "segfault", "likely"),
    ("port", (), "port_in_use", "established"),
    ("loop", HANG, "hang_rank_missing", "established"),
    ("lock", HANG, "hang_rank_missing", "established"),
    ("loader", HANG, "hang_rank_missing", "established"),
    ("skip", SOON, "hang_rank_missing", "likely"),
    ("miss", SOON, "collective_desync", "likely"),
]
OF_MORE_RANKS = [
    ("import", (), "module_missing"),
    ("host", SOON, "hostname_unresolved"),
    ("shape", (), "collective_desync"),
    ("nan", (), "loss_nan"),
]
BATCH = """
import deepspeed
import torch
deepspeed.init_distributed()
model = torch.nn.Linear(8, 1)
sizes = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
settings = {**sizes, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
"""


LACKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 2:
    import flash_attn_9
dist.barrier()
"""


def diagnosed(here: Project, *argv: str) -> dict[str, Any]:
    """Let a training fail, and return why."""
    done = here.cli("submit", "--wait", *FOUR, *argv)
    assert done.returncode not in (0, 2), done.stderr
    done = here.cli("diagnose", "L1", "--json")
    assert done.returncode == 3, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("how", "options", "cause", "status"), OF_ONE_RANK)
def test_what_one_rank_did_is_found_on_that_rank(
    here: Project, how: str, options: tuple[str, ...], cause: str, status: str
) -> None:
    verdict = diagnosed(here, *options, "broken.py", how)["verdict"]
    assert (verdict["class"], verdict["status"]) == (cause, status)
    assert (verdict["ranks"], verdict["nodes"]) == ("2", ["local1"])


def attempts_of(here: Project, *argv: str) -> list[dict[str, Any]]:
    """Let a training fail that may be restarted, and return its attempts."""
    done = here.cli("submit", "--wait", *FOUR, "--max-restarts", "5", *argv)
    assert done.returncode == 1, done.stderr
    assert "  next       " in done.stderr
    status = json.loads(here.cli("status", "L1", "--json").stdout)
    found: list[dict[str, Any]] = status["attempts"]
    return found


def test_an_error_that_another_try_would_repeat_costs_one_attempt(here: Project) -> None:
    (here.path / "lacks.py").write_text(LACKS)
    (only,) = attempts_of(here, "lacks.py")
    assert (only["next"], only["rule"]) == ("stop", "would-repeat")


def test_the_same_cause_twice_costs_two_attempts(here: Project) -> None:
    first, second = attempts_of(here, "broken.py", "raise")
    assert (first["next"], first["rule"]) == ("relaunch", None)
    assert (second["next"], second["rule"]) == ("stop", "same-cause")


def test_a_hang_is_shown_while_the_job_runs(here: Project) -> None:
    done = here.cli("submit", *FOUR, "broken.py", "loop")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: here.cli("diagnose", "L1", "--fr").returncode == 3, "a wait of ten seconds")
    done = here.cli("diagnose", "L1", "--fr", "--json")
    here.cli("cancel", "-y", "L1")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    hung, waiting = found["groups"]
    assert (hung["ranks"], hung["is_waiting"]) == ("2", False)
    assert hung["where"].endswith(" in looped")
    assert (waiting["ranks"], waiting["is_waiting"]) == ("0-1,3", True)
    stuck = found["stuck"]
    assert (stuck["kind"], stuck["collective"]) == ("missing", "all_reduce")
    assert (stuck["ranks"], stuck["nodes"], stuck["waiting"]) == ("2", ["local1"], "0-1,3")
    assert stuck["where"].endswith(" in main")
    assert (found["dumped"], found["silent"]) == (4, [])


def test_a_hang_names_the_line_of_the_rank_that_others_wait_for(here: Project) -> None:
    found = diagnosed(here, *HANG, "broken.py", "loop")
    texts = [each["text"] for each in found["evidence"] if each["source"] == "flight recorder"]
    assert any("rank 2 (local1) is at " in text and " in looped" in text for text in texts)
    assert any("3 ranks wait in all_reduce #3" in text for text in texts)


def test_a_training_that_runs_is_not_taken_for_a_hang(here: Project) -> None:
    done = here.cli("submit", *FOUR, "broken.py", "nothing")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: "step" in here.cli("logs", "L1").stdout, "the first step")
    done = here.cli("diagnose", "L1", "--fr")
    here.cli("cancel", "-y", "L1")
    assert done.returncode == 0, done.stdout
    assert "no rank has waited in a collective" in done.stdout
    assert "left no dump" not in done.stdout


@pytest.mark.parametrize(("how", "options", "cause"), OF_MORE_RANKS)
def test_what_more_than_one_rank_shows(
    here: Project, how: str, options: tuple[str, ...], cause: str
) -> None:
    assert diagnosed(here, *options, "broken.py", how)["verdict"]["class"] == cause


def test_a_port_that_another_process_holds(here: Project) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = diagnosed(here, "--set", f"launch.main_process_port={port}", "broken.py", "raise")
    assert found["verdict"]["class"] == "port_in_use"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(here: Project, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1) as disk:
        here.extra["SMALL_DISK"] = str(disk.root)
        verdict = diagnosed(here, "broken.py", "disk")["verdict"]
    assert (verdict["class"], verdict["ranks"]) == ("disk_full", "2")


def test_a_batch_that_deepspeed_refuses(here: Project) -> None:
    (here.path / "batch.py").write_text(BATCH)
    assert diagnosed(here, "batch.py")["verdict"]["class"] == "deepspeed_batch_mismatch"
