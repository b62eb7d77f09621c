"""`plan`: what is asked on the command line, what is printed, and how it ends."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from clusterrun.estimates.models import BUILT_IN
from tests.cli.conftest import CommandLine, Said
from tests.readme import ROOT, blocks

MODEL = "--model llama-3.1-8b --seq-len 4096"
NODES = "-N 4 --gpus-per-node 8"
LLAMA = f"{MODEL} {NODES}"
H100 = "--gpu h100-80g --strategy zero3 --grad-ckpt --micro-batch 4"
BATCH = "--accumulation 2 --samples 1200000"
EXPERTS = "--params 46.7B --active-params 12.9B --seq-len 4096"
ADAPTERS = "--model llama-2-7b --lora 64 --seq-len 1024 --grad-ckpt"
BATCH_64 = "--micro-batch 8 --accumulation 8 --samples 2500 --epochs 3"
RTX3080 = "--gpu rtx3080 --gpu-mem 20GiB"
OTHER_FACTS = (
    "training: {params: 478_720, hidden: 128, layers: 2, heads: 4, ffn: 512, vocab: 256, lora: 8, "
    "step_time: 0.5s, max_steps: 200, micro_batch: 8, accumulation: 4}\n"
)


def asked(here: CommandLine, *words: str) -> Said:
    return here("plan", *shlex.split(" ".join(words)))


def told(here: CommandLine, *words: str) -> dict[str, Any]:
    """Return the answer of `plan --json`, whose exit status is that of its verdict."""
    said = asked(here, *words, "--json")
    found: dict[str, Any] = json.loads(said.out)
    codes = {"fits": 0, "tight": 0, "no": 3, None: 1}
    assert said.code == codes[found.get("verdict", "fits")], said.err
    return found


def term(answer: dict[str, Any], name: str) -> int:
    found: int = next(x["bytes"] for x in answer["gpu_memory"]["terms"] if x["name"] == name)
    return found


class Shown(NamedTuple):
    """A command, what it must show (patterns of both streams), and what it must not."""

    words: str
    patterns: tuple[str, ...]
    absent: tuple[str, ...] = ()
    code: int = 0


CARD = "--gpu h100-80g"
TWO = f"{MODEL} -N1 --gpus-per-node 2 --strategy ddp --grad-ckpt --lora 8"
ON_ONE = f"--model llama-2-70b --seq-len 512 --gpus-per-node 1 {CARD} --recommend"
SHOWN = (
    # The verdict is the first line.
    Shown(f"{LLAMA} {CARD} --strategy zero3 --grad-ckpt", (r"\Afits: 19 of 80 GiB per",)),
    Shown(f"{LLAMA} --gpu a100-40g --strategy ddp", (r"\Adoes not fit: 219 of 40 GiB",), code=3),
    Shown(
        f"{LLAMA} --grad-ckpt --strategy=zero3",
        (r"\Ano verdict: 19.5 GiB per GPU; pass --gpu h100",),
        code=1,
    ),
    Shown(
        f"{LLAMA} --device cpu --cluster slurm",
        (r"\Ano verdict: 1,681.2 GiB per node; pass --host-mem 64GiB",),
        code=1,
    ),
    Shown(
        f"{LLAMA} {CARD} --strategy fsdp --host-mem 40GiB",
        (r"\Adoes not fit: 54 of 40 GiB of memory per node",),
        code=3,
    ),
    Shown(
        f"{LLAMA} {CARD} --strategy zero3 --max-steps=1000000 --time=1:00:00",
        (r"\Adoes not finish: [0-9.]+ d in a job of 01:00:00 that saves nothing; pass --save",),
        code=3,
    ),
    # A speed-up unless memory is lacking, a neighbour in a table.
    Shown(f"{TWO} {CARD}", (r"\nspeed-up  ",)),
    Shown(f"{TWO} --gpu t4", (r"\Adoes not fit",), ("speed-up",), 3),
    Shown(
        f"{LLAMA} {H100} --what-if strategy",
        (r"\nSTRATEGY .*\nzero3 ", r"\nddp .* no\n", r"\nzero1 ", r"\nzero3-offload "),
    ),
    # What is recommended.
    Shown(
        f"{LLAMA} {CARD} --recommend --effective-batch 256",
        (r"\n(\S+) +(\d+) .* x1.00 +fits\n[^$]*plan \.\.\. --strategy \1 --micro-batch \2",),
    ),
    Shown(
        f"{MODEL} --gpu rtx3080 --host-mem 16GiB --recommend",
        (
            r"warning: no setup fits: even --strategy zero3-offload --micro-batch 1",
            r"use more nodes, or train adapters \(--lora\)",
        ),
        code=3,
    ),
    # Without the memory of a node, what offloads is tight at best.
    Shown(f"{ON_ONE} --effective-batch 8", (r"\n.* x1.00 +tight\n", "--host-mem")),
    Shown(f"{ON_ONE} --effective-batch 8 --host-mem 64GiB", ("no setup fits",), code=3),
    # Experts work as their active part.
    Shown(
        f"{EXPERTS} {NODES} {CARD} --strategy zero3",
        (
            "46.70 B parameters, 12.90 B active",
            "note: activations are not counted without the model's shape: the total",
            "note: the time assumes a dense model's MFU",
        ),
        code=1,
    ),
    Shown("--params 1B --gpu=a100", ("'a100' is assumed to be the A100-40G",), code=1),
    Shown(
        f"{LLAMA} {CARD} --strategy fsdp --set launch.tensor_parallel=4"
        " --set launch.context_parallel=2",
        ("1 per rank x 1 accumulation x 4 data-parallel ranks = 4 samples", "times do not include"),
    ),
    Shown(
        f"--model gpt2 -N 2 --gpus-per-node 0 {CARD}",
        ("cluster   2 nodes x 1 CPU = 2 ranks",),
        ("GPU",),
        1,
    ),
)


def test_what_is_asked_is_shown(here: CommandLine) -> None:
    wrong = []
    for words, patterns, absent, code in SHOWN:
        said = asked(here, words)
        text = said.out + said.err
        missing = [pattern for pattern in patterns if not re.search(pattern, text)]
        missing += [f"not {word}" for word in absent if word in text]
        if missing or said.code != code:
            wrong.append((words, said.code, missing))
    assert wrong == []


# What is wrong, the message, the hint.
REFUSED = (
    ("", "no model was named", "--params 8.03e9"),
    (
        "--model my/model",
        "'my/model' is not a known model, not a config.json",
        "run 'hf download my/model config.json', then plan --model with the path it prints",
    ),
    ("--model gpt5", "'gpt5' is not a known model", "use 'gpt2'"),
    ("--model gpt2 --gpu h200x", "GPU 'h200x' is not known", "h200"),
    ("--model gpt2 --samples 200 --micro-batch 256", "effective batch 256 is larger", "--micro-b"),
    (
        "--model gpt2 --effective-batch 100 --micro-batch 3",
        "effective batch 100 is not a multiple of micro-batch x data-parallel ranks (3)",
        "use 99, change --micro-batch, or let --recommend",
    ),
    (
        "--model gpt2 --effective-batch 64 --accumulation 4",
        "an effective batch of 64 needs --accumulation 64, not 4",
        "leave out --effective-batch",
    ),
    ("--model gpt2 --tokens 1e9", "--tokens needs the length", "--seq-len"),
    ("--model gpt2 --recommend", "a recommendation needs the memory", "--gpu"),
    ("--model gpt2 --mfu 2", "--mfu must be at most 1, not 2.0", "leave it out"),
    ("--model ~nobody-of-this-name/x", "cannot read the model '~nobody", "-"),
    (f"--model {'x' * 5000}", "", "-"),  # Python 3.14 takes it for a file that is missing
    ("--model config.json", "cannot read", "Expecting property name"),
    ("--model gpt2 --epochs 1e308", "--epochs must be at most 1000000, not 1e+308", "leave it out"),
    ("--model gpt2 --gpu-mem 24", "--gpu-mem is only 24 bytes", "24GiB"),
    ("--model gpt2 --deepspeed-config x", "plan cannot evaluate your own accelerate", "-"),
    ("--model gpt2 --strategy none -N 2", "strategy none runs one", "ddp"),
    ("--model gpt2 --device cpu --strategy fsdp", "fsdp needs GPUs", "zero2"),
    ("--model gpt2 --device cpu --mixed-precision fp16", "fp16 needs a GPU", "bf16"),
    ("--model gpt2 --load-in-4bit", "4-bit weights can't", "--lora 16"),
    (
        "--model gpt-oss-20b --lora 16 --load-in-4bit",
        "bitsandbytes can't quantize experts",
        "leave out --load-in-4bit",
    ),
    ("--model gpt2 --gpus-per-node 2 --nproc-per-node 4", "4 ranks per node cannot", "--nproc-p"),
    ("--active-params 3B", "--active-params needs --params", "--params"),
    ("--model gpt2 --recommend --what-if nodes", "--recommend, --what-if", "one"),
    (
        "--model gpt2 -N 2 --gpus-per-node 0 --gpu h100-80g --recommend",
        "this training runs on CPUs, but --recommend compares only GPUs",
        "--gpus-per-node",
    ),
    *(
        (f"{ADAPTERS} --gpu-price {price}", f"--gpu-price '{price}' has no price", "h100-80g=2.5")
        for price in ("h100", "h100=-1", "h100=nan")
    ),
    (
        f"{EXPERTS} --gpu h100-80g --recommend",
        "a recommendation needs the sizes of the act",
        "shape",
    ),
    (f"{EXPERTS} --gpu h100-80g --lora 8", "LoRA's adapters can't be sized", "--hidden"),
    (
        f"{LLAMA} --gpu h100-80g --strategy fsdp --set launch.tensor_parallel=16",
        "launch.tensor_parallel 16 does not divide the 8 key-value heads",
        "heads",
    ),
    (
        f"{LLAMA} --gpu h100-80g --effective-batch 64 --set launch.context_parallel=3 --recommend",
        "no strategy supports the parallel sizes",
        "change launch.*_parallel",
    ),
)


def test_what_cannot_be_meant_is_refused_in_one_line(here: CommandLine) -> None:
    (here.path / "config.json").write_text("{broken")
    wrong = []
    for words, message, hint in REFUSED:
        said = asked(here, words)
        is_said = f"error: {message}" in said.err and hint in said.err
        if (said.code, said.out, is_said) != (2, "", True):
            wrong.append((words[:200], said))
    assert wrong == []


def test_a_person_reads_batch_steps_memory_time_and_disk(here: CommandLine) -> None:
    said = asked(here, LLAMA, H100, BATCH, "--epochs 10 --lr 1e-5 --base-batch=16")
    assert said.code == 0, said.err
    lines = (
        "model     llama-3.1-8b   8.03 B parameters   bf16   seq 4,096",
        "cluster   4 nodes x 8 H100-80G = 32 GPUs   strategy zero3",
        "= 256 samples a step (1,048,576 tokens)",
        "4,687 full steps per epoch (accelerate runs 4,688); 46,880 in all",
        "1e-05 at batch 16 -> 0.00016 linear, 4e-05 sqrt (linear)",
        "8.1 h an epoch",
    )
    assert [line for line in lines if line not in said.out] == []
    verdict, pace, *_ = said.out.splitlines()
    assert verdict == "fits: 51 of 80 GiB per GPU"
    assert re.fullmatch(r"[0-9.]+ d on 32 GPUs, [0-9,]+ GPU-hours, [0-9,]+ tokens/s", pace)
    assert re.search(r"total \+ 5 % +50.8   of 79.6   64 %   FITS", said.out)
    assert re.search(r"micro-batch 16: [0-9.]+ GiB \([0-9]+ %\) NO", said.out)


def test_a_program_reads_every_term_with_its_formula_and_source(here: CommandLine) -> None:
    answer = told(here, LLAMA, H100, BATCH, "--epochs 2")
    assert answer["schema"] == "clusterrun.plan/1"
    assert answer["batch"] == {"effective": 256, "tokens": 1_048_576}
    assert answer["steps"]["full_per_epoch"] == 4_687
    memory = answer["gpu_memory"]
    assert memory["verdict"] == answer["verdict"] == "fits"
    assert memory["total_bytes"] == round(1.05 * sum(term["bytes"] for term in memory["terms"]))
    assert all(term["formula"] and term["source"] for term in memory["terms"])
    assert [found["micro_batch"] for found in answer["what_if"]] == [8, 16]
    assert answer["gpu_hours"] == pytest.approx(32 * answer["time"]["total_s"]["mid"] / 3600)


def test_links_are_those_of_the_network_or_as_given(here: CommandLine) -> None:
    def traffic(*options: str) -> tuple[dict[str, float], float]:
        answer = told(here, LLAMA, H100, BATCH, *options)
        return answer["links"], answer["time"]["parts"]["network_s"]

    own, own_s = traffic()
    assert (own["within_node"], own["between_nodes"]) == pytest.approx((360e9, 360e9))
    assert traffic("--set network.preset=ethernet")[1] == pytest.approx(128 * own_s)
    (here.path / "clusterrun.yaml").write_text("training: {inter_node_bandwidth: 45}\n")
    assert traffic()[1] == pytest.approx(8 * own_s)
    links, seconds = traffic("--intra-node-bandwidth 90 --inter-node-bandwidth 180")
    assert (links["within_node"], links["between_nodes"]) == (90e9, 180e9)
    assert seconds == pytest.approx(4 * own_s)


def test_what_is_tight_and_what_is_unknown_have_first_lines_of_their_own(here: CommandLine) -> None:
    tight = asked(here, ADAPTERS, "--micro-batch 2 --gpu rtx3090").out
    assert tight.startswith("fits tightly: 20 of 24 GiB per GPU\n")
    t5 = asked(here, "--model t5-base --seq-len 192 --micro-batch 32", RTX3080).out
    assert t5.startswith("fits tightly: 19 of 20 GiB per GPU\n")
    open_ = asked(here, "--params 3e9 --seq-len 512 --gpu h100-80g").out
    assert open_.startswith("no verdict: at least 60 of 80 GiB per GPU, and activations are not c")
    assert "what if" not in open_


def test_what_would_fit_is_said_with_the_options_that_change(here: CommandLine) -> None:
    assert told(here, LLAMA, H100)["alternatives"] == []
    words = f"{LLAMA} --gpu h100-80g --strategy ddp --micro-batch 2 --no-grad-ckpt"
    answer = told(here, words)
    assert 1 <= len(answer["alternatives"]) <= 3
    assert any("--grad-ckpt" in other["options"] for other in answer["alternatives"])
    for other in answer["alternatives"]:
        again = told(here, words, other["options"])
        assert again["verdict"] == other["verdict"] == "fits"
        assert again["gpu_memory"]["total_bytes"] == other["gpu_bytes"]
        assert again["batch"] == answer["batch"]
    first, said = answer["alternatives"][0], asked(here, words).out.splitlines()
    assert said[1] == f"would fit:  {first['options']} ({first['gpu_bytes'] / (1 << 30):.0f} GiB)"


def test_adapters_and_more_nodes_are_proposed_where_no_strategy_helps(here: CommandLine) -> None:
    large = told(here, "--model llama-3.3-70b --seq-len 4096 --gpus-per-node 8 --gpu a100-80g")
    found = large["alternatives"]
    assert [choice["verdict"] for choice in found[1:]] == 2 * ["fits"]
    assert found[1]["lora"] == 16
    assert found[2]["nodes"] > 1
    small = told(here, "--model=qwen3-8b --seq-len=2048 --gpu rtx4090")
    assert any("--lora 16 --load-in-4bit" in x["options"] for x in small["alternatives"])


def test_the_page_shows_what_is_printed_and_every_known_name(here: CommandLine) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    command, shown = re.findall(r"\$ clusterrun (.*)\n((?:.+\n)+?)```", page)[0]
    assert here(*shlex.split(command)).out.startswith(f"{shown}\n")
    assert [name for name in BUILT_IN if f"`{name}`" not in page] == []


def test_files_of_the_project_are_read_and_give_way(here: CommandLine) -> None:
    (here.path / "train.yaml").write_text(
        "slurm: {nodes: 2, gpus_per_node: 4}\n"
        "training: {model: gpt2, seq_len: 1024, micro_batch: 8, gpu: a100-40g, samples: 100000}\n"
    )
    assert told(here, "--config train.yaml")["batch"]["effective"] == 64
    assert told(here, "--config train.yaml -N 1")["batch"]["effective"] == 32
    config = here.path / "clusterrun.yaml"
    config.write_text("training: {lora: 8}\n")
    assert told(here, "--params 1B --gpu h100-80g --lora 0")["inputs"]["lora"] == 0
    config.write_text("training: {model: gpt2}\n")
    own = told(here, "--params 7e9 --host-mem=64GiB")["inputs"]["model"]
    assert own["params"] == 7_000_000_000
    refused = asked(here, "--hidden 64")
    assert refused.code == 2
    notes, _ = refused.err.split("error: the size of the model is unknown")
    assert "note: training.hidden, command line (--hidden), replaces training.model" in notes
    config.write_text(OTHER_FACTS)
    assert told(here, "train.py")["inputs"]["model"]["params"] == 478_720
    for more in ("", "--recommend"):
        said = asked(here, "--model llama-3.1-9b", more)
        assert (said.code, said.out) == (2, "")
        assert "hint: use 'llama-3.1-8b'" in said.err


@pytest.mark.parametrize("recommend", ["", "--recommend --effective-batch 32"])
def test_a_model_of_the_command_line_is_not_mixed_with_another_of_the_file(
    here: CommandLine, recommend: str
) -> None:
    words = "--model llama-3.1-8b --epochs 10 --seq-len 512 --gpu h100-80g"
    plain = told(here, words, "--micro-batch 8", recommend)
    (here.path / "clusterrun.yaml").write_text(OTHER_FACTS)
    mixed = told(here, words, recommend, "" if recommend else "--accumulation 1")
    assert mixed == plain
    assert mixed["inputs"]["model"]["params"] == 8_030_261_248
    said = asked(here, words, recommend).err
    assert "note: training.model, command line (--model), replaces training.params (" in said
    assert "training.epochs, command line (--epochs), replaces training.max_steps (" in said


def test_the_numbers_of_the_readme_hold_beside_the_facts_of_another_model(
    here: CommandLine,
) -> None:
    (block,) = [each for each in blocks("local") if "plan --model" in each]
    commands = [line for line in block.replace("\\\n", " ").splitlines() if "--model" in line]
    words = [line.split("plan ", 1)[1] for line in commands]
    plain, recommended = (told(here, each) for each in words)
    assert plain["verdict"] == "fits"
    (here.path / "clusterrun.yaml").write_text(OTHER_FACTS)
    mixed = [told(here, each) for each in words]
    assert mixed[0] == plain
    assert mixed[1]["recommended"] == recommended["recommended"]
    assert plain["inputs"]["model"]["params"] == 8_030_261_248
    assert plain["steps"]["total"] == 46_880


# What the guides say of cards


def test_cards_are_compared_in_one_table_with_their_prices(here: CommandLine) -> None:
    words = f"{ADAPTERS} {BATCH_64} --gpu a100 --host-mem 64GiB --what-if gpu"
    priced = f"{words} --gpu-price a100=1.2 --gpu-price h100=2.5"
    said = asked(here, priced)
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
    assert "COST" not in asked(here, words).out
    (h100,) = [each for each in told(here, priced)["what_if"] if each["gpu"] == "H100-80G"]
    assert h100["cost"] == pytest.approx(2.5 * h100["total_s"] / 3600)


def test_a_card_named_with_its_memory_is_called_by_it(here: CommandLine) -> None:
    words = f"{ADAPTERS} {RTX3080} --gpu-price rtx3080=0.2"
    said = asked(here, words, "--max-steps 10 --what-if gpu --host-mem 64GiB")
    assert "1 node x 1 RTX-3080-20G = 1 GPU" in said.out
    assert re.search(r"(?m)^RTX-3080-20G .* 20.0 ", said.out)
    assert re.search(r"(?m)^RTX-3080-10G .* 10.0 ", said.out)
    assert re.search(r"cost +[0-9.]+ for", said.out)
    assert "is taken as" not in said.err
    inputs = told(here, words)["inputs"]
    assert (inputs["gpu"], inputs["gpu_bytes"]) == ("RTX-3080-20G", 20 << 30)


def test_passes_too_small_for_a_gpu_are_told_and_take_longer(here: CommandLine) -> None:
    words = f"{ADAPTERS} --gpu a100-40g --host-mem 64GiB"
    small = asked(here, words, "--micro-batch 1 --accumulation 64").out
    assert "(at MFU 0.19: passes this small reach 70 % of 0.4)" in small
    full = asked(here, words, BATCH_64).out
    assert "time      23.5 s a step, 15.7 min an epoch, 47.1 min in all (at MFU 0.25)" in full
    assert "          2.72 samples/s, 2,783 tokens/s in all" in full
    time = told(here, words, BATCH_64)["time"]
    assert time["samples_per_s"] == pytest.approx(64 / time["step_s"]["mid"])
    assert time["tokens_per_s"] == pytest.approx(1024 * time["samples_per_s"])
    assert time["filled"] == pytest.approx(0.95, abs=0.01)


def test_three_epochs_of_2500_samples_as_the_docs_have_them(here: CommandLine) -> None:
    spans = {
        "rtx3090 --gpus-per-node 1 --micro-batch 8": "3.4 h",
        "a100-40g --gpus-per-node 1 --micro-batch 8": "47.1 min",
        "a100-80g --gpus-per-node 1 --micro-batch 16": "45.9 min",
        "a100-40g --gpus-per-node 4 --micro-batch 8": "11.8 min",
    }
    data = "--effective-batch 64 --samples 2500 --epochs 3 --gpu"
    said = {gpus: asked(here, ADAPTERS, data, gpus).out for gpus in spans}
    assert [gpus for gpus, span in spans.items() if f", {span} in all" not in said[gpus]] == []


def test_a_tiny_transformer_is_about_as_fast_on_any_card(here: CommandLine) -> None:
    rates = {"rtx4090": "3,463", "rtx4070": "3,463", "rtx3090": "3,213", "rtx3080": "3,142"}
    shape = "--hidden=256 --layers=3 --heads=8 --ffn=1024 --vocab=1000 --seq-len 64"
    said = {card: asked(here, shape, "--micro-batch 16 --gpu", card).out for card in rates}
    assert [card for card, rate in rates.items() if f"{rate} samples/s" not in said[card]] == []


def test_mixed_precision_saves_less_than_half_of_the_memory(here: CommandLine) -> None:
    shape = "--hidden=512 --layers=6 --heads=8 --ffn=2048 --vocab=1000 --seq-len=512"
    words = f"{shape} --micro-batch=32 --gpu=rtx3090 --mixed-precision"
    bf16, fp32 = (json.loads(asked(here, words, each, "--json").out) for each in ("bf16", "no"))
    share = term(bf16, "activations") / term(fp32, "activations")
    assert share == pytest.approx(0.63, abs=0.01)
    assert 0.5 < bf16["gpu_memory"]["total_bytes"] / fp32["gpu_memory"]["total_bytes"] < 1
    assert bf16["time"]["step_s"]["mid"] < fp32["time"]["step_s"]["mid"]


def test_a_small_node_with_three_cards_of_20_gib_is_tight_by_its_host(here: CommandLine) -> None:
    shape = "--params 0.19B --hidden 768 --layers 20 --heads 12 --ffn 3072 --vocab 29298"
    batch = "--micro-batch 32 --accumulation 2 --seq-len 192 --samples 10M --epochs 3"
    said = asked(here, shape, batch, RTX3080, "--host-mem 12GiB --gpus-per-node 3")
    assert said.code == 0
    assert re.search(r"total \+ 5 % +15.6   of 20.0   78 %   FITS\n", said.out)
    assert re.search(r"total +11.1   of 12.0   93 %   TIGHT: it fits below 70 %\n", said.out)
    assert "52,083 full steps per epoch" in said.out
    assert "time      0.766 s a step, 11.1 h an epoch, 33.2 h in all" in said.out


# Models of other kinds


def test_a_known_model_with_experts_has_a_verdict_and_a_recommendation(here: CommandLine) -> None:
    words = f"--model Qwen/Qwen3-30B-A3B --seq-len 4096 {NODES} --gpu h100-80g"
    answer = told(here, words, "--strategy fsdp --grad-ckpt")
    model = answer["inputs"]["model"]
    assert (model["params"], model["active_params"]) == (30_532_122_624, 3_353_032_704)
    assert answer["verdict"] == "fits"
    assert any("a dense model's MFU" in note for note in answer["notes"])
    (first, *_) = told(here, words, "--recommend --effective-batch 256")["recommended"]
    assert first["verdict"] == "fits"


def test_weights_in_4_bits_take_a_quarter_but_for_the_words(here: CommandLine) -> None:
    words = "--model llama-3.1-8b --seq-len 1024 --gpu rtx4090 --grad-ckpt --lora 16"
    whole, quantized = (term(told(here, words, more), "weights") for more in ("", "--load-in-4bit"))
    adapters = 4 * 41_943_040  # peft's count for rank 16 on all linear layers
    outside = 8_030_261_248 - 32 * 218_112_000
    assert whole == 2 * 8_030_261_248 + adapters
    per_weight = 0.5 + 1 / 64 + 4 / 64 / 256
    assert quantized == int(4 * outside + per_weight * 32 * 218_112_000 + adapters)


def test_images_are_samples_of_one_length(here: CommandLine) -> None:
    words = "--model google/vit-base-patch16-224 --gpu a100-80g --micro-batch 64"
    answer = told(here, words)
    assert answer["inputs"]["seq_len"] == 14 * 14 + 1
    assert answer["time"]["tokens_per_s"] is None
    assert re.search("[0-9] samples/s$", asked(here, words).out.splitlines()[1])
    assert answer["verdict"] == "fits"


def test_only_strategies_that_have_the_sizes_are_recommended(here: CommandLine) -> None:
    for size, strategies in (
        ("tensor", {"fsdp", "fsdp-hybrid", "fsdp-offload"}),
        ("sequence", {"zero2", "zero3", "zero2-offload", "zero3-offload"}),
    ):
        words = f"{LLAMA} --gpu h100-80g --effective-batch 64 --recommend"
        words += f" --set launch.{size}_parallel=2"
        found = {choice["strategy"] for choice in told(here, words)["recommended"]}
        assert found
        assert found <= strategies


# This machine


def test_a_run_that_was_submitted_without_facts_is_not_compared(here: CommandLine) -> None:
    here.slurm()
    assert here("submit", "-N2", "train.py").code == 0
    said = asked(here, "--compare 4711 --model gpt2")
    assert said.code == 1
    assert "error: job 4711 has no estimate: no model was named" in said.err
    assert "hint: describe the training under training: in clusterrun.yaml" in said.err
    assert asked(here, "--compare").err == said.err  # the newest run


def test_a_disk_is_judged_only_where_the_job_writes(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, is_judged in {
        "--device cpu": True,  # this machine runs it
        "--cluster local": True,
        "--cluster slurm": False,  # there is no sbatch here
        "": False,
        "--gpu a100-80g": False,  # which this machine may not have
    }.items():
        more = f"--params 1M --save-every 10 {words}"
        assert (told(here, more)["disk"]["verdict"] is not None) == is_judged, words
        is_open = "not checked: the job writes elsewhere" in asked(here, more).out
        assert is_open != is_judged, words
    here.slurm()  # a login node judges the disk of its cluster
    judged = told(here, "--params 1M --save-every 10 --gpu a100-80g")
    assert judged["disk"]["verdict"] == "fits"
    full = SimpleNamespace(total=10, used=9, free=1)
    monkeypatch.setattr("clusterrun.advice.question.shutil.disk_usage", lambda path: full)
    words = f"{LLAMA} --gpu h100-80g --recommend --effective-batch 256"
    assert [asked(here, words, more).code for more in ("", "--save-every 10")] == [0, 3]


# submit asks, too


@pytest.fixture
def project(here: CommandLine) -> Path:
    here.slurm()
    (here.path / "train.py").write_text("")
    (here.path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    (here.path / "clusterrun.yaml").write_text(
        "script: train.py\nslurm: {nodes: 2, gpus_per_node: 8}\n"
        "training: {model: llama-3.1-8b, seq_len: 4096, gpu: h100-80g, effective_batch: 256}\n"
    )
    return here.path


def test_submit_says_what_plan_says_no_to(here: CommandLine, project: Path) -> None:
    no = "note: no estimate was made: "
    own = "plan cannot evaluate your own accelerate or DeepSpeed file"
    for words, note in {
        "": r"note: memory of a GPU: [0-9.]+ GiB estimated, 79.6 available; run clusterrun plan",
        "--set training.model=gone": f"{no}'gone' is not a known model.*",
        "--deepspeed-config ds.json": f"{no}{own}",
        "train.py --deepspeed ds.json": f"{no}{own}",
    }.items():
        said = here("submit", *words.split())
        assert said.code == 0, words
        (line,) = [line for line in said.err.splitlines() if "estimate" in line]
        assert re.fullmatch(note, line), words
    (project / "clusterrun.yaml").write_text("script: train.py\nslurm: {gpus_per_node: 8}\n")
    assert "estimate" not in here("submit").err


def test_submit_plan_sets_what_is_recommended_and_hands_it_to_the_ranks(
    here: CommandLine, project: Path
) -> None:
    said = here("submit", "--plan")
    assert said.code == 0
    planned = said.err.split("plan       ")[1].splitlines()[0]
    assert planned == asked(here, "--recommend").out.split("plan ... ")[1].splitlines()[0]
    (run,) = [path for path in (project / "runs").glob("train/*") if path.is_dir()]
    words = planned.split()
    env = (run / "env.sh").read_text()
    assert f"CLUSTERRUN_MICRO_BATCH={words[3]}" in env
    assert f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={words[5]}" in env
    assert f'"strategy": "{words[1]}"' in (run / "job.json").read_text()
    before = len(here.asked("sbatch"))
    said = here("submit", "--plan", "--set", "training.gpu=rtx3080", "-N", "1", "--mem", "16G")
    assert said.code == 1
    assert "error: no setup fits" in said.err
    assert len(here.asked("sbatch")) == before


def test_a_yaml_that_may_say_anything_is_not_estimated(here: CommandLine) -> None:
    words = f"--cluster slurm --accelerate-config acc.yaml {LLAMA}"
    (here.path / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    for more in ("", "--recommend"):
        assert "error: plan cannot evaluate your own" in asked(here, words, more).err
