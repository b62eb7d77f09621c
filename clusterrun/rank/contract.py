"""The world contract: check in each rank that the training has the world that the job requested.

Check when the rank starts, when it joins a process group, when an optimizer first steps, and when
the rank ends. Import hooks patch `torch.distributed` and `accelerate.state`; a script that does not
import them is unaffected.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from clusterrun import runtime
from clusterrun.errors import ClusterrunError
from clusterrun.rank import trainers
from clusterrun.rank.emit import answer_asks, own_rank, rank, say, say_once
from clusterrun.rank.engine import (
    OPTIMIZER_MODULE,
    EngineWatch,
    StepChecks,
    engine_by_env,
    is_forced_to_cpu,
)
from clusterrun.rank.import_hooks import Patch, pass_on, patch_on_import
from clusterrun.shared.files import write_whole
from clusterrun.shared.given import STORE_PORT

PUBLISH_TIMEOUT_S = 60
SWITCH_OFF = "use --set launch.world_contract=false to switch this check off"
JOIN = (
    "call torch.distributed.init_process_group() or create an accelerate.Accelerator() before the"
    " training, and wrap the model with DDP or prepare()"
)
DO_NOT_SPAWN = (
    "call the training function directly instead of through spawn(), with"
    " int(os.environ['LOCAL_RANK']) as its index, and call init_process_group() without rank and"
    " world_size"
)
WHY_ALONE = (
    "accelerate would train a separate model in each rank: usually no GPU is usable here and"
    " ACCELERATE_USE_CPU is not true (use_cpu in its configuration is not enough)"
)
OnBroken = Callable[[ClusterrunError, str], NoReturn]  # the error, and the value of its Cause


class Contract:
    """The world that this rank must join; for `is_child`, the world of the rank that started it."""

    def __init__(
        self, env: Mapping[str, str], on_broken: OnBroken, *, is_child: bool = False
    ) -> None:
        self.expected = int(env.get("CLUSTERRUN_WORLD_SIZE", "0"))  # ranks of the job
        self.local = int(env.get("CLUSTERRUN_LOCAL_WORLD_SIZE", "0"))  # on this node
        self.is_enforced = env.get("CLUSTERRUN_WORLD_CONTRACT", "0") == "1" and self.expected > 0
        self.is_checked = self.is_enforced and self.expected > 1  # one rank need not join
        self.timeout_s = int(env.get("CLUSTERRUN_TIMEOUT_S", "0") or "0")
        self.backend = env.get("CLUSTERRUN_BACKEND", "")
        self.had_group = False  # this process has joined its world
        self.waits_since = 0.0  # by the monotonic clock
        self.gloo_groups: list[Any] = []  # never freed
        self.when_joined: list[Callable[[], None]] = []
        self._on_broken = on_broken
        self._pid = 0 if is_child else os.getpid()  # 0: a child is never the rank
        self._slot = own_rank() % max(1, self.local)  # the rank's place on the page
        self._page = runtime.control_page(self._slot)  # made by the agent; None outside a run
        self.step_checks = StepChecks()
        self.engine = EngineWatch(self, env, self.step_checks)
        # Without the page, a child cannot know whether its rank has joined: it checks no step.
        if self.is_checked and (self._page or not is_child):
            self.step_checks.add(self.check_step)

    @property
    def is_mine(self) -> bool:
        """Return whether this process is the rank, not one that the rank started."""
        return os.getpid() == self._pid

    @property
    def has_joined(self) -> bool:
        """Return whether the rank, or a process that acts for it, has joined its world."""
        page = self._page
        return self.had_group or (page is not None and page.has_joined(self._slot))

    def publish_joined(self) -> None:
        """Publish that the rank has joined its world, for the processes that it starts."""
        self.had_group = True
        self._call_when_joined()
        if self._page is not None:
            self._page.joined(self._slot)

    def publish_stack_signal(self, signum: int) -> None:
        """Publish that the rank's handler of a signal only prints stacks, and saves nothing."""
        if self._page is not None and self.is_mine and 0 < signum < 64:  # one bit each, of 64
            self._page.set_does_not_save_on(self._slot, signum)

    def _call_when_joined(self) -> None:
        while self.when_joined:
            self.when_joined.pop()()

    def break_off(
        self, message: str, *, cause: str | None = None, kind: str = "world", hint: str = ""
    ) -> None:
        """End the rank with a message and the Cause `kind`, unless the contract is switched off."""
        if self.is_enforced:
            hints = (hint, SWITCH_OFF) if hint else (SWITCH_OFF,)
            self._on_broken(ClusterrunError(message, cause=cause, hint=hints), kind)

    def check_environment(self, env: Mapping[str, str]) -> None:
        """Check WORLD_SIZE, LOCAL_WORLD_SIZE and RANK against the job."""
        if "WORLD_SIZE" not in env:
            text = f"this process is a world of 1, but the job requested {self.expected}"
            cause = "the launcher did not set WORLD_SIZE: it started only this process"
            self.break_off(text, cause=cause)
        for name, expected, where, kind in (
            # This node first: if its number is right, the fault is on another node.
            ("LOCAL_WORLD_SIZE", self.local, "on this node", "world"),
            ("WORLD_SIZE", self.expected, "in total", "world_elsewhere"),
        ):
            if (value := env.get(name, "")) != str(expected):
                ranks = "1 rank" if value == "1" else f"{value or 0} ranks"
                text = f"the launcher started {ranks} {where}, but the job requested {expected}"
                cause = f"{name} is {value or 'not set'} on {_node(env)}"
                self.break_off(text, cause=cause, kind=kind)
        if not env.get("RANK", "").isdigit() or int(env["RANK"]) >= self.expected:
            rank = env.get("RANK", "(not set)")
            self.break_off(f"RANK={rank} is not valid in a world of {self.expected}")

    def check_step(self, _: object = None) -> None:
        """Break off if the rank, or a process that it started, trains a separate model."""
        if self.has_joined:
            return
        if self.is_mine and (size := _group_size()):  # it joined by a call that is not patched
            self.check_size(size, "torch.distributed")
            self.publish_joined()
        elif self.is_mine:
            message = f"this rank trains alone, but the job requested a world of {self.expected}"
            cause = "an optimizer stepped before the rank joined a process group"
            self.break_off(message, cause=cause, hint=JOIN)
        else:
            self.break_off_child()

    def break_off_child(self) -> None:
        """End the rank because a process that it started trains separately."""
        apart = f"separately from the job's world of {self.expected}"
        cause = "the script starts ranks itself, but clusterrun already runs it once per rank"
        message = f"this rank started a process that trains {apart}"
        self.break_off(message, cause=cause, hint=DO_NOT_SPAWN)

    def check_end(self) -> None:
        """Break off if the rank completed but never joined, or trained with another engine."""
        self._call_when_joined()  # a world of one need not join
        if self.expected > 1 and not self.has_joined and not _group_size():
            cause = "the script completed, but no process group was initialised in this rank"
            message = f"this rank never joined the world of {self.expected}"
            self.break_off(message, cause=cause, hint=JOIN)
        self.engine.check_end()

    def check_size(self, size: int | None, what: str, cause: str | None = None) -> None:
        """Check the size of a world against the job; None if only torch knows it."""
        if size not in (None, self.expected) and self.expected:
            message = f"{what} has a world of {size}, but the job requested {self.expected}"
            self.break_off(message, cause=cause)

    def patches(self) -> dict[str, Patch]:
        """Return the patch of each module, for every process that may train."""
        return {
            "torch.distributed.distributed_c10d": functools.partial(_watch_torch, self),
            "torch.distributed.rendezvous": _host_own_stores,
            OPTIMIZER_MODULE: self.step_checks.listen,
        }


