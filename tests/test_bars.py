"""How far a training is, read from lines that five kinds of training really printed."""

from __future__ import annotations

import pytest

from clusterrun.logformat.bars import Bar, Text, find_bar

# Recorded with tqdm 4.70, transformers 5.23, trl 1.16, datasets 5.2 and lightning 2.6.
PLAIN = (
    "\rEpoch 0: 100%|█████████▉| 398/400 [00:13<00:00, 29.62it/s, loss=0.001]"
    "\rEpoch 0: 100%|██████████| 400/400 [00:13<00:00, 29.51it/s, loss=0.000]\n"
    "\rEpoch 1:   0%|          | 0/400 [00:00<?, ?it/s]"
    "\rEpoch 1:   1%|          | 3/400 [00:00<00:13, 29.13it/s, loss=0.003]"
)
ACCELERATE = (
    "\r  4%|▍         | 33/800 [00:01<00:26, 29.12it/s]"
    "\r  5%|▍         | 36/800 [00:01<00:26, 29.36it/s]"
)
TRAINER = (
    "\r  0%|          | 0/400 [00:00<?, ?it/s][rank0]:[W1123 03:34:43.746100625 reducer.cpp:1529]"
    " Warning: find_unused_parameters=True was specified\n"
    "\r  2%|▏         | 9/400 [00:00<00:14, 27.55it/s]"
    "                                               \r"
    "\r  2%|▎         | 10/400 [00:00<00:14, 27.55it/s]"
)
EVALUATION = (
    "\n\r  0%|          | 0/7 [00:00<?, ?it/s]\x1b[A"
    "\n\r 71%|███████▏  | 5/7 [00:00<00:00, 38.92it/s]\x1b[A"
)
TRL = (
    "\rTokenizing train dataset:  53%|█████▎    | 1068/2000 [00:00<00:00, 10607.48 examples/s]"
    "\rTokenizing train dataset: 100%|██████████| 2000/2000 [00:00<00:00, 10510.10 examples/s]\n"
)
LIGHTNING = (
    "\rSanity Checking DataLoader 0:  50%|█████     | 1/2 [00:00<00:00, 10.92it/s]"
    "\rEpoch 0:  45%|████▌     | 90/200 [00:03<00:04, 22.67it/s]"
    "\n\rValidation DataLoader 0:  60%|██████    | 12/20 [00:00<00:00, 31.05it/s]\x1b[A"
)


def found(*texts: str) -> Bar | None:
    """Read texts that were printed ten seconds apart."""
    return find_bar(Text(10.0 * number, text) for number, text in enumerate(texts))


@pytest.mark.parametrize(
    ("texts", "bar"),
    [
        ((PLAIN,), ("Epoch 1", 3, 400, 29.13, "it")),
        ((ACCELERATE,), ("", 36, 800, 29.36, "it")),
        ((TRAINER,), ("", 10, 400, 27.55, "it")),
        ((TRAINER, EVALUATION), ("", 10, 400, 27.55, "it")),
        ((TRL[:90],), ("Tokenizing train dataset", 1068, 2000, 10607.48, "examples")),
        ((TRL, TRAINER), ("", 10, 400, 27.55, "it")),
        ((TRAINER, "\rEvaluating: 2%| | 9/500 [00:09<8:00, 1.00it/s]"), ("", 10, 400, 27.55, "it")),
        ((LIGHTNING,), ("Epoch 0", 90, 200, 22.67, "it")),
        (("\rsteps: 13it [00:05,  2.40it/s]",), ("steps", 13, None, 2.4, "it")),
        (("\r 1%|  | 1/90 [00:20<30:00, 20.00s/it]",), ("", 1, 90, 0.05, "it")),
        (("\r45% 45/100 [1:00:30<1:02:37, 1.20k samples/s]",), ("", 45, 100, 1200.0, "samples")),
        (("\r12%|#2  | 12.3k/1.00M [00:10<13:20, 1.23kit/s]",), ("", 12300, 10**6, 1230.0, "it")),
    ],
)  # fmt: skip
def test_the_bar_that_shows_the_training_is_found(
    texts: tuple[str, ...], bar: tuple[str, int, int | None, float, str]
) -> None:
    seen = found(*texts)
    assert seen is not None
    assert (seen.description, seen.count, seen.total, seen.rate_per_s, seen.unit) == bar


def test_of_epochs_and_their_steps_the_steps_are_taken() -> None:
    outer = "Epochs:  10%|█ | 1/10 [09:00<81:00, 540.00s/it]"
    inner = "\r 20%|██| 200/1000 [01:00<04:00, 3.33it/s]"
    for texts in ((outer, inner), (inner, outer)):
        assert found(*texts).total == 1000  # type: ignore[union-attr]


def test_a_bar_that_was_left_gives_way_to_one_that_moves() -> None:
    left = "\rscan:  60%|██| 600/1000 [01:00<00:40, 10it/s]"
    moves = "\rtrain:  10%|█| 3/30 [00:09<01:21, 3.00s/it]"
    assert found(left, *[""] * 6, moves).description == "train"  # type: ignore[union-attr]


