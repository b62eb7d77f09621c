"""Train as the example does, in steps that sleep instead of computing."""

from __future__ import annotations

import time

import train_lm

STEP_S = 0.02
set_rate = train_lm.Training.set_rate


def set_rate_in_time(training: train_lm.Training, step: int) -> float:
    time.sleep(STEP_S)
    return set_rate(training, step)


train_lm.Training.set_rate = set_rate_in_time

if __name__ == "__main__":
    train_lm.run(train_lm.parse_arguments())