def _group_size() -> int:
    """Return the size of the process group of this process; 0 if it has none."""
    distributed: Any = sys.modules.get("torch.distributed")
    has_group = hasattr(distributed, "is_initialized") and distributed.is_initialized()
    return int(distributed.get_world_size()) if has_group else 0


def install(contract: Contract) -> None:
    """Patch faulthandler, and the watched modules: now if they are imported, else on import."""
    patches = contract.patches()
    patches |= {
        "accelerate.state": functools.partial(_watch_accelerate, contract),
        "torch.distributed.rpc": functools.partial(_watch_rpc, contract),
        "torch.utils.file_baton": watch_locks,
        **trainers.PATCHES,
        **contract.engine.patches(),
    }
    if contract.is_checked:
        patches["multiprocessing.spawn"] = pass_on
    patch_on_import(patches)
    register = faulthandler.register

    # A handler of faulthandler prints stacks: the rank saves nothing on that signal.
    def register_dump(signum: int, *args: Any, **kwargs: Any) -> None:
        register(signum, *args, **kwargs)
        contract.publish_stack_signal(signum)

    faulthandler.register = register_dump


def _watch_torch(contract: Contract, module: ModuleType) -> None:
    """Patch init_process_group(): check its call, set the job's timeout, check the group."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        call = _Call(original, args, kwargs)
        if not _check_join(contract, call):
            return original(*args, **kwargs)
        if contract.timeout_s > 0:
            call.set_timeout(contract.timeout_s)
        contract.waits_since = time.monotonic()
        result = original(*call.args, **call.kwargs)
        _check_group(contract, module)
        return result

    # Other modules have copies of the name: `torch.distributed`, and in a fork what the forge has
    # imported. Those that are imported later copy the patched function.
    for holder in (module, *sys.modules.values()):
        if getattr(holder, "__dict__", {}).get("init_process_group") is original:
            holder.__dict__["init_process_group"] = init_process_group


def _host_own_stores(module: ModuleType) -> None:
    """Have rank 0 host each store that the script opens on a port of its own.

    torch expects that the launcher hosts all stores if TORCHELASTIC_USE_AGENT_STORE is set.
    """
    original: Any = getattr(module, "_create_c10d_store", None)
    if original is None:
        return
    names = {**vars(module), "_torchelastic_use_agent_store": lambda: False}
    # A copy of the function, for which the launcher hosts no store.
    host_store = FunctionType(original.__code__, names, original.__name__, original.__defaults__)

    @functools.wraps(original)
    def create(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        is_of_launcher = str(port) == os.environ.get(STORE_PORT, str(port))
        return (original if is_of_launcher else host_store)(hostname, port, *args, **kwargs)

    vars(module)["_create_c10d_store"] = create


def _watch_rpc(contract: Contract, module: Any) -> None:
    """Patch init_rpc(): ranks that meet only by RPC have also joined their world."""
    original = getattr(module, "init_rpc", None)
    if original is None:  # torch was built without RPC
        return

    @functools.wraps(original)
    def init_rpc(*args: Any, **kwargs: Any) -> None:
        if not contract.is_mine or contract.has_joined:
            original(*args, **kwargs)
            return
        size = _Call(original, args, kwargs).size
        contract.check_size(size, "init_rpc()")
        contract.waits_since = time.monotonic()
        original(*args, **kwargs)
        contract.publish_joined()
        contract.step_checks.drop(contract.check_step)
        if own_rank() == 0:
            waited_s = round(time.monotonic() - contract.waits_since, 6)
            runtime.emit("world_ready", world_size=size, backend="rpc", waited_s=waited_s)

    module.init_rpc = init_rpc


class _Call:
    """A call that joins a world: the rank and world size that it requests."""

    def __init__(self, original: Any, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        self._bound: inspect.BoundArguments | None = None
        with contextlib.suppress(TypeError):  # let torch itself refuse the call
            self._bound = inspect.signature(original).bind(*args, **kwargs)
        self._given: Mapping[str, Any] = self._bound.arguments if self._bound else {}
        self.rank = self._number("rank", "RANK")
        self.size = self._number("world_size", "WORLD_SIZE")

    def _number(self, name: str, variable: str) -> int | None:
        """Return a number from the call or the environment; None if only torch knows it."""
        given = self._given.get(name)
        if isinstance(given, int) and given >= 0:  # -1 stands for "not given"
            return given
        text = os.environ.get(variable, "")
        is_in_url = "?" in str(self._given.get("init_method"))  # as tcp://HOST:PORT?rank=1
        return int(text) if text.isdigit() and not is_in_url else None

    def set_timeout(self, timeout_s: int) -> None:
        """Replace the call's timeout by the job's; rank 0 reports what was replaced."""
        if self._bound is not None:
            timeout = timedelta(seconds=timeout_s)
            given = self._given.get("timeout")
            if given not in (None, timeout) and rank() == 0:
                say_once(f"--timeout {timeout_s} s replaces the script's {given}")
            self._bound.arguments["timeout"] = timeout
            self.args, self.kwargs = self._bound.args, self._bound.kwargs


def _check_join(contract: Contract, call: _Call) -> bool:
    """Break off if a join could never finish; return whether this process joins as its rank."""
    if contract.is_mine:
        contract.check_size(call.size, "init_process_group()")
        return True
    if not contract.is_checked or contract.has_joined:
        return False
    if (call.rank, call.size) == (own_rank(), contract.expected):
        return True
    if call.size is not None and _is_mp_spawned():
        contract.break_off_child()
    return False  # such as an inference server, which may join any group


def _is_mp_spawned() -> bool:
    """Return whether torch.multiprocessing.spawn started this process, directly or not."""
    multiprocessing: Any = sys.modules.get("multiprocessing")
    process = multiprocessing.current_process() if multiprocessing else None
    target = getattr(process, "_target", None)
    return getattr(target, "__module__", "") == "torch.multiprocessing.spawn"


def _check_group(contract: Contract, module: ModuleType) -> None:
    """Check the group that this rank has joined, and publish that it has."""
    size = module.get_world_size()
    contract.check_size(size, "torch.distributed")
    contract.publish_joined()
    contract.step_checks.drop(contract.check_step)  # it has joined: nothing to check there
    answer_asks()  # from now on, the agent can ask for this rank's stacks
    if contract.is_mine and str(module.get_backend()) == "gloo":
        # Never free the group: its destructor holds the GIL and waits for a thread that may need
        # the GIL. Ranks that freed a model after `destroy_process_group` hung (torch 2.13).
        contract.gloo_groups.append(module._get_default_group())
    try:
        _check_distinct(contract, module, size)
    except Exception as error:  # noqa: BLE001 - the check must not end a working training
        say(f"could not check that the ranks are distinct: {error}")


def _check_distinct(contract: Contract, module: ModuleType, size: int) -> None:
    """Publish the place of this rank; rank 0 compares those of all ranks, and reports the world."""
    store = module._get_default_store()
    rank = module.get_rank()
    backend = str(module.get_backend())
    place = (_node(os.environ), os.environ.get("LOCAL_RANK", "0"), _device(backend))
    store.set(f"clusterrun/world/{rank}", "\t".join(place))
    if rank != 0:
        return
    keys = [f"clusterrun/world/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=PUBLISH_TIMEOUT_S))
    values = store.multi_get(keys) if store.has_extended_api() else [store.get(k) for k in keys]
    places = [bytes(value).decode().split("\t") for value in values]
    faults = Counter(f"have LOCAL_RANK={local} on {host}" for host, local, _ in places)
    kinds_and_ids = [device.partition(" ") for *_, device in places]
    faults.update(f"share one GPU ({gpu})" for _, _, gpu in kinds_and_ids if gpu)
    for fault, count in faults.items():
        if count > 1:  # it is a fault only of two or more ranks
            contract.break_off(f"{count} ranks {fault}")
    hosts = list(dict.fromkeys(place[0] for place in places))
    kinds = {kind for kind, _, _ in kinds_and_ids}
    device = kinds.pop() if len(kinds) == 1 else "mixed"
    about = {"world_size": size, "hosts": hosts, "backend": backend, "device": device}
    runtime.emit("world_ready", **about, waited_s=round(time.monotonic() - contract.waits_since, 6))


def _node(env: Mapping[str, str]) -> str:
    return env.get("CLUSTERRUN_NODE") or os.uname().nodename


def _device(backend: str) -> str:
    """Return "cuda" and an id of the GPU with this rank's local rank, or "cpu" without NCCL."""
    if "nccl" not in backend:
        return "cpu"
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        return f"cuda none-{runtime.rank()}"  # torch raises a better error when the rank uses it
    place = f"{os.uname().nodename}/{os.environ.get('CUDA_VISIBLE_DEVICES', '')}/{local_rank}"
    return f"cuda {getattr(torch.cuda.get_device_properties(local_rank), 'uuid', place)}"


