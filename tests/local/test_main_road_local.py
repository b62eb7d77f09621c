"""The main road on simulated nodes: two nodes of two gloo ranks each, on this machine."""

from __future__ import annotations

import json

import pytest

from tests.examples.worlds import held_out
from tests.patience import wait_for
from tests.road import LIGHT, Project, wait_for_none
from tests.scripts import chatter

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
    trained, untrained = held_out(text)
    assert trained < untrained - 1.5
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


# Logs


TWO = ("--cluster", "local", "--nodes", "2", *LIGHT)


def test_a_burst_of_many_lines_is_followed_whole_and_in_order(here: Project) -> None:
    amount = 100_000
    job_id = here.submit(*TWO, "--gpus-per-node", "1", "chatter.py", "burst", str(amount))
    watcher = here.start("logs", job_id, "-f", "-a", "-n", "all", "-o", "raw")
    try:
        wait_for(lambda: len(here.events_of(job_id, "rank_start")) == 2, "both ranks")
        (here.path / "go").touch()
        for rank in range(2):
            wait_for((here.path / "said" / f"1-{rank}.done").exists, f"the burst of rank {rank}")
        (here.path / "leave").touch()
        assert watcher.end(120) == 0, watcher.err
    finally:
        watcher.process.kill()
        here.cli("cancel", job_id)
    assert "COMPLETED" in watcher.err
    for rank in range(2):
        mine = [text for text in watcher.out.splitlines(keepends=True) if chatter.is_of(text, rank)]
        expected = b"".join(chatter.burst(rank, amount))
        assert chatter.difference(b"".join(mine), expected) == "", rank


@pytest.mark.long
def test_a_cap_on_lines_counts_what_it_leaves_out(here: Project) -> None:
    cap = ("--set", "logs.max_lines_per_s=50")
    argv = (*TWO, "--nodes", "1", "--gpus-per-node", "1", *cap, "chatter.py", "lines", "1000")
    done = here.cli("submit", "--wait", *argv)
    assert done.returncode == 0, done.stderr
    told = here.json_lines("logs", "L1", "--rank", "0", "-n", "all")
    texts = [entry["text"] for entry in told if entry["type"] == "line"]
    lost = sum(entry["bytes"] for entry in told if entry["type"] == "gap")
    assert 50 <= len(texts) < 2000
    kept = here.raw_logs("L1", "--rank", "0")
    written = [text for stream in ("out", "err") for text in chatter.lines(0, stream, 1000)]
    assert len(kept) + lost == sum(map(len, written))


# A plain Trainer is killed, trains on in the same job and after `resume`, as if undisturbed


TWO_RANKS = ("--cluster", "local", "--nproc-per-node", "2", "--device", "cpu", "--wait")
TRAINER = """
import os, sys, torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Model(torch.nn.Linear):
    def forward(self, x, labels):
        out = torch.nn.functional.dropout(super().forward(x), 0.3, self.training).squeeze(1)
        return {"loss": ((out - labels) ** 2).mean()}

class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        step = str(state.global_step)
        if step in sys.argv[2:] and args.process_index and not os.path.exists(step):
            open(step, "w")
            os.kill(os.getpid(), 9)

torch.manual_seed(0)
data = [{"x": torch.full((4,), n / 40), "labels": torch.tensor(n / 20)} for n in range(60)]
args = TrainingArguments(
    sys.argv[1], num_train_epochs=1, per_device_train_batch_size=2, save_steps=4,
    save_total_limit=1, logging_steps=1, use_cpu=True, report_to=[],
)
Trainer(Model(4, 1), args, train_dataset=data, callbacks=[Fault()]).train()
"""


def test_a_plain_trainer_trains_on_from_its_own_checkpoints(here: Project) -> None:
    (here.path / "plain.py").write_text(TRAINER)
    here.ok("submit", *TWO_RANKS, "plain.py", "whole")
    done = here.cli("submit", *TWO_RANKS, "--max-restarts", "1", "plain.py", "cut", "5", "9")
    assert done.returncode == 137, done.stderr
    saved = here.path / "cut" / "checkpoint-8"
    assert f"the Trainer saved {saved}\n" in here.ok("status", "L2")
    done = here.cli("resume", "L2", "--wait")
    assert done.returncode == 0, done.stderr
    assert f"  from       {saved}\n" in done.stderr
    began = [event["step"] for event in here.events_of("L2", "resumed")]
    assert began == [0, 4, 8]
    states = [here.path / out / "checkpoint-15/trainer_state.json" for out in ("whole", "cut")]
    whole, cut = (json.loads(state.read_text())["log_history"] for state in states)
    assert len(whole) == 15
    assert cut == whole  # every loss, in full
