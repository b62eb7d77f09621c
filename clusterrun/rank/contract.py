"""The world contract: check in each rank that the training has the world the job asked for.

Import hooks patch `torch.distributed` and `accelerate.state`; a script that does not import them
is not touched.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from clusterrun import runtime
from clusterrun.errors import WorldContractError
from clusterrun.rank.build_locks import watch_locks
from clusterrun.rank.emit import say
from clusterrun.rank.engine import EngineWatch, is_forced_to_cpu

PUBLISH_TIMEOUT_S = 60
SWITCH_OFF = "--no-world-contract switches this check off"
OnBroken = Callable[[WorldContractError, str], NoReturn]


class Contract:
    """The world that this rank must join, and whether it has."""

    def __init__(self, env: Mapping[str, str], on_broken: OnBroken) -> None:
        self.expected = int(env.get("CLUSTERRUN_WORLD_SIZE", "0"))
        self.local = int(env.get("CLUSTERRUN_LOCAL_WORLD_SIZE", "0"))
        self.holds = env.get("CLUSTERRUN_WORLD_CONTRACT", "0") == "1" and self.expected > 0
        self.timeout_s = int(env.get("CLUSTERRUN_TIMEOUT_S", "0") or "0")
        self.backend = env.get("CLUSTERRUN_BACKEND", "")
        self.had_group = False
        self.gloo_groups: list[Any] = []
        self._on_broken = on_broken
        self._pid = os.getpid()
        self.engine = EngineWatch(self, env)

    @property
    def is_mine(self) -> bool:
        """Whether this is the rank's own process, not one that it forked."""
        return os.getpid() == self._pid

    def break_off(
        self, message: str, *, cause: str | None = None, kind: str = "world", hint: str = ""
    ) -> None:
        """End the rank with a message, unless the contract is switched off."""
        if self.holds:
            hints = (hint, SWITCH_OFF) if hint else (SWITCH_OFF,)
            self._on_broken(WorldContractError(message, cause=cause, hint=hints), kind)

    def check_environment(self, env: Mapping[str, str]) -> None:
        """Check WORLD_SIZE, LOCAL_WORLD_SIZE and RANK against the job."""
        if self.expected == 1 and "WORLD_SIZE" not in env:
            return  # one process needs no launcher variables
        if "WORLD_SIZE" not in env:
            self.break_off(
                f"this process is a world of 1, the job asked for {self.expected}",
                cause="the launcher set no WORLD_SIZE: it started this process on its own",
            )
        # This node's number first: if it is right, the fault is on another node.
        self._check_count(env, "LOCAL_WORLD_SIZE", self.local, "on this node", "world")
        self._check_count(env, "WORLD_SIZE", self.expected, "in all", "world_elsewhere")
        if not env.get("RANK", "").isdigit() or int(env["RANK"]) >= self.expected:
            self.break_off(f"RANK={env.get('RANK', '(not set)')} is no rank of {self.expected}")

    def _check_count(
        self, env: Mapping[str, str], name: str, expected: int, where: str, kind: str
    ) -> None:
        value = env.get(name, "")
        if value != str(expected):
            self.break_off(
                f"the launcher made {value or 'no'} ranks {where}, the job asked for {expected}",
                cause=f"{name} is {value or 'not set'} on {_node(env)}",
                kind=kind,
            )

    def check_end(self) -> None:
        """Break off if the rank ended well but never joined the others, or trained otherwise."""
        distributed = sys.modules.get("torch.distributed")
        is_joined = distributed is not None and distributed.is_initialized()
        if self.expected > 1 and not self.had_group and not is_joined:
            cause = "the script ended well, but no process group was ever initialised in this rank"
            self.break_off(f"this rank never joined the world of {self.expected}", cause=cause)
        self.engine.check_end()

    def check_size(self, size: int, what: str, cause: str | None = None) -> None:
        """Check the size of a world that was made against the job."""
        if size != self.expected and self.expected:
            self.break_off(
                f"{what} has a world of {size}, the job asked for {self.expected}", cause=cause
            )


def install(contract: Contract) -> None:
    """Patch the modules that are watched: now if they are imported, else on import."""
    patches: dict[str, Callable[[ModuleType], None]] = {
        "torch.distributed.distributed_c10d": functools.partial(_watch_torch, contract),
        "accelerate.state": functools.partial(_watch_accelerate, contract),
        "torch.utils.file_baton": watch_locks,
        **contract.engine.patches(),
    }
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Hook(patches))


