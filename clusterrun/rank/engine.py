"""Check that the requested engine trains: DDP, FSDP or DeepSpeed.

The launch requests one (CLUSTERRUN_ENGINE); so may the script, with a plugin or a variable of
accelerate. On a CPU accelerate ignores DeepSpeed and FSDP and silently trains with DDP, and a
script under any launch may wrap nothing. A script may always do more than plain DDP.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

from clusterrun import runtime
from clusterrun.rank.emit import rank, say

if TYPE_CHECKING:
    from clusterrun.rank.contract import Contract

OPTIMIZER_MODULE = "torch.optim.optimizer"
Check = Callable[[Any], None]


class StepChecks:
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
        module: Any = sys.modules.get(OPTIMIZER_MODULE)
        if self._checks and self._hook is None and hasattr(module, "Optimizer"):
            self._hook = module.register_optimizer_step_pre_hook(self._run_checks)

    def _run_checks(self, optimizer: Any, *_: Any) -> None:
        # A step without gradients trains nothing: some scripts do it to please a scheduler.
        params = (param for group in optimizer.param_groups for param in group["params"])
        if any(param.grad is not None for param in params):
            for check in tuple(self._checks):
                check(optimizer)


class Engine(str, Enum):
    """What keeps the models of all ranks in step, if anything."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


_SPOKEN = {
    Engine.NONE: "a whole model in each rank",
    Engine.DDP: "plain DDP",
    Engine.FSDP: "FSDP",
    Engine.DEEPSPEED: "DeepSpeed",
}
_SHARDING = {  # the engines that shard the state over the ranks, and accelerate's switches
    Engine.DEEPSPEED: "ACCELERATE_USE_DEEPSPEED",
    Engine.FSDP: "ACCELERATE_USE_FSDP",
}
_PLUGINS = {
    "deepspeed_plugin": Engine.DEEPSPEED,
    "deepspeed_plugins": Engine.DEEPSPEED,
    "fsdp_plugin": Engine.FSDP,
}
_KINDS = {"NO": Engine.NONE, "FSDP": Engine.FSDP, "DEEPSPEED": Engine.DEEPSPEED}  # accelerate's
_LAUNCH, _SCRIPT = "the launch", "the script itself"


