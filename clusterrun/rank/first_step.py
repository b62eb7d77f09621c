"""Check a rank when an optimizer first steps: the same setup will then train for days."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

MODULE = "torch.optim.optimizer"
Check = Callable[[Any], None]


class FirstStep:
    """The pending checks; torch calls them before each step until none is left."""

    def __init__(self) -> None:
        self._checks: dict[Check, None] = {}
        self._hook: Any = None

    def add(self, check: Check) -> None:
        """Call `check(optimizer)` before each step."""
        self._checks[check] = None
        self.listen()

    def drop(self, check: Check) -> None:
        """Stop calling `check`; never call this in a check, since torch iterates over its hooks."""
        self._checks.pop(check, None)
        if self._hook is not None and not self._checks:
            self._hook.remove()
            self._hook = None

    def listen(self, _: object = None) -> None:
        """Register a hook with torch if a check is pending and torch is imported."""
        module: Any = sys.modules.get(MODULE)
        if self._checks and self._hook is None and hasattr(module, "Optimizer"):
            self._hook = module.register_optimizer_step_pre_hook(self._before)

    def _before(self, optimizer: Any, *_: Any) -> None:
        # A step without gradients trains nothing: some scripts do it to please a scheduler.
        if _has_gradients(optimizer):
            for check in tuple(self._checks):
                check(optimizer)


def _has_gradients(optimizer: Any) -> bool:
    groups = optimizer.param_groups
    return any(param.grad is not None for group in groups for param in group["params"])
