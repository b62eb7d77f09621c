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
