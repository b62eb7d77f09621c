"""Watch the losses that a script reports: whether they change, and whether the last is a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES = ("loss", "train_loss")


class LossWatch:
    """Counts new losses. A number that is reported again, since no newer one is known, is not new.

    Numbers are read at each report, tensors only when a report is written: reading one may wait for
    a GPU.
    """

    def __init__(self) -> None:
        self.count = 0
        self._newest: Any = None
        self._first = self._last = math.nan
        self._is_constant = True

    def see(self, metrics: Mapping[str, Any]) -> None:
        """Take the loss of a report if it is a number."""
        loss = _loss(metrics)
        if isinstance(loss, float) and loss is not self._newest:
            self._newest = loss
            self._take(loss)

    def see_written(self, metrics: Mapping[str, Any]) -> None:
        """Take the loss of a report that is written, if `see` did not."""
        loss = _loss(metrics)
        if loss is None or isinstance(loss, int | float | str):
            return
        try:
            self._take(float(loss))
        except Exception:  # noqa: BLE001 - a value of a user's class may raise anything
            return

    def _take(self, loss: float) -> None:
        self.count += 1
        self._first = loss if self.count == 1 else self._first
        self._is_constant &= loss == self._first
        self._last = loss

    def summary(self) -> dict[str, Any]:
        """Return the fields of the event `losses`."""
        is_finite = math.isfinite(self._last)
        return {
            "count": self.count,
            "last": self._last if is_finite else None,
            "is_constant": self._is_constant,
            "is_finite": is_finite,
        }


def _loss(metrics: Mapping[str, Any]) -> Any:
    return next((metrics[name] for name in NAMES if name in metrics), None)
