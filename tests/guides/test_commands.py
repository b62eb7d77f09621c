"""The guides' command lines as they stand there: only launcher, paths and sizes differ.

Each row has the guide's words first, then what is typed here, then what must come of it.
What trains is in tests/examples; this holds that the words are understood, and as meant.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends import machine_facts
from clusterrun.logformat.symptoms import Classifier
from tests.cli.conftest import CommandLine
from tests.examples.guides import load
from tests.examples.worlds import EXAMPLES
from tests.launch.samples import ZERO2_OFFLOAD

ZERO2 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "fp16": {"enabled": False},
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


def rendered(here: CommandLine, words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the plan, and every file, of a job that is not submitted."""
    said = here("render", "--json", *shlex.split(words))
    assert said.code == 0, said.err
    files: dict[str, str] = json.loads(said.out)["files"]
    return json.loads(files["plan.json"]), files


def planned(here: CommandLine, words: str) -> dict[str, Any]:
    said = here("plan", "--json", *shlex.split(words))
    assert said.code in (0, 1, 3), said.err
    answer: dict[str, Any] = json.loads(said.out)
    assert said.code == {None: 1, "no": 3}.get(answer["verdict"], 0)
    return answer


GPUS = "--cluster slurm -N 1 --gpus-per-node"
LAUNCHES = [
    # fine-tuning
    (
        "python train_single_config_remote.py --config paper_r64 --gpus 0",
        f"{GPUS} 1 train.py --config paper_r64",
        {"nodes": 1, "gpus_per_node": 1, "entry": ["train.py", "--config", "paper_r64"]},
    ),
    (
        "python train_single_config_remote.py --config paper_r64 --gpus 0,1,2,3",
        f"{GPUS} 4 train.py --config paper_r64",
        {"nodes": 1, "procs_per_node": 4, "strategy": "ddp"},
    ),
    (
        "python train_single_config_remote.py --config paper_r64 --gpus 0,1,2,3 --fsdp",
        f"{GPUS} 4 --strategy fsdp train.py --config paper_r64",
        {"procs_per_node": 4, "strategy": "fsdp"},
    ),
    (
        "python train_single_config_remote.py --config paper_r64 --gpus 0 --fp16",
        f"{GPUS} 1 --mixed-precision fp16 train.py --config paper_r64",
        {"precision": "fp16"},
    ),
    (
        "torchrun --nproc_per_node=4 train_single_config_remote.py --config paper_r64",
        "--cluster local -N 1 --nproc-per-node=4 --device cpu train.py --config paper_r64",
        {"nodes": 1, "procs_per_node": 4, "entry": ["train.py", "--config", "paper_r64"]},
    ),
    # one GPU to many
    (
        "#SBATCH --nodes=2 / --gpus-per-node=4 / --partition=gpu; sbatch train_slurm_multi_node.sh",
        "--cluster slurm --nodes=2 --gpus-per-node=4 --partition=gpu train.py",
        {"nodes": 2, "gpus_per_node": 4, "procs_per_node": 4},
    ),
    (
        "InitProcessGroupKwargs(timeout=timedelta(seconds=36000))",
        "--cluster slurm -N 2 --gpus-per-node 4 --timeout 36000s train.py",
        {"timeout_s": 36_000},
    ),
    # a module of a package
    (
        "python -m src.training.train --batch-size 16 --hidden-dim 256 --n-layers 3 "
        "--max-epochs 100",
        f"{GPUS} 1 -m src.training.train -- --batch-size 16 --hidden-dim 256 --n-layers 3 "
        "--max-epochs 100",
        {
            "entry": [
                *("-m", "src.training.train", "--batch-size", "16", "--hidden-dim", "256"),
                *("--n-layers", "3", "--max-epochs", "100"),
            ]
        },
    ),
    (
        "python -m src.training.train --device cpu",
        "--cluster local --device cpu -m src.training.train",
        {"device": "cpu", "entry": ["-m", "src.training.train"]},
    ),
    # pretraining
    (
        "accelerate launch --multi_gpu --num_processes 3 ./train_low_mem.py train "
        "--use_large_config=True",
        f"{GPUS} 3 ./train.py train --use_large_config=True",
        {"procs_per_node": 3, "entry": ["./train.py", "train", "--use_large_config=True"]},
    ),
    (
        "os.environ.setdefault('NCCL_TIMEOUT', '1800')",
        f"{GPUS} 3 --env NCCL_TIMEOUT=1800 train.py",
        {"timeout_s": 1_800},
    ),
]


