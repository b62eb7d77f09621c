"""Train as the example does, and run into a mistake of one's own on every rank."""

from __future__ import annotations

import paced
import train_lm

BUG_AT = 70
set_rate = paced.set_rate_in_time


def set_no_rate(training: train_lm.Training, step: int) -> float:
    if step == BUG_AT:
        raise KeyError("no such layer")
    return set_rate(training, step)


train_lm.Training.set_rate = set_no_rate
train_lm.run(train_lm.parse_arguments())