def test_the_time_is_that_of_the_last_step_and_not_of_the_last_drawing() -> None:
    drawn = "\r 10%|█| 3/30 [00:09<01:21, 3.00s/it]"
    assert found(drawn, drawn, drawn).moved_at == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss 2.3 at step [5]",
        "\rmodel.safetensors:  45%|████▌     | 1.05G/2.33G [00:30<00:37, 35.0MB/s]",
        "100%|██████████| 400/400 [x",
        TRL,  # it is done, and no step was made
        "x" * 100_000 + " 45%|##| 45/100 [00:30<00:37, 14.9it/s]",
        f"45%|##| {'9' * 400}/{'9' * 400} [00:30<00:37, 14.9it/s]",
    ],
)
def test_other_text_is_no_progress(text: str) -> None:
    assert found(text) is None


def test_a_unit_reaches_no_terminal_with_its_controls() -> None:
    bar = found("\r 1%|  | 1/90 [00:20<30:00, 20.00s/\x1b[31mstep\x07]")
    assert bar is not None
    assert bar.unit == "step"


LOGGING = "2026-11-29 05:00:{0:02}.123 | INFO | 12 | "


@pytest.mark.parametrize(
    ("line", "total", "unit"),
    [
        ("step {} loss 0.1", None, "step"),
        (LOGGING + "Step: {}/1000 loss 1e-0{0}", 1000, "step"),
        ('{{"step": {}, "loss": 0.1}}', None, "step"),
        ("INFO:root:step={} loss=0.5", None, "step"),
        ("\x1b[32mGlobal step {0:,}\x1b[0m | loss nan", None, "step"),
        ("epoch {}/10", 10, "epoch"),
        ("Epoch {}\tloss 0.1", None, "epoch"),
        ("Epoch [2/10], Step [{}/600], Loss: 0.1", 600, "step"),
        ("epoch 1, batch {} of 100, loss 0.2", 100, "batch"),
        ("iter {}: loss 2.1000, time 12.1ms, mfu 1.0%", None, "it"),  # nanoGPT
        ("[2026-11-29 05:00:0{0}] iteration    {}/   1000 | consumed samples: {0} |", 1000, "it"),
        ("[2026-11-29 05:00:00,123] [INFO] [Rank 0] step={}, skipped=0, lr=[0.1]", None, "step"),
        ("{{'loss': '1.2', 'grad_norm': '1.1', 'epoch': '{}'}}", None, "epoch"),
        ("[{}/1000]", 1000, "it"),
        ("Epoch: [0][  {}/5005]\tTime  0.1 ( 0.2)\tLoss 6.9", 5005, "it"),  # PyTorch's examples
        ("Train Epoch: 1 [{}/60000 (1%)]\tLoss: 2.3", 60000, "it"),
        ("[1,  {}] loss: 2.173", None, "it"),
        ("Epoch(train)  [1][  {}/3696]  lr: 1e-3  eta: 1:00:00", 3696, "it"),  # mmengine
        ("[11/29 05:00:00 d2.utils.events]:  eta: 0:10:00  iter: {}  loss: 1", None, "it"),
        ("12:00:00 | INFO | epoch 001:    {} / 1000 loss=8.1", 1000, "it"),  # fairseq
        (" {}/10 ━━━━━━━━ 1:02 12ms/step - loss: 0.1", 10, "it"),  # Keras
    ],
)
def test_lines_that_count_are_progress(line: str, total: int | None, unit: str) -> None:
    texts = [line.replace("{}", "{0}").format(number) for number in (3, 5, 9)]
    assert found(texts[0]) is None, "one line alone"
    assert found(texts[2], texts[1]) is None, "the number falls"
    assert found(*[texts[0]] * 2) is None, "it is the same line again"
    bar = found(*texts)
    assert bar is not None
    assert (bar.count, bar.total, bar.rate_per_s, bar.unit) == (9, total, 0.3, unit)


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-{0:02} 05:00:0{0} INFO started, torch 2.{0}.1",
        "saved out/checkpoint-{0} and out/step_{0}.pt, /data/step {0}/x",
        "out/epoch=1-step={0}.ckpt epoch {0}-step {0}",
        "GET /v1/models HTTP/1.1 20{0}",
        "| step | 10{0} | 0.{0} |",
        "the step of version {0}.1, step 1.{0}.3, step 0.{0}",
        "step {0} %, step {0}%, at step 05:0{0}",
        "on 1{0}/11/2026 and [11/2{0} 05:00:00], 10.0.0.{0}/24",
        "Step {0}: Loading",
        "saved a checkpoint at step {0}",
        "[{0}/30] /usr/bin/c++ -o x",
        "rank {0} of 8, port {0}/tcp, {0}/10 MB",
        "batch of {0} samples in epoch-{0}",
        "try {0}: the last {0} steps",
    ],
)
def test_other_numbers_that_rise_are_no_progress(line: str) -> None:
    assert found(*[line.format(number) for number in (3, 5, 7)]) is None


def test_a_new_epoch_is_progress_and_has_the_rate_of_steps() -> None:
    numbers = [(1, 500), (1, 600), (2, 100)]
    bar = found(*[f"Epoch [{epoch}/9], Step [{step}/600]" for epoch, step in numbers])
    assert bar is not None
    assert (bar.count, bar.total, bar.rate_per_s) == (100, 600, 10.0)