class _Hook:
    """Finds a watched module as Python does, and patches it right after it was executed."""

    def __init__(self, patches: dict[str, Callable[[ModuleType], None]]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        patch = self._patches.get(name)
        if patch is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                _patch_after(spec.loader, patch)
                return spec
        return None


def _patch_after(loader: Any, patch: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        patch(module)

    loader.exec_module = exec_module


def _watch_torch(contract: Contract, module: ModuleType) -> None:
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if not contract.is_mine:
            return original(*args, **kwargs)
        if contract.expected == 1 and "RANK" not in os.environ:
            _be_alone()
        if contract.timeout_s > 0:
            from clusterrun.rank.pg_timeout import with_timeout  # few ranks need it

            args, kwargs = with_timeout(original, args, kwargs, contract.timeout_s)
        result = original(*args, **kwargs)
        _group_made(contract, module)
        return result

    # `torch.distributed` has a copy of the name: made from the patched one if it is imported after
    # its submodule, else replaced here.
    module.init_process_group = init_process_group  # type: ignore[attr-defined]
    package = sys.modules.get("torch.distributed")
    if package is not None and getattr(package, "init_process_group", None) is original:
        package.init_process_group = init_process_group  # type: ignore[attr-defined]


def _be_alone() -> None:
    """Set the variables that a launcher would set, for a script that joins a world of one."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, value)


def _group_made(contract: Contract, module: ModuleType) -> None:
    size = module.get_world_size()
    contract.check_size(size, "torch.distributed")
    contract.had_group = True
    if str(module.get_backend()) == "gloo":
        # Never free the group: its destructor holds the GIL and waits for a thread that may need
        # it. Ranks that freed a model after `destroy_process_group` hung (torch 2.13).
        contract.gloo_groups.append(module._get_default_group())
    try:
        _prove_distinct(contract, module, size)
    except Exception as error:  # noqa: BLE001 - the proof must not end a training that works
        say(f"could not prove that the ranks are distinct: {error}")


def _prove_distinct(contract: Contract, module: ModuleType, size: int) -> None:
    """Publish the place of this rank; rank 0 reads all in one request and compares them."""
    from datetime import timedelta

    store = module._get_default_store()
    rank = module.get_rank()
    backend = str(module.get_backend())
    store.set(f"clusterrun/world/{rank}", "\t".join(_place(backend)))
    if rank != 0:
        return
    keys = [f"clusterrun/world/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=PUBLISH_TIMEOUT_S))
    values = store.multi_get(keys) if store.has_extended_api() else [store.get(k) for k in keys]
    places = [bytes(value).decode().split("\t") for value in values]
    _compare(contract, places)
    hosts = list(dict.fromkeys(place[0] for place in places))
    devices = {place[2].split(" ", 1)[0] for place in places}
    device = devices.pop() if len(devices) == 1 else "mixed"
    runtime.emit("world_ready", world_size=size, hosts=hosts, backend=backend, device=device)


def _place(backend: str) -> tuple[str, str, str]:
    return _node(os.environ), os.environ.get("LOCAL_RANK", "0"), _device(backend)


def _node(env: Mapping[str, str]) -> str:
    return env.get("CLUSTERRUN_NODE") or os.uname().nodename


def _device(backend: str) -> str:
    """Identify the GPU of this rank by its local rank; `cpu` without NCCL."""
    if "nccl" not in backend:
        return "cpu"
    import torch

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        return f"cuda none-{runtime.rank()}"  # torch raises a better error when the rank uses it
    properties = torch.cuda.get_device_properties(local_rank)
    fallback = f"{os.uname().nodename}/{os.environ.get('CUDA_VISIBLE_DEVICES', '')}/{local_rank}"
    return f"cuda {getattr(properties, 'uuid', fallback)}"


def _compare(contract: Contract, places: list[list[str]]) -> None:
    """Break off if two ranks have the same place or GPU."""
    seats = Counter((host, local) for host, local, _ in places)
    gpus = Counter(device for _, _, device in places if device.startswith("cuda "))
    for (host, local), count in seats.items():
        if count > 1:
            contract.break_off(f"{count} ranks say that they are local rank {local} of {host}")
    for gpu, count in gpus.items():
        if count > 1:
            ranks = [rank for rank, place in enumerate(places) if place[2] == gpu]
            contract.break_off(f"ranks {ranks} share one GPU ({gpu.split(' ', 1)[1]})")


def _watch_accelerate(contract: Contract, module: ModuleType) -> None:
    original = module.PartialState.__init__

    @functools.wraps(original)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        mine = contract.is_mine and not self._shared_state
        if mine and contract.backend and kwargs.get("backend") is None:
            kwargs["backend"] = contract.backend  # the Trainer passes None unless one was chosen
        # Accelerator() reads ACCELERATE_USE_CPU, a bare PartialState() does not.
        original(self, cpu or (mine and is_forced_to_cpu()), **kwargs)
        if mine:
            contract.check_size(self.num_processes, "accelerate", _why_alone(self.num_processes))

    module.PartialState.__init__ = __init__


def _why_alone(size: int) -> str | None:
    """Return the usual reason why accelerate made a world of one."""
    if size != 1:
        return None
    import torch

    if is_forced_to_cpu() or torch.cuda.is_available():
        return "accelerate chose no distributed backend, so every rank would train a model alone"
    return (
        "no GPU is usable here and ACCELERATE_USE_CPU is not true, so accelerate would train a"
        " model in every rank alone (use_cpu in its configuration is not enough)"
    )
