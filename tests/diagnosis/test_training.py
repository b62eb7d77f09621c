"""What a log shows of a training: formats of programs, and that healthy numbers are healthy."""

from __future__ import annotations

from collections.abc import Sequence

from clusterrun.diagnosis.lines import read_line
from clusterrun.diagnosis.training import TrainingLog

MEGATRON = (
    " iteration {n}/ 500 | consumed samples: {n} | elapsed time per iteration (ms): 61.5 "
    "| learning rate: 6.0E-05 | global batch size: 96 |{loss} loss scale: {scale} "
    "| grad norm: {norm} |"
)


def read(lines: Sequence[str]) -> TrainingLog:
    """Feed a log."""
    log = TrainingLog()
    for number, text in enumerate(lines, 1):
        log.feed(read_line(text, number=number, file=""))
    return log


STEPS_WITH_A_LOSS = [
    MEGATRON.format(n=10, loss=" lm loss: 2.5E+00 |", scale=1.0, norm=0.3),
    "{'loss': 2.5, 'grad_norm': 0.3, 'learning_rate': 1e-05, 'epoch': 0.1}",
    "Epoch 0:  12%|█▏        | 12/100 [00:10<01:10,  1.2it/s, v_num=0, train_loss=2.500]",
    "[titan] 2026-01-01 10:00:00,000 - root - INFO - step: 10  loss:  2.5000  grad_norm:  0.3",
    "step 250: train loss 2.5, val loss 3.1",
    "iter 10: loss 2.5000, time 151.21ms, mfu 31.2%",
    "2026-01-01 10:00:00 | INFO | train_inner | epoch 001:  10 / 100 loss=2.5, ppl=5.6, lr=0.1",
    "Epoch: [0][ 10/5005]  Time 0.1 (0.2)  Loss 2.5000e+00 (2.6)  Acc@1 0.0",
    "Training epoch 0, iteration 5/99 | lr: 0.03 | global_step: 5 | reduced_train_loss: 2.5",
    '{"step": 3, "loss": 2.5}',
    "epoch 1 loss: tensor(2.5, device='cuda:0')",
    "5880/8295 [04:01<01:39, 24.37it/s, v_num=0, train_loss_step=2.500",
    "    train/CrossEntropyLoss=2.500",
    "Epoch 1 | iter 10 step 5 | loss train: 2.500, val: n/a",
]


def test_a_step_and_its_loss_are_read() -> None:
    logs = {text: read([text]) for text in STEPS_WITH_A_LOSS}
    wrong = [text for text, log in logs.items() if (log.steps, [*log.losses]) != (1, [2.5])]
    assert wrong == []


NO_LOSSES = [
    "Loading checkpoint shards:  50%|█████     | 1/2 [00:04<00:04,  4.6s/it]",
    "Map: 100%|██████████| 1000/1000 [00:00<00:00, 9000 examples/s]",
    "[1/3] /usr/local/cuda/bin/nvcc -c kernel.cu",
    " validation loss at iteration 7000 | lm loss value: 7.17E+00 | lm loss PPL: 1.3E+03 |",
    "{'eval_loss': 2.1, 'eval_runtime': 3.2}",
    "loss_fn: cross_entropy",
    "Epoch 0:   0%|          | 0/100 [00:00<?, ?it/s, loss=nan, v_num=0]",
]


def test_what_is_no_loss_of_the_training() -> None:
    logs = {text: read([text]) for text in NO_LOSSES}
    assert [text for text, log in logs.items() if log.losses or log.is_nan] == []


def test_ranks_that_print_the_same_step_take_one() -> None:
    ranks = [f"[rank{n}]: step 7 loss 2.{n}" for n in range(8)]
    assert read([*ranks, "step 8 loss 2.1", "[rank1]: step 7 loss 2.2"]).steps == 2


NOISE: list[list[float]] = [
    [0.8, 2.4, 1.1, 2.6],
    [0.02, 0.31, 0.05, 0.4, 0.03, 0.6],
    [11.0, 9.0, 7.5, 6.1, 5.2, 4.8, 7.9, 4.7, 4.6],
    [60, 120, 80, 95, 110, 70, 118, 121, 119],
    [2.0] * 30 + [2.4, 2.5, 2.3],
    [0.0, 0.0, 4.0, 9.0],
    [3.0] * 20 + [7.0, 6.8, 6.0, 5.0, 4.2, 3.9, 3.5, 3.3, 3.1, 3.0],
    [1.2, 0.5, 2.9, 0.8, 2.2, 1.9, 0.4, 2.6, 1.1, 2.4, 0.9, 2.8, 1.7, 2.5, 2.1],
    [6.0, 6.4, 6.9, 7.3, 7.6, 7.9, 8.1, 8.2, 8.3, 8.3, 8.3, 8.2],
    [0.02] * 30 + [0.3] * 30,
]