@pytest.mark.parametrize(
    ("guide", "typed", "expected"), LAUNCHES, ids=[guide for guide, _, _ in LAUNCHES]
)
def test_a_launch_is_what_the_guide_asks_for(
    here: CommandLine, guide: str, typed: str, expected: dict[str, Any]
) -> None:
    plan, files = rendered(here, typed)
    assert {name: plan[name] for name in expected} == expected
    if "#SBATCH" in guide:
        directives = {"--nodes=2", "--gpus-per-node=4", "--partition=gpu"}
        lines = files["job.sbatch"].splitlines()
        assert {line.removeprefix("#SBATCH ") for line in lines} >= directives


def test_a_variable_of_a_guide_reaches_the_ranks(here: CommandLine) -> None:
    """`export DS_BUILD_OPS=0`, `os.environ.setdefault('NCCL_SHM_DISABLE', '1')`."""
    for name, value in {
        **{"DS_BUILD_OPS": "0", "DS_SKIP_CUDA_CHECK": "1", "PYTHONPATH": "here/training"},
        "NCCL_SHM_DISABLE": "1",
    }.items():
        _, files = rendered(here, f"{GPUS} 2 --env {name}={value} train.py")
        assert re.search(rf"\nexport {name}={re.escape(value)}(  #.*)?\n", files["env.sh"])


