"""The engine that spreads a training over the ranks: check that the one that was asked for runs.

The launch asks for one (CLUSTERRUN_ENGINE), and so may the script: by a plugin, or by a variable of
accelerate. On a CPU accelerate leaves both DeepSpeed and FSDP out and trains DDP without a word,
and a script under any launch may wrap nothing. A script that does more than plain DDP on its own
may do so.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from types import ModuleType
from typing import Any, Protocol

from clusterrun import runtime
from clusterrun.rank.emit import add_hint, rank, say
from clusterrun.rank.first_step import FirstStep


class Engine(str, Enum):
    """What makes one training of the ranks' models, if anything does."""

    NONE = "none"
    DDP = "ddp"
    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"

    @property
    def is_sharding(self) -> bool:
        """Whether it spreads the state over the ranks."""
        return self in (Engine.FSDP, Engine.DEEPSPEED)


_SPOKEN = {
    Engine.NONE: "a whole model in each rank",
    Engine.DDP: "plain DDP",
    Engine.FSDP: "FSDP",
    Engine.DEEPSPEED: "DeepSpeed",
}
_SWITCHES = {
    Engine.DEEPSPEED: "ACCELERATE_USE_DEEPSPEED",
    Engine.FSDP: "ACCELERATE_USE_FSDP",
}
_PLUGINS = {
    "deepspeed_plugin": Engine.DEEPSPEED,
    "deepspeed_plugins": Engine.DEEPSPEED,
    "fsdp_plugin": Engine.FSDP,
}
ONE_MODEL = "use --strategy ddp, or make one torch.nn.Module of all models"
_LAUNCH, _SCRIPT = "the launch", "the script itself"


class _World(Protocol):
    """What is needed of the world contract."""

    expected: int
    holds: bool

    @property
    def is_mine(self) -> bool: ...

    def break_off(
        self, message: str, *, cause: str | None = None, kind: str = "world", hint: str = ""
    ) -> None: ...


class EngineWatch:
    """The engines that were asked for, and those that were made in this rank."""

    def __init__(self, world: _World, env: Mapping[str, str], first_step: FirstStep) -> None:
        self._world, self._first_step = world, first_step
        named = env.get("CLUSTERRUN_ENGINE", "")
        self._launched = Engine(named) if named in {engine.value for engine in Engine} else None
        self._awaited: dict[Engine, str] = {}  # and who asked
        self._promised: set[Engine] = set()  # by accelerate, which makes them in `prepare`
        self._made: set[Engine] = set()
        if self._launched is not None:
            self._await(self._launched, _LAUNCH)

    def patches(self) -> dict[str, Callable[[ModuleType], None]]:
        """Return what to patch in which module, once it is imported."""
        watched = functools.partial(functools.partial, self._watch_class)
        return {
            "accelerate.accelerator": self._watch_accelerate,
            "accelerate.utils.dataclasses": self._watch_plugin,
            # Classes, not functions: other modules have copies of a function's name.
            "torch.nn.parallel.distributed": watched("DistributedDataParallel", Engine.DDP),
            "torch.distributed.fsdp.fully_sharded_data_parallel": watched(
                "FullyShardedDataParallel", Engine.FSDP
            ),
            "torch.distributed.fsdp._fully_shard._fsdp_state": watched("FSDPState", Engine.FSDP),
            "deepspeed.runtime.engine": watched("DeepSpeedEngine", Engine.DEEPSPEED),
        }

    def check_end(self) -> None:
        """Break off if the script ended well with DDP; warn if it trained nothing."""
        for engine in self._awaited.keys() - self._promised:
            who = self._awaited[engine]
            if Engine.DDP in self._made:
                self._break_off(engine, who, Engine.DDP)
            # No optimizer has stepped: an evaluation, or a training that was complete.
            say(f"{who} asked for {_SPOKEN[engine]}, and the script ended without it")

    def _await(self, engine: Engine, who: str) -> None:
        # Sharded over a world of one is not sharded.
        is_alone = engine is Engine.FSDP and self._world.expected == 1
        is_due = engine.is_sharding and engine not in self._made
        if is_due and self._world.holds and not is_alone:
            self._awaited.setdefault(engine, who)
            self._first_step.add(self._check_step)

    def _check_step(self, optimizer: Any) -> None:
        if self._awaited and self._world.is_mine:
            if Engine.FSDP in self._awaited and _is_sharded(optimizer, self._world.expected):
                self._note(Engine.FSDP)
            runs = Engine.DDP if Engine.DDP in self._made else Engine.NONE
            for engine, who in self._awaited.items():
                self._break_off(engine, who, runs)

    def _begun(self, engine: Engine) -> None:
        """Note that an engine is made; `status` shows the last that rank 0 reported."""
        self._note(engine)
        if not self._awaited:
            self._first_step.drop(self._check_step)

    def _note(self, engine: Engine) -> None:
        # Also called at a step, from where nothing may be dropped.
        self._awaited.pop(engine, None)
        if engine not in self._made and rank() == 0:
            runtime.emit("engine", engine=engine.value)
        self._made.add(engine)

    def _break_off(self, asked: Engine, who: str, runs: Engine) -> None:
        cause, hint = _why(asked, runs, who)
        message = f"{who} asked for {_SPOKEN[asked]}, and {_SPOKEN[runs]} would train instead"
        self._world.break_off(message, cause=cause, hint=hint, kind="engine")

    def _watch_class(self, name: str, engine: Engine, module: ModuleType) -> None:
        watched: Any = getattr(module, name, None)
        if watched is None:
            return
        original = watched.__init__

        @functools.wraps(original)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            # Before: DeepSpeed steps its optimizer once while it is made.
            if self._world.is_mine:
                # torch's composable DDP derives its state from FSDP's.
                is_replica = type(made).__name__ == "_ReplicateState"
                self._begun(Engine.DDP if is_replica else engine)
            original(made, *args, **kwargs)

        watched.__init__ = __init__

    def _watch_accelerate(self, module: ModuleType) -> None:
        accelerator: Any = module.Accelerator
        original = accelerator.__init__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            wish = self._wish(signature, (made, *args), kwargs)
            original(made, *args, **kwargs)
            if self._world.is_mine:
                self._check_accelerator(_used(made), wish)

        accelerator.__init__ = __init__
        accelerator.prepare = _explained(accelerator.prepare)

    def _wish(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Engine, str] | None:
        """Return what a call of Accelerator() asks for, and who: the Trainer passes plugins on."""
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None  # let accelerate itself refuse the call
        plugin = next((_PLUGINS[name] for name in _PLUGINS if given.get(name)), None)
        switch = next((e for e, name in _SWITCHES.items() if _is_true(name)), None)
        engine = plugin or switch
        if engine is None:
            return None
        if engine is self._launched:
            return engine, _LAUNCH
        return engine, _SCRIPT if plugin else f"{_SWITCHES[engine]}=true"

    def _check_accelerator(self, used: Engine | None, wish: tuple[Engine, str] | None) -> None:
        if used is None:
            return  # such as Megatron or a TPU
        self._promised.add(used)
        if wish is not None:
            self._await(*wish)
        for engine, who in self._awaited.items():
            if engine is not used:
                self._break_off(engine, who, used)

    def _watch_plugin(self, module: ModuleType) -> None:
        """Say how to put it right where accelerate finds a strategy beside the script's JSON."""
        plugin: Any = getattr(module, "DeepSpeedPlugin", None)
        original = getattr(plugin, "_deepspeed_config_checks", None)
        if original is None:
            return

        @functools.wraps(original)
        def checks(made: Any) -> Any:
            try:
                return original(made)
            except ValueError:
                message = "the script has a DeepSpeed JSON of its own, beside that of the launch"
                hint = "give the launch that file in place of --strategy: --deepspeed-config FILE"
                self._world.break_off(message, hint=hint, kind="engine")
                raise

        plugin._deepspeed_config_checks = checks