JUMPS = [[6.4, 11.4, 7.2], [2.1] * 30 + [6.5, 7.8, 9.9], [0.1] * 10 + [3.0, 8.0, 9.0], [2.3, 10.8]]


SLOW_RISES = [
    [2.1 + max(0, n - 300) * 0.01 for n in range(600)],
    [0.5 + n % 3 * 0.1 for n in range(20)] + [1.5 + n % 5 * 0.4 for n in range(20)],
    [2.3, 2.2, 2.1, 2.2, 2.6, 3.0, 3.5, 4.0, 4.4],
]


def test_a_jump_or_a_slow_rise_is_a_divergence_and_noise_is_none() -> None:
    for losses in (*NOISE, *JUMPS, *SLOW_RISES):
        log = read([f"step {n} loss {loss}" for n, loss in enumerate(losses)])
        assert log.is_diverged is (losses not in NOISE), losses


def _overflows(count: int) -> list[str]:
    return [
        f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2**n}, reducing"
        for n in range(count, 0, -1)
    ]


def _steps(first: int, count: int) -> list[str]:
    return [f"step {n} loss 2.{n % 7}" for n in range(first, first + count)]


def test_skipped_steps() -> None:
    below = [f"| WARNING: overflow detected, setting loss scale to: {2.0**-n}" for n in range(5)]
    rare = [*_steps(0, 30), *_overflows(1), *_steps(40, 9), *_overflows(2), *_steps(50, 9)]
    for is_overflowing, logs in (
        (True, (_overflows(24), below, [*_steps(0, 30), *_overflows(5)])),
        (
            False,
            (
                _overflows(16),  # the start searches the scale
                [*_steps(0, 30), *_overflows(5), *_steps(40, 9)],
                [*_steps(0, 30), *_overflows(1) * 8],  # one, from 8 ranks
                rare,
            ),
        ),
    ):
        assert [log for log in logs if read(log).is_overflowing is not is_overflowing] == []


def test_numbers_that_are_not_finite() -> None:
    def rows(loss: str, norm: str) -> list[str]:
        return [f"{{'loss': {loss}, 'grad_norm': {norm}, 'epoch': 0.0{n}}}" for n in range(4)]

    def megatron(norm: str, *scales: float) -> list[str]:
        texts = (MEGATRON.format(n=n, loss="", scale=s, norm=norm) for n, s in enumerate(scales))
        return list(texts)

    lost = (
        [f"step {n} loss nan" for n in (1, 2, 3)],
        [*["step 1 loss 2.0"] * 3, "step 2 loss nan"],
        rows("0.0", "nan"),
        rows("nan", "nan"),
        megatron("nan", 1.0, 1.0, 1.0, 1.0),
        megatron("inf", 1.0, 0.5, 0.25, 0.125),
        [*_steps(0, 2), *megatron("nan", 1.0) * 2],
    )
    fine = (
        [*_steps(0, 9), "step 10 loss nan", "step 11 loss 2.0"],
        rows("0.0", "0.0"),
        megatron("nan", 2.0**32, 2.0**32),
        # What other programs print where a number is expected.
        [f"step 1 loss scale: {x} overflow, skip, scale to {x}" for x in ("...", "1.2.3")],
    )
    assert [log for log in (*lost, *fine) if read(log).is_nan is not (log in lost)] == []


ENDS = [
    "{'train_runtime': 12.3, 'train_loss': 2.1, 'epoch': 1.0}",
    "`Trainer.fit` stopped: `max_epochs=3` reached.",
    "[after training is done] datetime: 2026-01-01 10:00:00",
    "2026-01-01 10:00:00 | INFO | fairseq_cli.train | done training in 33.3 seconds",
    "Training completed. Do not forget to share your model on huggingface.co/models =)",
    "[2026-01-01 10:00:00,000] [INFO] [launch.py:348:main] Process 77 exits successfully.",
    "Done!",
]


def test_the_end_of_a_training() -> None:
    assert [each for each in ENDS if not read(["step 1 loss 2", each]).is_complete] == []