def test_gpus_of_this_machine_are_chosen_by_their_numbers(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--gpus 0,1,2,3` is `--gpu-ids`; `export CUDA_VISIBLE_DEVICES=2,3` stays as it is."""
    gpus = {str(i): f"GPU-{i}a" for i in range(4)}
    monkeypatch.setattr(machine_facts, "find_gpus", lambda: gpus)
    four, _ = rendered(here, "--cluster local --gpu-ids 0,1,2,3 train.py")
    assert (four["gpu_ids"], four["procs_per_node"]) == (["0", "1", "2", "3"], 4)
    one, _ = rendered(here, "--cluster local --gpu-ids 0 train.py")
    assert (one["gpu_ids"], one["procs_per_node"]) == (["0"], 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    exported, _ = rendered(here, "--cluster local train.py")
    assert (exported["gpu_ids"], exported["procs_per_node"]) == (["2", "3"], 2)


def test_another_launchers_word_is_answered_with_ours(here: CommandLine) -> None:
    said = here("submit", "--gpus", "0,1,2,3", "train.py")
    assert said.code == 2
    assert "hint: pass --gpu-ids 0,1,2,3 on this machine" in said.err
    options = "--cluster local --device cpu --nnodes=2 --nproc_per_node=4"
    plan, _ = rendered(here, f"{options} train.py")
    assert (plan["nodes"], plan["procs_per_node"]) == (2, 4)


JSONS = [
    ("ds_config.json", ZERO2, "zero2-offload", "bf16"),
    ("zero2_offload.json", ZERO2_OFFLOAD, "zero2-offload", "head"),
]


@pytest.mark.parametrize(("name", "config", "strategy", "precision"), JSONS)
def test_a_guides_deepspeed_json_is_taken_as_it_stands(
    here: CommandLine, name: str, config: dict[str, Any], strategy: str, precision: str
) -> None:
    text = json.dumps(config, indent=2) + "\n"
    (here.path / name).write_text(text)
    plan, files = rendered(here, f"{GPUS} 4 --deepspeed-config {name} train.py")
    assert files["ds_config.json"] == text
    assert (plan["strategy"], plan["precision"]) == (strategy, precision)


def test_a_precision_beside_a_json_that_says_another_is_refused(here: CommandLine) -> None:
    (here.path / "ds.json").write_text(json.dumps(ZERO2))
    words = f"{GPUS} 4 --deepspeed-config ds.json --mixed-precision fp16 train.py"
    said = here("render", *words.split())
    assert said.code == 2
    assert "but ds.json allows 'bf16'" in said.err


def test_an_accelerate_yaml_for_cpus_is_refused_with_the_way_to_write_it(here: CommandLine) -> None:
    """`accelerate config` writes MULTI_CPU on a machine without GPUs."""
    own = here.path / "own.yaml"
    words = f"{GPUS} 0 --nproc-per-node 2 --accelerate-config own.yaml"
    own.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    said = here("render", *words.split(), "train.py")
    assert said.code == 2
    assert "hint: write MULTI_GPU and pass --device cpu" in said.err
    own.write_text(own.read_text().replace("MULTI_CPU", "MULTI_GPU"))
    plan, _ = rendered(here, f"{words} --device cpu train.py")
    assert (plan["device"], plan["procs_per_node"], plan["strategy"]) == ("cpu", 2, "ddp")


# Figures: the question that a guide answers, how `plan` is asked, what it says.

LLAMA = "--model llama-2-7b --seq-len 1024 --lora 64"
LARGE = (
    "--params 0.19e9 --hidden 768 --layers 12 --heads 12 --ffn 3072 --vocab 32128 --seq-len 192 "
    "--gpus-per-node 3 --gpu rtx3080 --gpu-mem 20GiB --host-mem 12GiB --samples 10000000"
)
MANY = "--params 1e6 --gpu a100-40g --micro-batch 4 --samples 29500 --lr 1.25e-6 --base-batch 4"


def test_the_effective_batch_of_64_makes_40_steps_an_epoch(here: CommandLine) -> None:
    """8 x 8 x 1 = 64; 2,500 samples, 3 epochs; checkpoints at 40, 80 and 120."""
    for batch in ("--micro-batch 8 --accumulation 8", "--micro-batch 4 --accumulation 16"):
        answer = planned(here, f"{LLAMA} --gpu a100-80g {batch} --samples 2500 --epochs 3")
        assert answer["batch"]["effective"] == 64
        assert answer["steps"]["full_per_epoch"] == 39
        assert (answer["steps"]["accelerate_per_epoch"], answer["steps"]["total"]) == (40, 120)


def test_each_gpu_of_the_guides_has_its_precision(here: CommandLine) -> None:
    new = dict.fromkeys(("a100-80g", "a6000", "rtx3090", "rtx4090", "h100"), "bf16")
    for gpu, precision in {**new, "v100-32g": "fp16", "p100": "fp16"}.items():
        assert planned(here, f"--params 1e6 --gpu {gpu}")["inputs"]["precision"] == precision


def test_steps_rate_and_speed_up_of_more_gpus(here: CommandLine) -> None:
    for gpus, batch, full, run, rate, speedup in (
        (1, 4, 7_375, 7_375, 1.25e-6, None),
        (2, 8, 3_687, 3_688, 2.5e-6, (1.8, 1.9)),
        (4, 16, 1_843, 1_844, 5.0e-6, (3.5, 3.8)),
        (8, 32, 921, 922, 1.0e-5, (6.5, 7.0)),
    ):
        answer = planned(here, f"{MANY} --gpus-per-node {gpus}")
        assert answer["batch"]["effective"] == batch
        steps = answer["steps"]
        assert (steps["full_per_epoch"], steps["accelerate_per_epoch"]) == (full, run)
        assert answer["lr"]["linear"] == pytest.approx(rate)
        if speedup:
            assert (answer["speedup"]["low"], answer["speedup"]["high"]) == speedup


def test_a_small_batch_may_keep_its_rate(here: CommandLine) -> None:
    answer = planned(here, f"{MANY} --gpus-per-node 8 --lr-rule none")
    assert any("batches under 256 may need no scaling" in note for note in answer["lr"]["notes"])


def test_ten_million_rows_on_three_gpus(here: CommandLine) -> None:
    """32 x 3 x 2 = 192; 52,083 steps; 9.4 h an epoch at 0.65 s; 12 GB of host memory."""
    answer = planned(here, f"{LARGE} --micro-batch 32 --accumulation 2 --epochs 3 --step-time 0.65")
    assert answer["batch"]["effective"] == 192
    assert answer["steps"]["full_per_epoch"] == 52_083
    assert answer["time"]["epoch_s"]["mid"] / 3600 == pytest.approx(9.4, abs=0.05)
    assert answer["time"]["total_s"]["mid"] / 3600 == pytest.approx(28.2, abs=0.05)
    assert answer["gpu_memory"]["capacity_bytes"] == 20 << 30
    assert answer["gpu_memory"]["verdict"] == "fits"
    assert answer["host_memory"]["verdict"] == "tight"
    assert answer["loader"]["num_workers"] == 0
    assert answer["loader"]["pin_memory"] is False


def test_the_hours_of_an_epoch_follow_the_time_of_a_step(here: CommandLine) -> None:
    batch = "--micro-batch 32 --accumulation 2 --epochs 3"
    for seconds, hours in ((0.5, 7.2), (0.8, 11.6)):
        time = planned(here, f"{LARGE} {batch} --step-time {seconds}")["time"]
        assert time["epoch_s"]["mid"] / 3600 == pytest.approx(hours, abs=0.05)
        assert time["total_s"]["mid"] == pytest.approx(3 * time["epoch_s"]["mid"])


def test_another_batch_needs_less_memory(here: CommandLine) -> None:
    """24 in place of 32; 16 x 4, so that the batch stays; what 2 GPUs took before."""
    whole = planned(here, f"{LARGE} --micro-batch 32 --accumulation 2")
    for batch, effective in (
        ("--micro-batch 24 --accumulation 2", 144),
        ("--micro-batch 16 --accumulation 4", 192),
        ("--micro-batch 16 --accumulation 8 --gpus-per-node 2 --seq-len 256", 256),
    ):
        answer = planned(here, f"{LARGE} {batch}")
        assert answer["batch"]["effective"] == effective
        assert answer["gpu_memory"]["total_bytes"] < whole["gpu_memory"]["total_bytes"]


def test_a_shorter_sequence_needs_less_memory_in_a_line_not_a_square(here: CommandLine) -> None:
    """The guide reckons with the square of the length; fused attention keeps no such matrix."""
    batch = "--micro-batch 32 --accumulation 2 --seq-len"

    def needs(length: int) -> tuple[int, float]:
        answer = planned(here, f"{LARGE} {batch} {length}")
        terms = answer["gpu_memory"]["terms"]
        (found,) = [term["bytes"] for term in terms if term["name"] == "activations"]
        return int(found), answer["time"]["step_s"]["mid"]

    (most, slowest), (usual, step), (least, _) = map(needs, (512, 192, 128))
    assert most / usual == pytest.approx(512 / 192)
    assert usual / least == pytest.approx(192 / 128)
    assert slowest / step == pytest.approx(2.4, abs=0.05)


# The scripts' flags.

LORA, CAPTIONS, SMALL, PARQUET = (
    *("finetune_lora/finetune.py", "deepspeed_offload/train_captions.py"),
    *("small_transformer/train.py", "pretrain_parquet/pretrain.py"),
)
FLAGS: list[tuple[str, str, dict[str, Any]]] = [
    (LORA, "--config paper_r64", {"preset": "paper_r64"}),
    (LORA, "--config pretrained_r320", {"preset": "pretrained_r320"}),
    (
        LORA,
        "--config paper_r64 --epochs 5 --batch-size 16 --gradient-accumulation 4 "
        "--learning-rate 3e-5",
        {"epochs": 5, "batch_size": 16, "accumulation": 4, "lr": 3e-05},
    ),
    (
        LORA,
        "--config paper_r64 --batch-size 4 --gradient-accumulation 16",
        {"batch_size": 4, "accumulation": 16},
    ),
    (CAPTIONS, "--max_steps 10 --save_steps 5 --output {out}", {"max_steps": 10, "save_every": 5}),
    (SMALL, "--no-mixed-precision", {"no_mixed_precision": True}),
    (SMALL, "--use-wandb", {"wandb": True}),
    (
        SMALL,
        "--batch-size 16 --hidden-dim 256 --n-layers 3 --max-epochs 100",
        {"batch_size": 16, "hidden_dim": 256, "n_layers": 3, "max_epochs": 100},
    ),
    (
        SMALL,
        "--batch-size 32 --hidden-dim 512 --n-layers 6",
        {"batch_size": 32, "hidden_dim": 512, "n_layers": 6},
    ),
    (
        CAPTIONS,
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 128 --bf16 True "
        "--gradient_checkpointing True --model_max_length 1024 --dataloader_num_workers 1 "
        "--lazy_preprocess True",
        {"batch_size": 1, "accumulation": 128, "workers": 1, "model_max_length": 1024},
    ),
    (SMALL, "--resume --output {out}", {"resume": True}),
    (PARQUET, "--epochs=5 --learn_rate=0.0002", {"epochs": 5, "lr": 0.0002}),
    (PARQUET, "--max_seq_len=128", {"seq_len": 128}),
    (
        PARQUET,
        "--batch_size_per_gpu=16 --gradient_accumulation_steps=4",
        {"batch_size": 16, "accumulation": 4},
    ),
    (PARQUET, "--save_steps=2000", {"save_every": 2000}),
    (PARQUET, "--warmup_steps=2048", {"warmup": 2048}),
    (PARQUET, "--keep_latest_n_ckp=3", {"keep_best": 3}),
]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("script", "typed", "expected"), FLAGS, ids=[f"{script} {typed}" for script, typed, _ in FLAGS]
)
def test_a_script_takes_the_flags_of_its_guide(
    script: str,
    typed: str,
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in ("accelerate", "peft", "pyarrow"):
        pytest.importorskip(package, reason="the examples need the extras 'train' and 'examples'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str((EXAMPLES / script).parent))
    args = vars(load(EXAMPLES / script).parse_arguments(typed.format(out=tmp_path / "out").split()))
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("", "UserWarning: 'pin_memory' argument is set as true but not supported on MPS now"),
        ("error", "ModuleNotFoundError: No module named 'torch'"),
        ("severe", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("severe", "Killed"),
        ("severe", "[rank0]: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("),
    ],
)
def test_a_message_of_a_guide_is_named(kind: str, line: str) -> None:
    assert Classifier().classify(0, line.encode()) == kind