def _explained(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Add a hint where an engine that shards refuses several models."""

    @functools.wraps(prepare)
    def explained(made: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return prepare(made, *args, **kwargs)
        except Exception as error:
            torch: Any = sys.modules["torch"]
            used = _used(made)
            models = sum(isinstance(given, torch.nn.Module) for given in args)
            if used is not None and used.is_sharding and models > 1:
                add_hint(error, f"accelerate trains one model with {_SPOKEN[used]}: {ONE_MODEL}")
            raise

    return explained


def _is_sharded(optimizer: Any, world: int) -> bool:
    """Whether the script itself has spread parameters over all ranks, as DTensors of one mesh."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    spread = (param for param in params if hasattr(param, "placements"))
    return any(
        param.device_mesh.size() == world and any(place.is_shard() for place in param.placements)
        for param in spread
    )


def _used(accelerator: Any) -> Engine | None:
    kind = str(accelerator.distributed_type.value)
    if kind.startswith("MULTI_"):
        return Engine.DDP
    named = {"NO": Engine.NONE, "FSDP": Engine.FSDP, "DEEPSPEED": Engine.DEEPSPEED}
    return named.get(kind)


def _why(asked: Engine, runs: Engine, who: str) -> tuple[str | None, str]:
    """Return the usual cause, and the way out."""
    if runs.is_sharding:
        return None, "ask for one of them: drop --strategy, or what the script says itself"
    if asked is Engine.FSDP and is_forced_to_cpu():
        hint = "use --strategy zero2, which shards on a CPU too, and leave FSDP out of the script"
        return "accelerate shards with FSDP on GPUs only", hint
    if asked is Engine.DEEPSPEED and who == _LAUNCH and "accelerate" in sys.modules:
        cause = "usually cpu=True or use_cpu=True in the script, or a model that was not prepared"
        return cause, "leave it out (--device cpu chooses the CPU), and pass the model to prepare()"
    if asked is Engine.DEEPSPEED and is_forced_to_cpu():
        cause = "the launch is plain DDP on a CPU, where accelerate leaves DeepSpeed out"
        file = "--deepspeed-config FILE, or FILE as the script's own argument --deepspeed"
        return cause, f"name its JSON to the launch: clusterrun submit {file}"
    hint = "wrap the model: accelerator.prepare(), fully_shard() or deepspeed.initialize()"
    return None, f"{hint}; or use --strategy ddp"


def is_forced_to_cpu() -> bool:
    """Whether ACCELERATE_USE_CPU is set, read as accelerate reads it."""
    return _is_true("ACCELERATE_USE_CPU")


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")
