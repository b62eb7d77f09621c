"""The example that pretrains on a parquet set: its score, its memory, its training."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.examples import worlds
from tests.examples.guides import script
from tests.readme import run
from tests.road import EXAMPLES

pyarrow = pytest.importorskip("pyarrow", reason="the example needs the extra 'examples'")
HERE = EXAMPLES / "pretrain_parquet"
sys.path.insert(0, str(HERE))

import bleu  # noqa: E402 - found through the line above
import host_memory  # noqa: E402
import saved  # noqa: E402
from pyarrow import parquet  # noqa: E402

pytestmark = pytest.mark.torch  # its parts import torch


def bleu_of(*pairs: tuple[str, str]) -> float:
    counts = [bleu.count(bleu.tokens(ours), bleu.tokens(theirs)) for ours, theirs in pairs]
    return float(bleu.score([sum(values) for values in zip(*counts, strict=True)]))


def test_bleu_is_what_is_computed_by_hand() -> None:
    # 1- to 4-grams: 5/6, 4/5, 3/4, 2/3; as long as the reference
    ours, theirs = "the cat is on the roof", "the cat is on the mat"
    expected = 100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert bleu_of((ours, theirs)) == pytest.approx(expected)
    # all match, 4 words for 6
    short = ("the cat is on", "the cat is on the mat")
    assert bleu_of(short) == pytest.approx(100 * math.exp(1 - 6 / 4))
    # longer than the reference: 4/5, 3/4, 2/3, 1/2 and no bonus for it
    long = ("the cat is on mars", "the cat is on")
    assert bleu_of(long) == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    # of a corpus the counts are added, not the scores: 9/10, 7/8, 5/6, 3/4; 10 words for 12
    added = (9 / 10 * 7 / 8 * 5 / 6 * 3 / 4) ** 0.25 * math.exp(1 - 12 / 10)
    assert bleu_of((ours, theirs), short) == pytest.approx(100 * added)
    # no match of four words
    for none in ("", "dog", "a b c d", "the cat sat on the mat"):
        assert bleu_of((none, theirs)) == 0
    # the example of the paper's section 2.1: no word counts more often than in the reference
    counts = bleu.count(["the"] * 7, bleu.tokens(theirs))
    assert (counts[0], counts[bleu.LONGEST]) == (2, 7)


def test_the_limit_of_memory_is_the_least_that_anybody_sets(tmp_path: Path) -> None:
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    inner = groups / "slurm" / "job_1" / "step_0"
    inner.mkdir(parents=True)
    own.write_text("0::/slurm/job_1/step_0\n")

    def limit(**environ: str) -> tuple[int, str]:
        found = host_memory.find_limit(environ, own_groups=own, groups=groups)
        return found.bytes, found.source

    assert limit()[1] == "machine"
    assert limit(SLURM_MEM_PER_NODE="0")[1] == "machine"  # all of the node's memory
    assert limit(SLURM_MEM_PER_NODE="12") == (12 << 20, "SLURM_MEM_PER_NODE")
    per_cpu = {"SLURM_MEM_PER_CPU": "3", "SLURM_CPUS_ON_NODE": "2"}
    assert limit(**per_cpu) == (6 << 20, "SLURM_MEM_PER_CPU")
    (inner / "memory.max").write_text("max\n")
    (groups / "slurm" / "job_1" / "memory.max").write_text("1000000\n")
    assert limit(**per_cpu) == (1000000, "cgroup")
    own.write_text("9:cpu,memory:/job_2\n")
    (groups / "memory" / "job_2").mkdir(parents=True)
    (groups / "memory" / "job_2" / "memory.limit_in_bytes").write_text("2000000\n")
    assert limit() == (2000000, "cgroup")


def test_under_15_gib_nothing_reads_ahead() -> None:
    for gib, workers in ((12, 0), (14.9, 0), (15, 1), (64, 1)):
        limit = host_memory.Limit(bytes=int(gib * 2**30), source="given")
        assert host_memory.loader_workers(limit) == workers


def test_only_the_weights_of_the_best_are_kept(tmp_path: Path) -> None:
    weights, folder = tmp_path / "model.safetensors", tmp_path / "best"
    for step, loss in enumerate((0.5, 0.9, math.nan, 0.3, 0.4, 0.8), 1):
        weights.unlink(missing_ok=True)
        weights.write_text(f"of step {step}")
        saved.keep_if_best(weights, folder, step, loss, most=2)
    assert [path.name for path in saved.best(folder)] == [
        "step-00000004-loss-0.3000.safetensors",
        "step-00000005-loss-0.4000.safetensors",
    ]
    # Set back to step 4, the training is worse there: that of step 5 is left.
    saved.keep_if_best(weights, folder, 4, 0.7, most=1)
    (path,) = folder.iterdir()
    assert (path.name[:13], path.read_text()) == ("step-00000005", "of step 5")


def test_too_much_memory_of_host_or_gpu_is_warned_of() -> None:
    gib, limit = 1 << 30, host_memory.Limit(bytes=10 << 30, source="given")
    of_ranks = [[3 * gib, 4 * gib, 12 * gib, 15 * gib, 20 * gib]] * 4
    (told,) = host_memory.lines(200, of_ranks, 2, limit)
    assert told == (
        "memory at step 200: host 6442 MB (60% of 10.0 GiB), peak 8590 MB; "
        "GPU 12.0 GiB allocated, 15.0 GiB reserved at most (75% of 20.0 GiB)"
    )
    fuller = [*of_ranks[:3], [gib, gib, 16 * gib, 17 * gib, 20 * gib]]
    _, host, gpu = host_memory.lines(200, fuller, 3, limit)
    assert host.startswith("warning: more than 70% of the host memory is used: lower")
    assert gpu.startswith("warning: more than 80% of the GPU memory is used: use half of ")
    assert host_memory.lines(1, [[gib, gib, 0, 0, 0]], 1, limit) == [
        "memory at step 1: host 1074 MB (10% of 10.0 GiB), peak 1074 MB"
    ]


def test_caches_are_given_back_every_50_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pretrain

    cleared, reported, state = [], [], SimpleNamespace(step=0)
    monkeypatch.setattr(pretrain.host_memory, "clear_caches", lambda: cleared.append(state.step))
    state.args = pretrain.parse_arguments(["--data", "data", "--output", str(tmp_path)])
    state.stream, state.total_steps = SimpleNamespace(steps_per_epoch=1000), 1000
    state.report_loss = lambda: None
    state.report_memory = lambda: reported.append(state.step)
    for state.step in range(1, 251):
        pretrain.Training.report(state)
    assert (cleared, reported) == ([50, 100, 150, 200, 250], [200])


def test_the_large_training_is_planned_as_the_guide_says(tmp_path: Path) -> None:
    out = run(script(HERE, "plan"), tmp_path)
    assert "32 per rank x 2 accumulation x 3 ranks = 192 samples a step" in out
    assert "52,083 full steps per epoch" in out
    assert "disk      2.28 GB per checkpoint, keep 1 + 1 in flight + weights of the 5 best" in out


def test_the_large_training_has_the_sizes_that_are_planned(tmp_path: Path) -> None:
    import pretrain
    import torch

    job = yaml.safe_load((HERE / "large.yaml").read_text())
    args = vars(pretrain.parse_arguments([*job["args"], "--output", str(tmp_path)]))
    names = {"width": "hidden", "batch_size": "micro_batch"}
    same = "width layers heads seq_len batch_size accumulation epochs save_every keep keep_best"
    sizes = {name: job["training"][names.get(name, name)] for name in same.split()}
    assert {name: args[name] for name in sizes} == sizes
    with torch.device("meta"):
        model = pretrain.Decoder(
            **{name: args[name] for name in ("width", "layers", "heads", "seq_len")}
        )
    assert sum(weights.numel() for weights in model.parameters()) == job["training"]["params"]


LARGE = {
    "epochs": 3,
    "batch_size": 32,
    "accumulation": 2,
    "seq_len": 192,
    "buffer_rows": 5000,
    "lr": 1e-4,
    "warmup": 1024,
    "save_every": 5000,
    "log_every": 100,
    "keep_best": 5,
    "width": 1024,
    "resume": False,
}


def test_the_large_configuration_gives_way_to_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pretrain

    monkeypatch.chdir(tmp_path)
    own: dict[str, dict[str, object]] = {
        "": {},
        "--is_keep_training=True": {"resume": True},
        "--epochs=5 --learn_rate=0.0002": {"epochs": 5, "lr": 2e-4},
        "--batch_size_per_gpu=24": {"batch_size": 24},
        "--batch_size_per_gpu=16 --gradient_accumulation_steps=4": {
            **{"batch_size": 16, "accumulation": 4}
        },
        "--max_seq_len=128": {"seq_len": 128},
        "--warmup_steps=2048 --save_steps=2000": {"warmup": 2048, "save_every": 2000},
        "--dataloader_buffer_size=900 --logging_steps=9": {"buffer_rows": 900, "log_every": 9},
        "--keep_latest_n_ckp=3 --width 64 --heads 4": {"keep_best": 3, "width": 64},
    }

    def parsed(words: str) -> dict[str, object]:
        typed = ["train", "--use_large_config=True", *words.split()]
        args = vars(pretrain.parse_arguments(typed))
        assert (args["data"], args["output"]) == (Path("data"), Path("out"))
        return {name: args[name] for name in LARGE}

    for words, values in own.items():
        assert parsed(words) == LARGE | values
    for name, value in {"MICRO_BATCH": "7", "ACCUMULATION": "3", "GRAD_CKPT": "0"}.items():
        monkeypatch.setenv(f"CLUSTERRUN_{name}", value)  # as `submit --plan` does
    for words, values in own.items():
        assert parsed(words) == LARGE | {"batch_size": 7, "accumulation": 3} | values


# From here on it trains.

ROWS = 800
EXAMPLE = HERE / "pretrain.py"
TINY = (
    "--data data --output out --epochs 2 --batch-size 16 --layers 1 --width 32 --log-every 1 "
    "--save-every 20 --keep 9 --buffer-rows 60"
)


def make_data(directory: Path) -> None:
    argv = [sys.executable, str(HERE / "make_data.py"), str(directory), "--rows", str(ROWS)]
    subprocess.run([*argv, "--file-rows", "300", "--group-rows", "80"], check=True)
    # Rows of very unequal length: a mean of means would not be the mean.
    rows = {"prompt": ["a"] * 200, "response": [f"{n:x}" * (n % 40 + 1) for n in range(200)]}
    parquet.write_table(pyarrow.table(rows), directory / "train/part-00002.parquet")


def by_hand(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return worlds.train(folder, "none", 1, *TINY.split(), *options, example=EXAMPLE)


def train(folder: Path, *options: str) -> str:
    return worlds.printed(by_hand(folder, *options))


def refusal(folder: Path, *options: str) -> str:
    done = by_hand(folder, *options)
    assert done.returncode == 1
    return done.stderr


def steps(text: str) -> dict[int, str]:
    return {int(n): loss for n, loss in re.findall(r"^step (\d+)/\d+ loss (\S+)$", text, re.M)}


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train once without an interruption, and without a loader's worker."""
    folder = tmp_path_factory.mktemp("whole")
    make_data(folder / "data")
    return folder, train(folder, "--host-memory", "12")


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_next_row_and_ends_in_the_same_bits(
    tmp_path: Path, whole: tuple[Path, str]
) -> None:
    make_data(tmp_path / "data")
    argv, env = worlds.command(
        tmp_path, "none", 1, *TINY.split(), "--host-memory", "12", example=EXAMPLE
    )
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert any(line.startswith("step 75/100") for line in killed.stdout)
        killed.kill()
    resumed = train(tmp_path, "--host-memory", "12")
    assert re.search(
        r"^resumed at step 60: rank 0 reads on from part-0000\d\.parquet, row group \d, row \d+$",
        resumed,
        re.M,
    )
    folder, text = whole
    assert steps(resumed) == {step: loss for step, loss in steps(text).items() if step > 60}
    ends = [path / "out/step-00000100/model.safetensors" for path in (folder, tmp_path)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def copied(source: Path, folder: Path, *, from_step: int) -> Path:
    """Copy a training's directory as it was after a step."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    for path in (folder / "out").glob("step-*"):
        if path.name > f"step-{from_step:08}":
            shutil.rmtree(path)
    return folder


@pytest.mark.long
def test_the_same_effective_batch_goes_on_with_the_same_losses(
    tmp_path: Path, whole: tuple[Path, str]
) -> None:
    expected = {step: loss for step, loss in steps(whole[1]).items() if step > 80}
    folder = copied(whole[0], tmp_path, from_step=80)
    divided = ("--batch_size_per_gpu=8", "--gradient_accumulation_steps=2")
    text = train(folder, *divided, "--is_keep_training=True")
    assert (steps(text), len(expected)) == (expected, 20)
    err = refusal(tmp_path, "--is_keep_training=True", "--output", "elsewhere")
    assert err.startswith("error: elsewhere has no complete checkpoint to resume from\n  hint: ")


@pytest.mark.long
def test_one_process_goes_on_where_two_left_off(tmp_path: Path) -> None:
    make_data(tmp_path / "data")
    halved = ("--epochs", "1", "--batch-size", "8")
    two = worlds.train(tmp_path, "ddp", 2, *TINY.split(), *halved, example=EXAMPLE)
    printed = worlds.printed(two)
    copied(tmp_path, tmp_path / "one", from_step=40)
    text = train(tmp_path / "one", "--epochs", "1")
    expected = {step: loss for step, loss in steps(printed).items() if step > 40}
    assert (steps(text), len(expected)) == (expected, 10)


@pytest.mark.long
def test_another_training_is_refused_in_words_and_a_rate_may_be_overridden(
    tmp_path: Path, whole: tuple[Path, str]
) -> None:
    folder = copied(whole[0], tmp_path, from_step=80)
    err = refusal(folder, "--accumulation", "2", "--lr", "5e-5")
    assert "step-00000080: effective_batch was 16 and is 32; lr was 0.003 and is 5e-05\n" in err
    assert "  hint: keep batch size x accumulation x ranks = 16; accept the change with" in err
    assert "Traceback" not in err
    assert "resumed at step 80" in train(folder, "--lr", "5e-5", "--override", "lr,warmup")
    marker = json.loads((folder / "out/step-00000100/.complete").read_text())
    assert marker["overrides"] == [{"step": 80, "settings": {"lr": [0.003, 5e-5]}}]


@pytest.mark.long
def test_the_tour_learns_to_answer_and_keeps_the_best(tmp_path: Path) -> None:
    out = run(script(HERE, "local"), tmp_path)
    assert "host memory 12.0 GiB (given): no workers, no pinned memory" in out
    assert "world 2 ranks, 32 rows a step, 279 steps in all" in out
    memory = r"memory at step (\d+): host (\d+) MB \(\d+% of 12\.0 GiB\), peak (\d+) MB"
    measured = re.findall(memory, out)
    assert [int(step) for step, _, _ in measured] == [62, 124, 186, 248]
    assert all(100 < int(now) <= int(peak) + 5 < 4000 for _, now, peak in measured)
    scores = dict(re.findall(r"epoch (\d)/3 BLEU (\S+), as in", out))
    assert list(scores) == ["1", "2", "3"]
    assert float(scores["3"]) > 20
    losses = re.findall(r"held-out loss (\S+) at step (\d+)", out)
    best = [f"step-{int(step):08}-loss-{loss}" for loss, step in sorted(losses)[:5]]
    assert len(losses) == 9
    kept = re.findall(r"kept best/(\S+)\.safetensors, held-out loss ", out)
    assert list(dict.fromkeys(kept)) == best  # said while following, and found in the logs
    assert "COMPLETED" in out