class EngineWatch:
    """The requested engines, and those made in this rank."""

    def __init__(self, world: Contract, env: Mapping[str, str], step_checks: StepChecks) -> None:
        self._world, self._step_checks = world, step_checks
        name = env.get("CLUSTERRUN_ENGINE", "")
        self._launched = Engine(name) if name in {engine.value for engine in Engine} else None
        self._missing: dict[Engine, str] = {}  # requested but not yet made, and who requested it
        self._promised: set[Engine] = set()  # accelerate makes them in `prepare`
        self._made: set[Engine] = set()
        if self._launched is not None:
            self._require(self._launched, _LAUNCH)

    def patches(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return the patch of each module, to apply once it is imported."""

        def watched(name: str, engine: Engine) -> Callable[[ModuleType], None]:
            return functools.partial(self._watch_class, name, engine)

        return {
            "accelerate.accelerator": self._watch_accelerate,
            # Classes, not functions: other modules have copies of a function's name.
            "torch.nn.parallel.distributed": watched("DistributedDataParallel", Engine.DDP),
            "torch.distributed.fsdp.fully_sharded_data_parallel": watched(
                "FullyShardedDataParallel", Engine.FSDP
            ),
            "torch.distributed.fsdp._fully_shard._fsdp_state": watched("FSDPState", Engine.FSDP),
            "deepspeed.runtime.engine": watched("DeepSpeedEngine", Engine.DEEPSPEED),
        }

    def check_end(self) -> None:
        """Break off if the script completed with DDP instead; warn if it trained nothing."""
        for engine in self._missing.keys() - self._promised:  # prepare() makes the promised ones
            who = self._missing[engine]
            if Engine.DDP in self._made:
                self._break_off(engine, who, Engine.DDP)
            # No optimizer has stepped: an evaluation, or a training that was already complete.
            say(f"{who} requested {_SPOKEN[engine]}, but the script ended without it")

    def _require(self, engine: Engine, who: str) -> None:
        """Check at each step that an engine that shards was made, until it is."""
        is_alone = engine is Engine.FSDP and self._world.expected == 1  # one rank shards nothing
        must_shard = engine in _SHARDING and not is_alone
        if must_shard and engine not in self._made and self._world.is_enforced:
            self._missing.setdefault(engine, who)
            self._step_checks.add(self._check_step)

    def _check_step(self, optimizer: Any) -> None:
        """Break off if an optimizer steps while a requested engine is missing."""
        if self._missing and self._world.is_mine:
            if Engine.FSDP in self._missing and _is_sharded(optimizer, self._world.expected):
                self._note_made(Engine.FSDP)
            used = Engine.DDP if Engine.DDP in self._made else Engine.NONE
            for engine, who in self._missing.items():
                self._break_off(engine, who, used)

    def _note_made(self, engine: Engine) -> None:
        # A check may call this: drop none here. `clusterrun status` shows the engine emitted last.
        self._missing.pop(engine, None)
        if engine not in self._made and rank() == 0:
            runtime.emit("engine", engine=engine.value)
        self._made.add(engine)

    def _break_off(self, wanted: Engine, who: str, used: Engine) -> None:
        cause, hint = _explain(wanted, used, who, prepares=bool(self._promised))
        message = f"{who} requested {_SPOKEN[wanted]}, but {_SPOKEN[used]} would train instead"
        self._world.break_off(message, cause=cause, hint=hint, kind="engine")

    def _watch_class(self, name: str, engine: Engine, module: ModuleType) -> None:
        """Note the engine when this rank makes an instance of the class `name`."""
        if (watched := getattr(module, name, None)) is None:
            return
        original = watched.__init__

        @functools.wraps(original)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            # Before the call: DeepSpeed steps its optimizer once in its constructor.
            if self._world.is_mine:
                # torch's composable DDP derives its state from FSDP's.
                self._note_made(Engine.DDP if type(made).__name__ == "_ReplicateState" else engine)
                if not self._missing:
                    self._step_checks.drop(self._check_step)
            original(made, *args, **kwargs)

        watched.__init__ = __init__

    def _watch_accelerate(self, module: ModuleType) -> None:
        """Check each Accelerator: whether it has the engine that it, or the launch, requests."""
        accelerator: Any = module.Accelerator
        original = accelerator.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            request = self._requested(signature, (made, *args), kwargs)
            original(made, *args, **kwargs)
            if self._world.is_mine:
                kind = str(made.distributed_type.value)
                ddp = Engine.DDP if kind.startswith("MULTI_") else None  # such as MULTI_GPU
                self._check_accelerator(_KINDS.get(kind, ddp), request)

        accelerator.__init__ = __init__

    def _requested(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Engine, str] | None:
        """Return the engine that a call of Accelerator() requests, and who requests it."""
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None  # let accelerate itself refuse the call
        plugin = next((_PLUGINS[name] for name in _PLUGINS if given.get(name)), None)
        engine = plugin or engine_by_env()
        if engine is None:
            return None
        if engine is self._launched:
            return engine, _LAUNCH
        return engine, (_SCRIPT if plugin else f"{_SHARDING[engine]}=true")

    def _check_accelerator(self, used: Engine | None, request: tuple[Engine, str] | None) -> None:
        """Break off if accelerate will prepare models for another engine than the requested one."""
        if used is None:
            return  # such as Megatron or a TPU
        self._promised.add(used)
        if request is not None:
            self._require(*request)
        for engine, who in self._missing.items():
            if engine is not used:
                self._break_off(engine, who, used)


def _is_sharded(optimizer: Any, world: int) -> bool:
    """Return whether the script has sharded parameters over all ranks, as DTensors of one mesh."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    dtensors = (param for param in params if hasattr(param, "placements"))
    return any(
        param.device_mesh.size() == world and any(place.is_shard() for place in param.placements)
        for param in dtensors
    )


def _explain(wanted: Engine, used: Engine, who: str, *, prepares: bool) -> tuple[str | None, str]:
    """Return the usual cause, and a hint; `prepares`: whether the script uses an Accelerator."""
    if used in _SHARDING:
        return None, "request only one: remove --strategy, or the script's plugin or variable"
    if wanted is Engine.FSDP and is_forced_to_cpu():
        also = "" if who == _LAUNCH else ", and remove FSDP from the script"
        hint = f"use --strategy zero2, which also shards on a CPU{also}"
        return "accelerate shards with FSDP on GPUs only", hint
    if wanted is Engine.DEEPSPEED and who == _LAUNCH and prepares:
        cause = "the script probably sets cpu=True or use_cpu=True, or does not prepare the model"
        return cause, "remove it (--device cpu selects the CPU), and pass the model to prepare()"
    if wanted is Engine.DEEPSPEED and who != _LAUNCH and is_forced_to_cpu():
        cause = "the job was launched as plain DDP on CPUs, so accelerate ignores DeepSpeed"
        file = "--deepspeed-config FILE, or the script's argument --deepspeed FILE"
        return cause, f"pass the JSON to the launch: clusterrun submit {file}"
    hint = "wrap the model with accelerator.prepare(), fully_shard() or deepspeed.initialize()"
    return None, f"{hint}, or use --strategy ddp"


def is_forced_to_cpu() -> bool:
    """Return whether ACCELERATE_USE_CPU is set, parsed as accelerate does."""
    return _is_true("ACCELERATE_USE_CPU")


def engine_by_env() -> Engine | None:
    """Return the engine that accelerate's variables request; None if they request none."""
    return next((engine for engine, name in _SHARDING.items() if _is_true(name)), None)


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")
