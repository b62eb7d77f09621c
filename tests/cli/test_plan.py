"""`plan`: what is asked on the command line, what is printed, and how it ends."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterrun.estimates.models import BUILT_IN
from tests.cli.conftest import CommandLine
from tests.readme import ROOT, blocks

LLAMA = ("--model", "llama-3.1-8b", "--seq-len", "4096", "-N", "4", "--gpus-per-node", "8")
H100 = ("--gpu", "h100-80g", "--strategy", "zero3", "--grad-ckpt", "--micro-batch", "4")
BATCH = ("--accumulation", "2", "--samples", "1200000")


def told(here: CommandLine, *argv: str) -> dict[str, Any]:
    """Return the answer of `plan --json`, whose exit status is that of its verdict."""
    said = here("plan", *argv, "--json")
    found: dict[str, Any] = json.loads(said.out)
    codes = {"fits": 0, "tight": 0, "no": 3, None: 1}
    assert said.code == codes[found.get("verdict", "fits")], said.err
    return found


def test_a_person_reads_batch_steps_memory_time_and_disk(here: CommandLine) -> None:
    said = here("plan", *LLAMA, *H100, *BATCH, "--epochs", "10", "--lr", "1e-5", "--base-batch=16")
    assert said.code == 0, said.err
    assert "model     llama-3.1-8b   8.03 B parameters   bf16   seq 4,096" in said.out
    assert "cluster   4 nodes x 8 H100-80G = 32 GPUs   strategy zero3" in said.out
    assert "= 256 samples a step (1,048,576 tokens)" in said.out
    assert "4,687 full steps per epoch (accelerate runs 4,688); 46,880 in all" in said.out
    assert "1e-05 at batch 16 -> 0.00016 linear, 4e-05 sqrt (linear)" in said.out
    verdict, pace, *_ = said.out.splitlines()
    assert verdict == "fits: 51 of 80 GiB per GPU"
    assert re.fullmatch(r"[0-9.]+ d on 32 GPUs, [0-9,]+ GPU-hours, [0-9,]+ tokens/s", pace)
    assert re.search(r"total \+ 5 % +50.8   of 79.6   64 %   FITS", said.out)
    assert "8.1 h an epoch" in said.out
    assert "a step: passes 6.2 s, traffic 0.27 s" in said.out
    assert re.search(r"micro-batch 16: [0-9.]+ GiB \([0-9]+ %\) NO", said.out)


def test_a_program_reads_every_term_with_its_formula_and_source(here: CommandLine) -> None:
    answer = told(here, *LLAMA, *H100, *BATCH)
    assert answer["schema"] == "clusterrun.plan/1"
    assert answer["batch"] == {"effective": 256, "tokens": 1_048_576}
    assert answer["steps"]["full_per_epoch"] == 4_687
    memory = answer["gpu_memory"]
    assert memory["verdict"] == answer["verdict"] == "fits"
    assert memory["total_bytes"] == round(1.05 * sum(term["bytes"] for term in memory["terms"]))
    assert all(term["formula"] and term["source"] for term in memory["terms"])
    assert [found["micro_batch"] for found in answer["what_if"]] == [8, 16]


def test_links_are_those_of_the_network_or_as_given(here: CommandLine) -> None:
    def traffic(*options: str) -> tuple[dict[str, float], float]:
        answer = told(here, *LLAMA, *H100, *BATCH, *options)
        return answer["links"], answer["time"]["parts"]["network_s"]

    own, own_s = traffic()
    assert (own["within_node"], own["between_nodes"]) == pytest.approx((360e9, 360e9))
    assert traffic("--network", "ethernet")[1] == pytest.approx(128 * own_s)
    (here.path / "clusterrun.yaml").write_text("training: {inter_node_bandwidth: 45}\n")
    assert traffic()[1] == pytest.approx(8 * own_s)
    given = ("--intra-node-bandwidth", "90", "--inter-node-bandwidth", "180")
    links, seconds = traffic(*given)
    assert (links["within_node"], links["between_nodes"]) == (90e9, 180e9)
    assert seconds == pytest.approx(4 * own_s)


def test_what_the_host_does_is_a_part_of_the_time(here: CommandLine) -> None:
    argv = ("--strategy", "zero2-offload", "--host-mem", "1000GiB")
    assert re.search(r"a step: passes .*host [0-9.]+ s", here("plan", *LLAMA, *H100, *argv).out)


# Verdict and alternatives


@pytest.mark.parametrize(
    ("argv", "code", "line"),
    [
        (("--gpu", "h100-80g", "--strategy", "zero3", "--grad-ckpt"), 0, "fits: 19 of 80 GiB per"),
        (("--gpu", "a100-40g", "--strategy", "ddp"), 3, "does not fit: 219 of 40 GiB per GPU"),
        (("--grad-ckpt", "--strategy=zero3"), 1, "no verdict: 19.5 GiB per GPU; pass --gpu h100"),
        (
            ("--device", "cpu", "--cluster", "slurm"),
            1,
            "no verdict: 1,681.2 GiB per node; pass --host-mem 64GiB",
        ),
        (
            ("--gpu", "h100-80g", "--strategy", "fsdp", "--host-mem", "40GiB"),
            3,
            "does not fit: 54 of 40 GiB of memory per node",
        ),
        (
            ("--gpu", "h100-80g", "--strategy", "zero3", "--max-steps=1000000", "--time=1:00:00"),
            3,
            "does not finish: [0-9.]+ d in a job of 01:00:00 that saves nothing; pass --save-every",
        ),
    ],
)
def test_the_first_line_is_the_verdict(
    here: CommandLine, argv: tuple[str, ...], code: int, line: str
) -> None:
    said = here("plan", *LLAMA, *argv)
    assert said.code == code
    assert re.match(line, said.out.splitlines()[0]), said.out.splitlines()[0]


def test_the_speed_up_is_shown_unless_memory_is_lacking(here: CommandLine) -> None:
    argv = (
        *LLAMA,
        "-N1",
        "--gpus-per-node",
        "2",
        "--strategy",
        "ddp",
        "--grad-ckpt",
        "--lora",
        "8",
    )
    assert "\nspeed-up  " in here("plan", *argv, "--gpu", "h100-80g").out
    assert "speed-up" not in here("plan", *argv, "--gpu", "t4").out


def test_what_is_tight_and_what_is_unknown_have_first_lines_of_their_own(here: CommandLine) -> None:
    tight = here("plan", *ADAPTERS, "--micro-batch", "2", "--gpu", "rtx3090").out
    assert tight.startswith("fits tightly: 20 of 24 GiB per GPU\n")
    card = ("--gpu", "rtx3080", "--gpu-mem", "20GiB")
    t5 = here("plan", "--model", "t5-base", "--seq-len", "192", "--micro-batch", "32", *card).out
    assert t5.startswith("fits tightly: 19 of 20 GiB per GPU\n")
    open_ = here("plan", "--params", "3e9", "--seq-len", "512", "--gpu", "h100-80g").out
    assert open_.startswith("no verdict: at least 60 of 80 GiB per GPU, and activations are not c")
    assert "what if" not in open_


def test_what_would_fit_is_said_with_the_options_that_change(here: CommandLine) -> None:
    assert told(here, *LLAMA, *H100)["alternatives"] == []
    asked = ("--strategy", "ddp", "--micro-batch", "2", "--no-grad-ckpt")
    argv = (*LLAMA, "--gpu", "h100-80g", *asked)
    answer = told(here, *argv)
    assert 1 <= len(answer["alternatives"]) <= 3
    assert any("--grad-ckpt" in other["options"] for other in answer["alternatives"])
    for other in answer["alternatives"]:
        again = told(here, *argv, *other["options"].split())
        assert again["verdict"] == other["verdict"] == "fits"
        assert again["gpu_memory"]["total_bytes"] == other["gpu_bytes"]
        assert again["batch"] == answer["batch"]
    first = answer["alternatives"][0]
    said = here("plan", *argv).out.splitlines()
    assert said[1] == f"would fit:  {first['options']} ({first['gpu_bytes'] / (1 << 30):.0f} GiB)"


def test_the_page_shows_what_is_printed_and_every_known_name(here: CommandLine) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    command, shown = re.findall(r"\$ clusterrun (.*)\n((?:.+\n)+?)```", page)[0]
    assert here(*shlex.split(command)).out.startswith(f"{shown}\n")
    assert [name for name in BUILT_IN if f"`{name}`" not in page] == []


def test_adapters_and_more_nodes_are_proposed_where_no_strategy_helps(here: CommandLine) -> None:
    argv = ("--model", "llama-3.3-70b", "--seq-len", "4096", "--gpus-per-node", "8", "--gpu")
    found = told(here, *argv, "a100-80g")["alternatives"]
    assert [choice["verdict"] for choice in found[1:]] == 2 * ["fits"]
    assert found[1]["lora"] == 16
    assert found[2]["nodes"] > 1
    small = told(here, "--model=qwen3-8b", "--seq-len=2048", "--gpu", "rtx4090")
    assert any("--lora 16 --load-in-4bit" in x["options"] for x in small["alternatives"])


def test_formulas_are_behind_explain_with_what_their_symbols_mean(here: CommandLine) -> None:
    argv = ("plan", *LLAMA, *H100, *BATCH)
    plain, explained = here(*argv).out, here(*argv, "--explain").out
    assert "2 P/32" not in plain
    assert re.search(r"  weights +0.47   2 P/32\n", explained)
    legend = explained[explained.index("what if") :]
    assert re.search(r"  P +8,030,261,248  parameters\n", legend)
    shown = {line.split()[0] for line in legend.splitlines()[2:]}
    assert shown == {"P", "L_max", "n", "s", "b", "h", "L", "V"}


def test_gpu_hours_are_those_of_all_gpus(here: CommandLine) -> None:
    answer = told(here, *LLAMA, *H100, *BATCH, "--epochs", "2")
    assert answer["gpu_hours"] == pytest.approx(32 * answer["time"]["total_s"]["mid"] / 3600)
    assert answer["summary"] == "fits: 51 of 80 GiB per GPU"


def test_what_does_not_fit_ends_with_3(here: CommandLine) -> None:
    assert told(here, *LLAMA, "--gpu", "rtx3090", "--strategy", "ddp")["verdict"] == "no"


def test_the_section_training_of_a_job_file_is_read(here: CommandLine) -> None:
    (here.path / "train.yaml").write_text(
        "slurm: {nodes: 2, gpus_per_node: 4}\n"
        "training: {model: gpt2, seq_len: 1024, micro_batch: 8, gpu: a100-40g, samples: 100000}\n"
    )
    assert told(here, "train.yaml")["batch"]["effective"] == 64
    assert told(here, "train.yaml", "-N", "1")["batch"]["effective"] == 32


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        ((), "no model was named", "--params 8.03e9"),
        (
            ("--model", "my/model"),
            "'my/model' is not a known model, not a config.json",
            "run 'hf download my/model config.json', then plan --model with the path it prints",
        ),
        (("--model", "gpt2", "--gpu", "h200x"), "GPU 'h200x' is not known", "h200"),
        (
            ("--model", "gpt2", "--samples", "200", "--micro-batch", "256"),
            "effective batch 256 is larger than the dataset (200 samples)",
            "--micro-batch",
        ),
        (
            ("--model", "gpt2", "--effective-batch", "100", "--micro-batch", "3"),
            "an effective batch of 100 is not a multiple of 3 samples per pass",
            "use 99, change --micro-batch, or let --recommend",
        ),
        (("--model", "gpt2", "--tokens", "1e9"), "--tokens needs the length", "--seq-len"),
        (("--model", "gpt2", "--recommend"), "a recommendation needs the memory", "--gpu"),
        (("--model", "gpt2", "--mfu", "2"), "an MFU of 2 is impossible", "0.4"),
        (("--model", "~nobody-of-this-name/x"), "cannot read the model '~nobody", "-"),
        (("--model", "x" * 5000), "cannot read the model 'xxx", "-"),
        (("--model", "gpt2", "--epochs", "1e308"), "1e+308 epochs are more than the maximum", "-"),
        (("--model", "gpt2", "--gpu-mem", "24"), "--gpu-mem is only 24 bytes", "24GiB"),
        (
            ("--model", "gpt2", "--deepspeed-config", "x.json"),
            "plan cannot read your own configuration file",
            "-",
        ),
        (("--model", "gpt2", "--strategy", "none", "-N", "2"), "strategy none runs one", "ddp"),
        (("--model", "gpt2", "--device", "cpu", "--strategy", "fsdp"), "fsdp needs GPUs", "zero2"),
        (
            ("--model", "gpt2", "--device", "cpu", "--mixed-precision", "fp16"),
            "fp16 needs a GPU",
            "bf16",
        ),
        (
            ("--model", "gpt2", "--effective-batch", "64", "--accumulation", "4"),
            "an effective batch of 64 is 64 passes of 1, not 4",
            "leave out --effective-batch",
        ),
        (("--model", "gpt5"), "'gpt5' is not a known model", "use 'gpt2'"),
        (("--model", "qwen-3-8b"), "'qwen-3-8b' is not a known", "use 'qwen3-8b' or 'qwen3-4b'"),
        (("--model", "x/llama-3.1-9b", "--params", "9B"), "'x/llama", "use 'llama-3.1-8b'"),
        (("--model", "nothing-like-it"), "'nothing-like-it'", "hf download ORG/NAME config.json"),
        (("--model", "gpt2", "--load-in-4bit"), "4-bit weights can't", "--lora 16"),
        (
            ("--model", "gpt-oss-20b", "--lora", "16", "--load-in-4bit"),
            "bitsandbytes can't quantize experts",
            "leave out --load-in-4bit",
        ),
        (
            ("--model", "gpt2", "--gpus-per-node", "2", "--nproc-per-node", "4"),
            "4 ranks of a node cannot share 2 GPUs",
            "--nproc-per-node",
        ),
        (("--active-params", "3B"), "--active-params needs --params", "--params"),
        (("--model", "gpt2", "--recommend", "--what-if", "nodes"), "--recommend, --what-if", "one"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    here: CommandLine, argv: tuple[str, ...], message: str, hint: str
) -> None:
    more = ("--seq-len", "512", "--gpu", "a100") if "--mfu" in argv else ()
    said = here("plan", *argv, *more)
    assert (said.code, said.out) == (2, "")
    assert f"error: {message}" in said.err
    assert hint in said.err


def test_a_config_that_is_no_json_is_refused_with_the_cause(here: CommandLine) -> None:
    (here.path / "config.json").write_text("{broken")
    said = here("plan", "--model", "config.json")
    assert said.code == 2
    assert ": Expecting property name" in said.err


def test_nodes_without_gpus_are_planned_as_they_are_submitted(here: CommandLine) -> None:
    (here.path / "train.py").touch()
    nodes = ("-N", "2", "--gpus-per-node", "0")
    said = here("plan", "--model", "gpt2", *nodes, "--gpu", "h100-80g").out
    assert "cluster   2 nodes x 1 CPU = 2 ranks" in said
    assert "GPU" not in said
    submitted = here("submit", "--cluster", "slurm", *nodes, "--dry-run", "train.py").err
    assert "no GPU requested: 1 CPU process per node" in submitted
    refused = here("plan", "--model", "gpt2", *nodes, "--gpu", "h100-80g", "--recommend")
    assert (refused.code, refused.out) == (2, "")
    assert "and this training runs on CPUs" in refused.err


def test_a_neighbour_is_shown_in_a_table_where_asked(here: CommandLine) -> None:
    said = here("plan", *LLAMA, *H100, "--what-if", "strategy")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines() if line.startswith(("zero", "ddp"))]
    assert rows[0][0] == "zero3"
    assert {"ddp", "zero1", "zero2", "zero3-offload"} <= {row[0] for row in rows}
    assert next(row for row in rows if row[0] == "ddp")[-1] == "no"


ADAPTERS = ("--model", "llama-2-7b", "--lora", "64", "--seq-len", "1024", "--grad-ckpt")
BATCH_64 = ("--micro-batch", "8", "--accumulation", "8", "--samples", "2500", "--epochs", "3")


def test_cards_are_compared_in_one_table_with_their_prices(here: CommandLine) -> None:
    priced = ("--gpu-price", "a100=1.2", "--gpu-price", "h100=2.5")
    argv = (*ADAPTERS, *BATCH_64, "--gpu", "a100", "--host-mem", "64GiB", "--what-if", "gpu")
    said = here("plan", *argv, *priced)
    assert said.code == 0
    head, *lines = said.out[said.out.index("GPU            PRECISION") :].splitlines()
    assert re.split("  +", head)[-2:] == ["COST", "VERDICT"]
    rows = {(cells := re.split("  +", line))[0]: cells[1:] for line in lines}
    assert rows["A100-40G"][2:] == ["40.0", "71 %", "fits", "47.1 min", "2.72", "0.94", "fits"]
    assert rows["V100-32G"][:4] == ["fp16", "28.5", "31.7", "90 %"]
    assert rows["V100-32G"][-2:] == ["-", "tight"]
    assert [rows[name][-1] for name in ("RTX-3090", "RTX-4090", "RTX-3080-10G")] == 3 * ["no"]
    assert {"P100-16G", "RTX-A6000", "A100-80G", "H100-80G", "H200"} <= rows.keys()
    assert "cost      0.94 for 0.785 GPU-hours" in said.out
    assert "COST" not in here("plan", *argv).out
    (h100,) = [each for each in told(here, *argv, *priced)["what_if"] if each["gpu"] == "H100-80G"]
    assert h100["cost"] == pytest.approx(2.5 * h100["total_s"] / 3600)


def test_a_card_named_with_its_memory_is_called_by_it(here: CommandLine) -> None:
    argv = (*ADAPTERS, "--gpu", "rtx3080", "--gpu-mem", "20GiB", "--gpu-price", "rtx3080=0.2")
    said = here("plan", *argv, "--max-steps", "10", "--what-if", "gpu", "--host-mem", "64GiB")
    assert "1 node x 1 RTX-3080-20G = 1 GPU" in said.out
    assert re.search(r"(?m)^RTX-3080-20G .* 20.0 ", said.out)
    assert re.search(r"(?m)^RTX-3080-10G .* 10.0 ", said.out)
    assert re.search(r"cost +[0-9.]+ for", said.out)
    assert "is taken as" not in said.err
    inputs = told(here, *argv)["inputs"]
    assert (inputs["gpu"], inputs["gpu_bytes"]) == ("RTX-3080-20G", 20 << 30)


def test_passes_too_small_for_a_gpu_are_told_and_take_longer(here: CommandLine) -> None:
    argv = (*ADAPTERS, "--gpu", "a100-40g", "--host-mem", "64GiB")
    small = here("plan", *argv, "--micro-batch", "1", "--accumulation", "64").out
    assert "(at MFU 0.19: passes this small reach 70 % of 0.4)" in small
    full = here("plan", *argv, *BATCH_64).out
    assert "time      23.5 s a step, 15.7 min an epoch, 47.1 min in all (at MFU 0.25)" in full
    assert "          2.72 samples/s, 2,783 tokens/s in all" in full
    time = told(here, *argv, *BATCH_64)["time"]
    assert time["samples_per_s"] == pytest.approx(64 / time["step_s"]["mid"])
    assert time["tokens_per_s"] == pytest.approx(1024 * time["samples_per_s"])
    assert time["filled"] == pytest.approx(0.95, abs=0.01)


@pytest.mark.parametrize(
    ("card", "count", "micro_batch", "span"),
    [
        ("rtx3090", 1, 8, "3.4 h"),
        ("a100-40g", 1, 8, "47.1 min"),
        ("a100-80g", 1, 16, "45.9 min"),
        ("a100-40g", 4, 8, "11.8 min"),
    ],
)
def test_three_epochs_of_2500_samples_as_the_docs_have_them(
    here: CommandLine, card: str, count: int, micro_batch: int, span: str
) -> None:
    gpus = ("--gpu", card, "--gpus-per-node", str(count), "--micro-batch", str(micro_batch))
    data = ("--effective-batch", "64", "--samples", "2500", "--epochs", "3")
    assert f", {span} in all" in here("plan", *ADAPTERS, *gpus, *data).out


@pytest.mark.parametrize(
    ("card", "rate"),
    [("rtx4090", "3,463"), ("rtx4070", "3,463"), ("rtx3090", "3,213"), ("rtx3080", "3,142")],
)
def test_a_tiny_transformer_is_about_as_fast_on_any_card(
    here: CommandLine, card: str, rate: str
) -> None:
    shape = ("--hidden=256", "--layers=3", "--heads=8", "--ffn=1024", "--vocab=1000")
    said = here("plan", *shape, "--seq-len", "64", "--micro-batch", "16", "--gpu", card)
    assert f"{rate} samples/s" in said.out


def test_mixed_precision_saves_less_than_half_of_the_memory(here: CommandLine) -> None:
    shape = ("--hidden=512", "--layers=6", "--heads=8", "--ffn=2048", "--vocab=1000")
    asked = ("plan", *shape, "--seq-len=512", "--micro-batch=32", "--gpu=rtx3090", "--json")
    bf16, fp32 = (
        json.loads(here(*asked, "--mixed-precision", precision).out) for precision in ("bf16", "no")
    )
    activations = [
        next(term["bytes"] for term in plan["gpu_memory"]["terms"] if term["name"] == "activations")
        for plan in (bf16, fp32)
    ]
    assert activations[0] / activations[1] == pytest.approx(0.63, abs=0.01)
    assert 0.5 < bf16["gpu_memory"]["total_bytes"] / fp32["gpu_memory"]["total_bytes"] < 1
    assert bf16["time"]["step_s"]["mid"] < fp32["time"]["step_s"]["mid"]


def test_a_small_node_with_three_cards_of_20_gib_is_tight_by_its_host(here: CommandLine) -> None:
    shape = ("--hidden", "768", "--layers", "20", "--heads", "12", "--ffn", "3072", "--vocab")
    cards = (
        "--gpu",
        "rtx3080",
        "--gpu-mem",
        "20GiB",
        "--host-mem",
        "12GiB",
        "--gpus-per-node",
        "3",
    )
    batch = ("--micro-batch", "32", "--accumulation", "2", "--seq-len", "192", "--samples", "10M")
    said = here(
        "plan",
        "--params",
        "0.19B",
        *shape,
        "29298",
        *cards,
        *batch,
        "--epochs",
        "3",
        "--gpus-per-node",
        "3",
    )
    assert said.code == 0
    assert re.search(r"total \+ 5 % +15.6   of 20.0   78 %   FITS\n", said.out)
    assert re.search(r"total +11.1   of 12.0   93 %   TIGHT: it fits below 70 %\n", said.out)
    assert "52,083 full steps per epoch" in said.out
    assert "time      0.766 s a step, 11.1 h an epoch, 33.2 h in all" in said.out


@pytest.mark.parametrize("price", ["h100", "h100=", "h100=-1", "h100=nan"])
def test_a_price_that_is_none_is_refused(here: CommandLine, price: str) -> None:
    said = here("plan", *ADAPTERS, "--gpu", "h100-80g", "--gpu-price", price)
    assert (said.code, said.out) == (2, "")
    assert f"error: --gpu-price '{price}' has no price" in said.err


def test_the_fastest_way_that_fits_is_recommended_with_its_options(here: CommandLine) -> None:
    said = here("plan", *LLAMA, "--gpu", "h100-80g", "--recommend", "--effective-batch", "256")
    assert said.code == 0
    first = said.out.splitlines()[1].split()
    assert first[-2:] == ["x1.00", "fits"]
    assert f"plan ... --strategy {first[0]} --micro-batch {first[1]}" in said.out


def test_where_nothing_fits_that_is_the_answer(here: CommandLine) -> None:
    said = here("plan", *LLAMA[:4], "--gpu", "rtx3080", "--host-mem", "16GiB", "--recommend")
    assert (said.code, said.out) == (3, "")
    assert "nothing fits: --strategy zero3-offload --micro-batch 1" in said.err
    assert "use more nodes, or train adapters (--lora)" in said.err


@pytest.mark.parametrize(
    ("device", "preset"),
    [
        (("--gpu", "rtx3080"), "small-gpu"),
        (("--gpu", "a100-80g"), "large-gpu"),
        (("--device", "cpu", "--host-mem", "64GiB"), "cpu"),
    ],
)
def test_who_chose_no_batch_is_told_what_to_start_with(
    here: CommandLine, device: tuple[str, ...], preset: str
) -> None:
    argv = ("plan", "--params", "10M", *device)
    assert f"preset    {preset}: micro-batch" in here(*argv).out
    assert "preset" not in here(*argv, "--micro-batch", "2").out


def test_planning_loads_nothing_heavy() -> None:
    heavy = ["torch", "accelerate", "deepspeed", "transformers", "submitit", "numpy"]
    argv = ("plan", *LLAMA, *H100, "--recommend")
    program = (
        "import sys; from clusterrun.cli.main import main; code = main(sys.argv[1:]);"
        f"print([name for name in {heavy} if name in sys.modules], int(code))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[] 0"


def test_what_offloads_is_tight_at_best_where_the_memory_of_a_node_is_not_known(
    here: CommandLine,
) -> None:
    argv = ("--model", "llama-2-70b", "--seq-len", "512", "--gpus-per-node", "1", "--gpu", "h100")
    said = here("plan", *argv, "--recommend", "--effective-batch", "8")
    assert said.code == 0
    assert said.out.splitlines()[1].split()[-1] == "tight"
    assert "--host-mem" in said.err
    little = here("plan", *argv, "--recommend", "--effective-batch", "8", "--host-mem", "64GiB")
    assert little.code == 3


def test_a_run_that_was_submitted_without_facts_is_not_compared(here: CommandLine) -> None:
    here.slurm()
    assert here("submit", "-N2", "train.py").code == 0
    said = here("plan", "--compare", "4711", "--model", "gpt2")
    assert said.code == 1
    assert "error: job 4711 has no estimate: no model was named" in said.err
    assert "hint: describe the training under training: in clusterrun.yaml" in said.err
    assert here("plan", "--compare").err == said.err  # the newest run


def test_without_activations_nothing_fits_for_sure(here: CommandLine) -> None:
    for more in ((), ("--host-mem", "64GiB")):
        assert told(here, "--params", "1B", "--gpu", "h100-80g", *more)["verdict"] is None
    answer = told(here, "--params", "70B", "--gpu", "h100-80g")
    assert answer["verdict"] == "no"
    assert any("activations are not counted" in note for note in answer["notes"])


def test_experts_work_as_their_active_part_and_never_fit_for_sure(here: CommandLine) -> None:
    argv = ("--seq-len", "4096", *LLAMA[4:], *H100[:4])
    sizes = ("--params", "46.7B", "--active-params", "12.9B")
    said = here("plan", *sizes, *argv)
    assert "46.70 B parameters, 12.90 B active" in said.out
    assert "note: activations are not counted without the model's shape: the total" in said.err
    assert "note: the time assumes a dense model's MFU" in said.err
    experts, dense = told(here, *sizes, *argv), told(here, "--params", "12.9B", *argv)
    compute = [found["time"]["parts"]["compute_s"] for found in (experts, dense)]
    assert compute[0] == compute[1]
    assert experts["time"]["parts"]["network_s"] > dense["time"]["parts"]["network_s"]
    assert experts["disk"]["total_bytes"] > 3 * dense["disk"]["total_bytes"]
    assert experts["verdict"] is None
    for more in (("--recommend",), ("--lora", "8")):
        refused = here("plan", *sizes, *argv, *more)
        assert (refused.code, refused.out) == (2, "")
        assert "shape" in refused.err


def test_a_known_model_with_experts_has_a_verdict_and_a_recommendation(here: CommandLine) -> None:
    argv = ("--model", "Qwen/Qwen3-30B-A3B", "--seq-len", "4096", *LLAMA[4:], *H100[:2])
    answer = told(here, *argv, "--strategy", "fsdp", "--grad-ckpt")
    model = answer["inputs"]["model"]
    assert (model["params"], model["active_params"]) == (30_532_122_624, 3_353_032_704)
    assert answer["verdict"] == "fits"
    assert any("a dense model's MFU" in note for note in answer["notes"])
    (first, *_) = told(here, *argv, "--recommend", "--effective-batch", "256")["recommended"]
    assert first["verdict"] == "fits"
    adapters = told(here, *argv, "--strategy", "fsdp", "--lora", "16")
    assert any("without the routed experts" in note for note in adapters["notes"])


def test_weights_in_4_bits_take_a_quarter_but_for_the_words(here: CommandLine) -> None:
    argv = ("--model", "llama-3.1-8b", "--seq-len", "1024", "--gpu", "rtx4090", "--grad-ckpt")
    whole, quantized = (
        next(
            term["bytes"]
            for term in told(here, *argv, "--lora", "16", *more)["gpu_memory"]["terms"]
            if term["name"] == "weights"
        )
        for more in ((), ("--load-in-4bit",))
    )
    adapters = 4 * 41_943_040  # peft's count for rank 16 on all linear layers
    words = 8_030_261_248 - 32 * 218_112_000
    assert whole == 2 * 8_030_261_248 + adapters
    per_weight = 0.5 + 1 / 64 + 4 / 64 / 256
    assert quantized == int(4 * words + per_weight * 32 * 218_112_000 + adapters)


def test_lora_of_0_trains_all_weights(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text("training: {lora: 8}\n")
    argv = ("--params", "1B", "--gpu", "h100-80g", "--lora", "0")
    assert told(here, *argv)["inputs"]["lora"] == 0


def test_images_are_samples_of_one_length(here: CommandLine) -> None:
    argv = ("--model", "google/vit-base-patch16-224", "--gpu", "a100-80g", "--micro-batch", "64")
    answer = told(here, *argv)
    assert answer["inputs"]["seq_len"] == 14 * 14 + 1
    assert answer["time"]["tokens_per_s"] is None
    assert re.search("[0-9] samples/s\n", here("plan", *argv).out.splitlines()[1] + "\n")
    assert answer["verdict"] == "fits"


OTHER_FACTS = (
    "training: {params: 478_720, hidden: 128, layers: 2, heads: 4, ffn: 512, vocab: 256, lora: 8, "
    "step_time: 0.5s, max_steps: 200, micro_batch: 8, accumulation: 4}\n"
)


@pytest.mark.parametrize("recommend", [(), ("--recommend", "--effective-batch", "32")])
def test_a_model_of_the_command_line_is_not_mixed_with_another_of_the_file(
    here: CommandLine, recommend: tuple[str, ...]
) -> None:
    argv = ("--model", "llama-3.1-8b", "--epochs", "10", "--seq-len", "512", "--gpu", "h100-80g")
    plain = told(here, *argv, "--micro-batch", "8", *recommend)
    (here.path / "clusterrun.yaml").write_text(OTHER_FACTS)
    more = () if recommend else ("--accumulation", "1")
    mixed = told(here, *argv, *recommend, *more)
    assert mixed == plain
    assert mixed["inputs"]["model"]["params"] == 8_030_261_248
    said = here("plan", *argv, *recommend).err
    assert "note: training.model, command line (--model), replaces training.params, " in said
    assert "training.epochs, command line (--epochs), replaces training.max_steps (" in said


def test_a_note_names_what_files_add_to_a_model_of_the_command_line(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text(OTHER_FACTS)
    said = here("plan", "--model", "gpt2", "--max-steps", "10").err
    assert "note: also from ./clusterrun.yaml: micro_batch 8, accumulation 4\n" in said
    assert "also from" not in here("plan").err  # all of it is from there
    (here.path / "clusterrun.yaml").write_text("training: {model: gpt2}\n")
    refused = here("plan", "--hidden", "64")
    assert refused.code == 2
    notes, _ = refused.err.split("error: the size of the model is unknown")
    assert "note: training.hidden, command line (--hidden), replaces training.model" in notes


def test_the_numbers_of_the_readme_hold_beside_the_facts_of_another_model(
    here: CommandLine,
) -> None:
    (block,) = [each for each in blocks("local") if "plan --model" in each]
    commands = [line for line in block.replace("\\\n", " ").splitlines() if "--model" in line]
    plain, recommended = (told(here, *shlex.split(line)[2:]) for line in commands)
    assert plain["verdict"] == "fits"
    (here.path / "clusterrun.yaml").write_text(OTHER_FACTS)
    mixed = [told(here, *shlex.split(line)[2:]) for line in commands]
    assert mixed[0] == plain
    assert mixed[1]["recommended"] == recommended["recommended"]
    assert plain["inputs"]["model"]["params"] == 8_030_261_248
    assert plain["steps"]["total"] == 46_880


def test_a_script_is_planned_with_the_file_of_its_project(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text(OTHER_FACTS)
    assert told(here, "train.py")["inputs"]["model"]["params"] == 478_720


@pytest.mark.parametrize(
    ("argv", "is_judged"),
    [
        (("--device", "cpu"), True),  # this machine runs it
        (("--cluster", "local"), True),
        (("--cluster", "slurm"), False),  # there is no sbatch here
        ((), False),
        (("--gpu", "a100-80g"), False),  # which this machine may not have
    ],
)
def test_a_disk_is_judged_only_where_the_job_writes(
    here: CommandLine, argv: tuple[str, ...], is_judged: bool
) -> None:
    asked = ("--params", "1M", "--save-every", "10", *argv)
    assert (told(here, *asked)["disk"]["verdict"] is not None) == is_judged
    assert ("not checked: the job writes elsewhere" in here("plan", *asked).out) != is_judged


def test_a_login_node_judges_the_disk_of_its_cluster(here: CommandLine) -> None:
    here.slurm()
    asked = ("--params", "1M", "--save-every", "10", "--gpu", "a100-80g")
    assert told(here, *asked)["disk"]["verdict"] == "fits"


def test_an_unknown_model_is_refused_beside_numbers_of_a_file(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text(OTHER_FACTS)
    for more in ((), ("--recommend",)):
        said = here("plan", "--model", "llama-3.1-9b", *more)
        assert (said.code, said.out) == (2, "")
        assert "hint: use 'llama-3.1-8b'" in said.err


def test_numbers_win_over_a_model_of_the_file(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text("training: {model: gpt2}\n")
    assert (
        told(here, "--params", "7e9", "--host-mem=64GiB")["inputs"]["model"]["params"]
        == 7_000_000_000
    )


def test_a_short_name_of_a_gpu_says_which_was_taken(here: CommandLine) -> None:
    assert (
        "'a100' is assumed to be the A100-40G" in here("plan", "--params", "1B", "--gpu=a100").err
    )


def test_a_preset_that_does_not_fit_is_not_suggested(here: CommandLine) -> None:
    argv = ("plan", "--model", "mistral-7b", "--seq-len", "4096", "--gpu", "rtx3090")
    assert "preset" not in here(*argv).out


def test_what_is_recommended_keeps_to_the_disk(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm()
    argv = ("plan", *LLAMA, "--gpu", "h100-80g", "--recommend", "--effective-batch", "256")
    full = SimpleNamespace(total=10, used=9, free=1)
    monkeypatch.setattr("clusterrun.advice.question.shutil.disk_usage", lambda path: full)
    assert here(*argv).code == 0
    assert here(*argv, "--save-every", "10").code == 3


# submit asks, too


@pytest.fixture
def project(here: CommandLine) -> Path:
    here.slurm()
    (here.path / "train.py").write_text("")
    (here.path / "clusterrun.yaml").write_text(
        "script: train.py\nslurm: {nodes: 2, gpus_per_node: 8}\n"
        "training: {model: llama-3.1-8b, seq_len: 4096, gpu: h100-80g, effective_batch: 256}\n"
    )
    return here.path


def test_submit_says_what_plan_says_no_to(here: CommandLine, project: Path) -> None:
    said = here("submit")
    assert said.code == 0
    assert re.search(r"note: memory of a GPU: [0-9.]+ GiB estimated, 79.6 available; run", said.err)


def test_submit_without_facts_says_nothing_of_estimates(here: CommandLine, project: Path) -> None:
    (project / "clusterrun.yaml").write_text("script: train.py\nslurm: {gpus_per_node: 8}\n")
    assert "estimate" not in here("submit").err


def test_facts_that_make_no_sense_do_not_stop_a_submission(
    here: CommandLine, project: Path
) -> None:
    said = here("submit", "--set", "training.model=gone")
    assert said.code == 0
    assert "note: no estimate was made: 'gone' is not a known model" in said.err


@pytest.mark.parametrize(
    "argv", [("--deepspeed-config", "ds.json"), ("train.py", "--deepspeed", "ds.json")]
)
def test_submit_says_once_that_no_estimate_was_made(
    here: CommandLine, project: Path, argv: tuple[str, ...]
) -> None:
    (project / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    said = here("submit", *argv).err
    (note,) = [line for line in said.splitlines() if "estimate" in line]
    why = "plan cannot read your own configuration file"
    assert note == f"note: no estimate was made: {why}"


def test_submit_plan_sets_what_is_recommended_and_hands_it_to_the_ranks(
    here: CommandLine, project: Path
) -> None:
    said = here("submit", "--plan")
    assert said.code == 0
    planned = said.err.split("plan       ")[1].splitlines()[0]
    assert planned == here("plan", "--recommend").out.split("plan ... ")[1].splitlines()[0]
    (run,) = [path for path in (project / "runs").glob("train/*") if path.is_dir()]
    words = planned.split()
    env = (run / "env.sh").read_text()
    assert f"CLUSTERRUN_MICRO_BATCH={words[3]}" in env
    assert f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={words[5]}" in env
    assert f'"strategy": "{words[1]}"' in (run / "job.json").read_text()


def test_submit_plan_submits_nothing_that_does_not_fit(here: CommandLine, project: Path) -> None:
    said = here("submit", "--plan", "--set", "training.gpu=rtx3080", "-N", "1", "--mem", "16G")
    assert said.code == 1
    assert "error: nothing fits" in said.err
    assert here.asked("sbatch") == []


@pytest.mark.parametrize(
    ("counts", "argv"),
    [
        ("num_machines: 3\nnum_processes: 6\n", ()),
        ("num_machines: 3\nnum_processes: 6\n", ("-N", "2", "--device", "cpu")),
        ("num_machines: 3\nnum_processes: 6\nuse_cpu: true\n", ("--mixed-precision", "no")),
        ("num_processes: 8\n", ("-N", "4", "--gpus-per-node", "1")),
        ("num_machines: 2\n", ()),
    ],
)
def test_a_yaml_of_ddp_is_estimated_as_it_would_be_submitted(
    here: CommandLine, counts: str, argv: tuple[str, ...]
) -> None:
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    (here.path / "acc.yaml").write_text(f"{text}{counts}")
    asked = ("--cluster", "slurm", "--accelerate-config", "acc.yaml", *argv)
    inputs = told(here, *asked, "--model", "gpt2", "--seq-len", "128")["inputs"]
    files = json.loads(here("render", "--json", *asked, "train.py").out)["files"]
    plan = json.loads(files["plan.json"])
    shape = ("nodes", "procs_per_node", "strategy")
    assert [inputs[key] for key in shape] == [plan[key] for key in shape]
    assert inputs["precision"] == ("fp32" if "no" in argv else "bf16")


def test_a_yaml_that_may_say_anything_is_not_estimated(here: CommandLine) -> None:
    (here.path / "acc.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\n")
    asked = ("--cluster", "slurm", "--accelerate-config", "acc.yaml", *LLAMA)
    assert "error: plan cannot read your own" in here("plan", *asked).err
    (here.path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    assert "plan cannot read your own" in here("plan", *asked, "--recommend").err


def test_parallel_sizes_divide_batch_and_memory(here: CommandLine) -> None:
    sizes = ("--strategy", "fsdp", "--tensor-parallel", "4", "--context-parallel", "2")
    answer = told(here, *LLAMA, "--gpu", "h100-80g", *sizes)
    assert answer["batch"]["effective"] == answer["inputs"]["parallel"]["data"] == 4
    assert any("P and U are a GPU's part" in note for note in answer["notes"])
    said = here("plan", *LLAMA, "--gpu", "h100-80g", *sizes)
    assert "1 per rank x 1 accumulation x 4 data-parallel ranks = 4 samples a step" in said.out


def test_only_strategies_that_have_the_sizes_are_recommended(here: CommandLine) -> None:
    asked = (*LLAMA, "--gpu", "h100-80g", "--effective-batch", "64")
    for sizes, strategies in (
        (("--tensor-parallel", "2"), {"fsdp", "fsdp-hybrid", "fsdp-offload"}),
        (("--sequence-parallel", "2"), {"zero2", "zero3", "zero2-offload", "zero3-offload"}),
    ):
        found = told(here, *asked, *sizes, "--recommend")["recommended"]
        assert {choice["strategy"] for choice in found} <= strategies
        assert found


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            ("--strategy", "fsdp", "--tensor-parallel", "16"),
            "divide the 8 key-value heads",
        ),
        (("--strategy", "ddp", "--tensor-parallel", "2"), "does not work with --strategy ddp"),
        (("--context-parallel", "3", "--recommend"), "no strategy supports these parallel sizes"),
    ],
)
def test_sizes_that_cannot_be_are_no_plan(
    here: CommandLine, sizes: tuple[str, ...], words: str
) -> None:
    said = here("plan", *LLAMA, "--gpu", "h100-80g", "--effective-batch", "64", *sizes)
    assert said.code == 2
    assert words in said.err