def _watch_accelerate(contract: Contract, module: ModuleType) -> None:
    """Patch PartialState: set the job's backend and device, and check the world that it finds."""
    original = module.PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        is_first = contract.is_mine and not self._shared_state  # later ones share its state
        if is_first and contract.backend and kwargs.get("backend") is None:
            kwargs["backend"] = contract.backend  # the Trainer passes None by default
        # Accelerator() reads ACCELERATE_USE_CPU, a bare PartialState() does not.
        cpu = cpu or (is_first and is_forced_to_cpu())
        needs_no_group = is_first and contract.expected == 1 and (cpu or engine_by_env() is None)
        hidden: dict[str, str] = {}
        if needs_no_group and not _group_size():  # with LOCAL_RANK, accelerate would make one
            hidden = {"LOCAL_RANK": os.environ.pop("LOCAL_RANK", "0")}
        try:
            original(self, cpu, **kwargs)
        finally:
            os.environ.update(hidden)
        if is_first:
            cause = WHY_ALONE if self.num_processes == 1 else None
            contract.check_size(self.num_processes, "accelerate", cause)

    module.PartialState.__init__ = __init__


def watch_locks(module: ModuleType) -> None:
    """Have torch's FileBaton note its lock in the spool: the agent removes it if the rank dies."""
    baton: Any = getattr(module, "FileBaton", None)
    acquire, release = getattr(baton, "try_acquire", None), getattr(baton, "release", None)
    if acquire is None or release is None:
        return
    note = Path(os.environ.get("CLUSTERRUN_SPOOL", ""), f"rank_{rank()}.lock")

    @functools.wraps(acquire)
    def try_acquire_and_note(self: Any) -> Any:
        is_acquired = acquire(self)
        if is_acquired:
            with contextlib.suppress(OSError):
                write_whole(note, os.fsencode(os.path.abspath(self.lock_file_path)))
        return is_acquired

    @functools.wraps(release)
    def release_and_forget(self: Any) -> Any:
        result = release(self)
        with contextlib.suppress(OSError):
            note.unlink()
        return result

    baton.try_acquire, baton.release = try_acquire_and_note, release_and_forget
