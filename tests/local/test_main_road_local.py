"""The main road on simulated nodes: two nodes of two gloo ranks each, on this machine."""

from __future__ import annotations

import time

import pytest

from tests.patience import patience
from tests.road import LIGHT, Project, wait_for_none

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

FOUR = ("--cluster", "local", "--nodes", "2", "--gpus-per-node", "2", "--device", "cpu")


@pytest.mark.long
def test_training_on_two_simulated_nodes_learns_and_says_where_it_ran(here: Project) -> None:
    argv = ("train_lm.py", "--max-steps", "80", "--log-every", "20")
    done = here.cli("submit", "--wait", *FOUR, *argv)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Submitted batch job L1\n"
    text = here.logs("L1")
    for rank in range(4):
        assert f"rank {rank}/4 on" in text
    assert "barrier" not in text  # torch's launchers complain of each other after a perfect run
    assert "recvValue" not in text
    held_out, untrained = _losses(text)
    assert held_out < untrained - 1.5
    ready = [event for event in here.events("L1") if event["type"] == "world_ready"]
    assert [event["world_size"] for event in ready] == [4]
    assert here.json("status")["state"] == "COMPLETED"
    wait_for_none(here, "L1")


@pytest.mark.long
def test_an_accelerate_yaml_alone_says_how_many_nodes_and_ranks(here: Project) -> None:
    counts = "num_machines: 2\nnum_processes: 4\nmain_process_ip: 10.0.0.1\n"
    (here.path / "acc.yaml").write_text(f"distributed_type: MULTI_GPU\nuse_cpu: true\n{counts}")
    asked = ("--cluster", "local", "--accelerate-config", "acc.yaml", "world.py")
    done = here.cli("submit", "--wait", *asked)
    assert done.returncode == 0, done.stderr
    assert "clusterrun replaces settings of acc.yaml: main_process_ip 10.0.0.1\n" in done.stderr
    text = here.logs("L1")
    assert "sum 6 hosts 1" in text
    for rank in range(4):
        assert f"rank {rank}/4 on" in text
    (ready,) = (event for event in here.events("L1") if event["type"] == "world_ready")
    assert (ready["world_size"], ready["hosts"]) == (4, ["local0", "local1"])


def _losses(text: str) -> tuple[float, float]:
    line = next(line for line in text.splitlines() if "held-out loss" in line)
    words = line.split("held-out loss ")[1].replace("(", "").replace(")", "").split()
    return float(words[0]), float(words[2])


@pytest.mark.long
@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", 137)])
def test_one_rank_that_fails_ends_every_simulated_node(here: Project, how: str, code: int) -> None:
    job_id = here.submit(*FOUR, "fail.py", how, "3")
    here.wait_for_line(job_id, "ready", 4)
    since = time.monotonic()
    assert here.cli("status", job_id, "--wait", "--exit-status").returncode == 3
    wait_for_none(here, job_id)
    assert time.monotonic() - since < 10 * patience()
    status = here.json("status", job_id)
    assert (status["state"], status["exit"]["code"]) == ("FAILED", code)


def test_a_failed_setup_line_is_the_reason_that_status_gives(here: Project) -> None:
    job_id = here.submit(*FOUR, "--setup", "module-that-is-nowhere load cuda", "world.py")
    assert here.cli("status", job_id, "--wait", "--exit-status").returncode == 3
    status = here.json("status", job_id)
    assert (status["state"], status["exit"]["code"]) == ("FAILED", 122)
    assert "setup line 1 failed with status 127" in status["verdict"]["message"]


@pytest.mark.long
@pytest.mark.parametrize("option", [(), ("--checkpoint",)])
def test_cancel_awaits_what_a_script_saves_in_its_own_handler(
    here: Project, option: tuple[str, ...]
) -> None:
    job_id = here.submit(*FOUR, *LIGHT, "own_handler.py", "SIGTERM", "13", "0")
    here.wait_for_line(job_id, "ready", 4)
    here.ok("cancel", *option, job_id)
    here.wait_for_line(job_id, "has saved", 4)
    wait_for_none(here, job_id)
    status = here.json("status", job_id)
    assert (status["state"], len(status["attempts"])) == ("CANCELLED", 1)
    assert here.ok("resume", job_id, "--wait")
    assert here.logs(job_id).count("continues") == 4
    assert here.cli("cancel", job_id).returncode == 0
