"""The pitfalls: an id, the reason, the fix, and how each is found in a script.

A rule is silent if it is unsure. A finding that is false costs more trust than a missed one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from clusterrun.linting.arguments import refusal
from clusterrun.linting.source import (
    Script,
    constant,
    has_unknown_arguments,
    is_main_guard,
    keyword,
    text_of,
)

DDP: Final = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
LOADER: Final = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
DEVICE_COUNT: Final = "torch.cuda.device_count"
INIT: Final = "torch.distributed.init_process_group"
COLLECTIVES: Final = tuple(
    f"torch.distributed.{name}"
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
        *("all_to_all", "barrier", "broadcast", "broadcast_object_list", "gather"),
        *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "scatter"),
    )
)
# What a script may import if the rest of the training is to be seen in it.
_KNOWN: Final = {
    *("__future__", "abc", "argparse", "bisect", "collections", "contextlib", "copy", "csv"),
    *("dataclasses", "datetime", "enum", "functools", "gc", "glob", "gzip", "hashlib", "io"),
    *("itertools", "json", "logging", "math", "multiprocessing", "operator", "os", "pathlib"),
    *("pickle", "pprint", "random", "re", "shutil", "signal", "socket", "statistics", "string"),
    *("struct", "subprocess", "sys", "tempfile", "textwrap", "threading", "time", "traceback"),
    *("types", "typing", "typing_extensions", "urllib", "uuid", "warnings", "zipfile"),
    *("torch", "torchvision", "torchaudio", "numpy", "PIL", "tqdm", "pandas", "sklearn", "scipy"),
    *("matplotlib", "yaml", "datasets", "tokenizers", "einops", "rich", "psutil", "cv2", "wandb"),
    *("tensorboard", "tensorboardX", "evaluate", "safetensors", "tiktoken", "timm"),
}
_LAUNCHERS = re.compile(
    r"\b(?:torchrun|accelerate launch|torch\.distributed\.(?:run|launch)|deepspeed .*\.py)\b"
)
_ONE_MACHINE = re.compile(r"/(?:tmp|var/tmp|dev/shm)/")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}|[0-9a-f]{40}|wandb_v\d_\w{30,}")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the job gives the script; `cpus_per_node` is 0 if it is not known.

    `lacks_bf16`: the GPU type is named and has no bf16 units. `is_sharded`: the strategy splits
    the model over ranks, so that all ranks save. `args` are the script's arguments, None if
    they are not known; `env` are the variables that the user sets for the job.
    """

    nodes: int = 2
    ranks_per_node: int = 2
    cpus_per_node: int = 0
    has_gpus: bool = True
    lacks_bf16: bool = False
    is_sharded: bool = False
    args: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node


Found = tuple[ast.AST | None, str]
"""Where, and what; None stands for the job's variables."""
Look = Callable[[Script, Launch], Iterator[Found]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A pitfall: why it harms, what to do, and how it is found."""

    id: str
    reason: str
    fix: str
    look: Look


RULES: Final[dict[str, Rule]] = {}


def _rule(name: str, reason: str, fix: str) -> Callable[[Look], Look]:
    def register(look: Look) -> Look:
        RULES[name] = Rule(id=name, reason=reason, fix=fix, look=look)
        return look

    return register


# The world


@_rule(
    "never-joins",
    "the script trains, but nothing in it joins the ranks: each would train a model of its own",
    "wrap the model in DistributedDataParallel after init_process_group(), or use accelerate",
)
def _never_joins(script: Script, launch: Launch) -> Iterator[Found]:
    text = "\n".join(script.lines)
    if launch.world_size < 2 or not is_closed(script) or "distributed" in text.lower():
        return
    if any(word in text for word in ("exec(", "import_module", "__import__", "device_mesh")):
        return
    for call in script.calls(".backward"):
        if _loops_around(script, call):
            yield call, "the training loop is here"
            return


@_rule(
    "spawns-ranks",
    "each rank that clusterrun starts would start ranks of its own",
    "call the function once, with RANK, LOCAL_RANK and WORLD_SIZE from the environment",
)
def _spawns(script: Script, launch: Launch) -> Iterator[Found]:
    spawn = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")
    if not any(script.calls(INIT)):
        return
    for call in script.calls(*spawn):
        if not is_conditional(script, call) and constant(keyword(call, "nprocs")) != 1:
            yield call, "mp.spawn starts the ranks"


@_rule(
    "starts-a-launcher",
    "clusterrun already starts the ranks: each would start the launcher once more",
    "submit the script that trains",
)
def _starts_launcher(script: Script, launch: Launch) -> Iterator[Found]:
    runs = ("os.system", "subprocess.run", "subprocess.call", "subprocess.check_call")
    for call in script.calls(*runs, "subprocess.Popen", "subprocess.check_output"):
        for node in ast.walk(call.args[0]) if call.args else ():
            if found := _LAUNCHERS.search(text_of(node)):
                yield call, f"the script runs {found[0]}"
                break


@_rule(
    "fixed-address",
    "on several nodes, each node would wait for itself or form a world of its own",
    "remove it: clusterrun sets MASTER_ADDR to the first node",
)
def _fixed_address(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.nodes < 2:
        return
    for name, value, node in _unconditional_settings(script):
        if name == "MASTER_ADDR" and _LOOPBACK.fullmatch(text_of(value)):
            yield node, f"MASTER_ADDR is set to {text_of(value)}"
    for call in script.calls(INIT):
        method = text_of(keyword(call, "init_method"))
        is_loopback = _LOOPBACK.match(method.removeprefix("tcp://"))
        if method.startswith("tcp://") and is_loopback and not is_conditional(script, call):
            yield call, f"the ranks meet at {method}"


@_rule(
    "fixed-port",
    "two jobs on one node would use the same port",
    "remove it: clusterrun chooses a free port for each job",
)
def _fixed_port(script: Script, launch: Launch) -> Iterator[Found]:
    for name, value, node in _unconditional_settings(script):
        number = constant(value)
        if isinstance(value, ast.Call) and script.name(value.func) == "str" and value.args:
            number = constant(value.args[0])
        if name == "MASTER_PORT" and number is not None:
            yield node, f"MASTER_PORT is set to {number}"


@_rule(
    "fixed-rank",
    "all ranks would get the same number",
    "remove it: the launcher sets it for each rank",
)
def _fixed_rank(script: Script, launch: Launch) -> Iterator[Found]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name, value, node in _unconditional_settings(script):
        if name in names and constant(value) is not None and launch.world_size > 1:
            yield node, f"{name} is set to {constant(value)}"


@_rule(
    "fixed-world-size",
    "the number of ranks in the script is not the job's",
    "call init_process_group() without world_size and rank: it reads the launcher's variables",
)
def _fixed_world_size(script: Script, launch: Launch) -> Iterator[Found]:
    for call in script.calls(INIT):
        size = keyword(call, "world_size")
        if is_conditional(script, call):
            continue
        value = constant(size)
        if isinstance(value, int) and value not in (-1, launch.world_size):
            yield call, f"world_size is {value}, the job has {launch.world_size} ranks"
        is_counted = isinstance(size, ast.Call) and script.name(size.func) == DEVICE_COUNT
        if is_counted and launch.nodes > 1:
            yield call, "world_size is the number of GPUs of one node"


@_rule(
    "backend-without-gpu",
    "NCCL needs a GPU, and the job has none",
    "call init_process_group() without a backend, or with gloo",
)
def _backend_without_gpu(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.has_gpus:
        return
    for call, backend in _backends(script):
        if backend == "nccl":
            yield call, "the backend is nccl"


@_rule(
    "gloo-on-gpus",
    "gloo copies every gradient through the host's memory",
    "use the backend nccl",
)
def _gloo_on_gpus(script: Script, launch: Launch) -> Iterator[Found]:
    if not launch.has_gpus or not any(script.calls(*DDP)) or "nccl" in "\n".join(script.lines):
        return
    for call, backend in _backends(script):
        if backend == "gloo":
            yield call, "the backend is gloo"


@_rule(
    "collective-on-one-rank",
    "the other ranks never enter it: the ranks wait until the timeout",
    "move it out of the branch, so that all ranks call it",
)
def _collective_on_one_rank(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2:
        return
    guarded: dict[ast.AST | None, list[ast.Call]] = {}
    for call in script.calls(*COLLECTIVES):
        if keyword(call, "group") is None and _branch_of_one_rank(script, call):
            guarded.setdefault(script.function(call), []).append(call)
    for function, calls in guarded.items():
        others = [
            call
            for call in script.calls(*COLLECTIVES)
            if script.function(call) is function and call not in calls
        ]
        if len(calls) == 1 and not any(_is_in_branch(script, other) for other in others):
            yield calls[0], f"{script.name(calls[0].func)}() is called on one rank only"


# Devices


@_rule(
    "fixed-gpus",
    "all ranks of a node would use the same GPUs, and Slurm's choice is lost",
    "remove it: Slurm and the launcher choose the GPUs",
)
def _fixed_gpus(script: Script, launch: Launch) -> Iterator[Found]:
    for name, value, node in _unconditional_settings(script):
        chosen = constant(value)
        if name == "CUDA_VISIBLE_DEVICES" and chosen not in (None, "") and launch.has_gpus:
            yield node, f"CUDA_VISIBLE_DEVICES is set to {chosen}"


@_rule(
    "rank-as-device",
    "on the second node, no GPU has the number of a global rank (invalid device ordinal)",
    'use the local rank: int(os.environ["LOCAL_RANK"])',
)
def _rank_as_device(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.nodes < 2 or not launch.has_gpus:
        return
    for call in script.calls("torch.cuda.set_device", "torch.device", ".cuda"):
        for given in call.args[:2]:
            names = [n for n in ast.walk(given) if isinstance(n, ast.Name)]
            is_plain = isinstance(given, ast.Name | ast.JoinedStr)
            if is_plain and len(names) == 1 and _is_global_rank(script, call, names[0].id):
                yield call, f"{names[0].id} is the global rank"


@_rule(
    "device-map",
    "each rank would spread the model over all GPUs of its node",
    'drop device_map, or pass {"": int(os.environ["LOCAL_RANK"])}',
)
def _device_map(script: Script, launch: Launch) -> Iterator[Found]:
    trains = any(script.calls(".backward", ".train"))
    if launch.ranks_per_node < 2 or not launch.has_gpus or not trains:
        return
    for call in script.calls(".from_pretrained"):
        value = text_of(keyword(call, "device_map"))
        if value in ("auto", "balanced", "sequential") and not is_conditional(script, call):
            yield call, f'device_map is "{value}"'


@_rule(
    "data-parallel",
    "DataParallel uses all GPUs of the node from each rank, and does not join the ranks",
    "use DistributedDataParallel with device_ids=[local_rank]",
)
def _data_parallel(script: Script, launch: Launch) -> Iterator[Found]:
    names = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
    for call in script.calls(*names) if launch.world_size > 1 else ():
        if not is_conditional(script, call):
            yield call, "the model is wrapped in DataParallel"


@_rule(
    "local-rank-argument",
    "torchrun and accelerate pass no such argument: all ranks of a node would use the default",
    'read int(os.environ["LOCAL_RANK"])',
)
def _local_rank_argument(script: Script, launch: Launch) -> Iterator[Found]:
    text = "\n".join(script.lines)
    reads_it = any(word in text for word in ("LOCAL_RANK", "get_local_rank", "SLURM_LOCALID"))
    if reads_it or not is_closed(script) or launch.ranks_per_node < 2:
        return
    for call in script.calls(".add_argument"):
        if any(text_of(each) in ("--local_rank", "--local-rank") for each in call.args):
            yield call, "the local rank is read from an argument"


@_rule(
    "emulated-bf16",
    "this GPU has no bf16 units: bf16 is emulated, slowly, or refused",
    "use fp16 with a gradient scaler, or --mixed-precision auto",
)
def _emulated_bf16(script: Script, launch: Launch) -> Iterator[Found]:
    if not launch.lacks_bf16:
        return
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and script.name(node) == "torch.bfloat16":
            if not is_conditional(script, node):
                yield node, "torch.bfloat16 is used"
                return
        elif isinstance(node, ast.keyword) and node.arg == "bf16" and constant(node.value) is True:
            yield node.value, "bf16=True is passed"
            return


# Data


@_rule(
    "no-set-epoch",
    "without it, the sampler shuffles every epoch in the same order",
    "call sampler.set_epoch(epoch) at the start of each epoch",
)
def _no_set_epoch(script: Script, launch: Launch) -> Iterator[Found]:
    if not is_closed(script) or "set_epoch" in "\n".join(script.lines):
        return
    if not _trains_for_epochs(script):
        return
    names = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed")
    for call in script.calls(names[0], f"{names[1]}.DistributedSampler"):
        is_shuffled = constant(keyword(call, "shuffle")) is not False
        if is_shuffled and not has_unknown_arguments(call):
            yield call, "the sampler's set_epoch() is never called"


@_rule(
    "same-data-on-all-ranks",
    "each rank reads the whole dataset: an epoch costs as much as on one GPU",
    "pass sampler=DistributedSampler(dataset) instead of shuffle=True",
)
def _no_sampler(script: Script, launch: Launch) -> Iterator[Found]:
    text = "\n".join(script.lines)
    splits = re.search(r"[Ss]ampler|shard|split_dataset|prepare\(|\brank\s*::|Subset", text)
    if launch.world_size < 2 or splits or not any(script.calls(*DDP)) or not is_closed(script):
        return
    for call in script.calls(*LOADER):
        if constant(keyword(call, "shuffle")) is True and not has_unknown_arguments(call):
            yield call, "the loader shuffles the whole dataset on each rank"


@_rule(
    "too-many-workers",
    "more loader workers than CPUs wait for each other, and cost host memory",
    "lower num_workers, or request more CPUs (--cpus-per-gpu)",
)
def _too_many_workers(script: Script, launch: Launch) -> Iterator[Found]:
    cpus = launch.cpus_per_node
    for call in script.calls(*LOADER) if cpus else ():
        workers = constant(keyword(call, "num_workers"))
        if isinstance(workers, int) and workers > 1:
            total = workers * launch.ranks_per_node
            if total > cpus and not is_conditional(script, call):
                yield call, f"{total} workers on a node with {cpus} CPUs for the job"


@_rule(
    "downloads-on-all-ranks",
    "all ranks download into the same files at once, and read what others are still writing",
    "download on one rank and let the others wait at a barrier, or before you submit",
)
def _downloads(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2:
        return
    names = ("MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "SVHN", "STL10")
    for call in script.calls(*(f"torchvision.datasets.{name}" for name in names)):
        is_asked = constant(keyword(call, "download")) is True
        if is_asked and not _waits_in_function(script, call) and not script.may_be_chosen(call):
            yield call, "the dataset is downloaded on each rank"


# What it writes


@_rule(
    "saves-on-all-ranks",
    "all ranks write the same file at once: it may be torn",
    "save on rank 0 only, or through clusterrun.runtime.Checkpoints",
)
def _saves_on_all_ranks(script: Script, launch: Launch) -> Iterator[Found]:
    is_distributed = any(script.calls(*DDP, INIT))
    if launch.world_size < 2 or launch.is_sharded or not is_distributed:
        return
    for call in script.calls("torch.save"):
        path = call.args[1] if len(call.args) > 1 else keyword(call, "f")
        if path is None or re.search("rank|buf|BytesIO", ast.unparse(path), re.IGNORECASE):
            continue
        is_computed = isinstance(path, ast.Name | ast.Attribute)
        if not is_computed and not script.may_be_chosen(call):
            yield call, "torch.save() runs on all ranks"


@_rule(
    "saves-on-one-machine",
    "the directory is on the node's own disk: the next attempt, or another node, does not see it",
    "save into a directory that all nodes share",
)
def _saves_on_one_machine(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.nodes < 2:
        return
    for call in script.calls("torch.save", ".save_pretrained", ".save_state", ".save_checkpoint"):
        for given in call.args[:2]:
            if _ONE_MACHINE.match(text_of(given)):
                yield call, f"{text_of(given)} is on the node's own disk"


@_rule(
    "secret-in-script",
    "everybody who can read the script, or a copy of it, can use the token",
    "pass it by name: --pass-env, and revoke this one",
)
def _secret(script: Script, launch: Launch) -> Iterator[Found]:
    for node in script.nodes:
        is_token = isinstance(node, ast.Constant) and _TOKEN.fullmatch(text_of(node))
        if is_token and _is_given_as_secret(script, node):
            yield node, "a token is written in the script"


# Speed, and what no one can answer


@_rule(
    "nccl-timeout",
    "torch does not read NCCL_TIMEOUT",
    "pass --timeout, or timeout= to init_process_group()",
)
def _nccl_timeout(script: Script, launch: Launch) -> Iterator[Found]:
    for name, _, node in script.settings():
        if name == "NCCL_TIMEOUT":
            yield node, "NCCL_TIMEOUT is set"


SLOWS: Final = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "the CPU waits for each kernel",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "each collective is checked by a second one",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node talk through the host",
    ("NCCL_SHM_DISABLE", "1"): "ranks of a node talk through the network",
    ("NCCL_IB_DISABLE", "1"): "nodes talk over TCP",
}


@_rule(
    "slow-setting",
    "this is for debugging, and slows every step",
    "remove it for a long run",
)
def _slow(script: Script, launch: Launch) -> Iterator[Found]:
    for name, text in launch.env.items():
        if why := SLOWS.get((name, text)):
            yield None, f"{name}={text}: {why}"
    for name, value, node in _unconditional_settings(script):
        if why := SLOWS.get((name, str(constant(value)))):
            yield node, f"{name}={constant(value)}: {why}"
    for call in script.calls(
        "torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly"
    ):
        is_on = constant(call.args[0] if call.args else keyword(call, "mode")) is True
        if is_on and not is_conditional(script, call):
            yield call, "autograd searches each gradient for NaN"


@_rule(
    "waits-for-input",
    "a job has no terminal: it fails or waits until the time limit",
    "remove it",
)
def _waits_for_input(script: Script, launch: Launch) -> Iterator[Found]:
    for call in script.calls(
        "input", "breakpoint", "pdb.set_trace", "ipdb.set_trace", "IPython.embed"
    ):
        if not is_conditional(script, call) and not _is_called_conditionally(script, call):
            yield call, f"{script.name(call.func)}() waits for somebody"


@_rule(
    "refused-argument",
    "the script's own argparse refuses the arguments: every rank would exit with 2",
    "correct the arguments after the script",
)
def _refused_argument(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.args is None:
        return
    if found := refusal(script, launch.args):
        yield found


# What the rules share


def is_closed(script: Script) -> bool:
    """Return whether the whole training is in this file, as far as its imports show."""
    return script.packages <= _KNOWN


def is_conditional(script: Script, node: ast.AST) -> bool:
    """Return whether a branch, up to the function's begin, decides that a node runs."""
    child = node
    for parent in script.around(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        is_main = isinstance(parent, ast.If) and is_main_guard(parent.test)
        if isinstance(parent, ast.If | ast.IfExp | ast.Try | ast.ExceptHandler | ast.BoolOp):
            is_test = isinstance(parent, ast.If | ast.IfExp) and child is parent.test
            if not is_main and not is_test:
                return True
        child = parent
    return False


def _is_called_conditionally(script: Script, node: ast.AST) -> bool:
    function = script.function(node)
    if function is None:
        return False
    callers = list(script.calls(function.name, f".{function.name}"))
    return not callers or any(is_conditional(script, call) for call in callers)


def _unconditional_settings(script: Script) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    for name, value, node in script.settings():
        if not is_conditional(script, node) and not _is_called_conditionally(script, node):
            yield name, value, node


def _backends(script: Script) -> Iterator[tuple[ast.Call, str]]:
    for call in script.calls(INIT):
        if not is_conditional(script, call):
            yield call, text_of(call.args[0] if call.args else keyword(call, "backend"))


def _waits_in_function(script: Script, node: ast.AST) -> bool:
    """Return whether ranks wait for each other in the function of a node."""
    waits = script.calls(".barrier", ".monitored_barrier", ".wait_for_everyone")
    return any(script.function(call) is script.function(node) for call in waits)


def _loops_around(script: Script, node: ast.AST) -> int:
    return sum(isinstance(each, ast.For | ast.While) for each in script.around(node))


def _trains_for_epochs(script: Script) -> bool:
    """Return whether a loop over several epochs is in the script."""
    for loop in script.nodes:
        if isinstance(loop, ast.For) and "epoch" in ast.unparse(loop.target):
            bounds = loop.iter.args if isinstance(loop.iter, ast.Call) else []
            return [constant(bound) for bound in bounds] != [1]
    return False


_ONE_RANK = re.compile(
    r"(?:\w+\.)*(?:\w*rank|get_rank\(\)|is_main_process|is_local_main_process|is_master)"
    r"(?: == 0)?"
)


def _branch_of_one_rank(script: Script, node: ast.AST) -> bool:
    """Return whether the innermost branch around a node is taken by one rank alone."""
    child = node
    for parent in script.around(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        if isinstance(parent, ast.If):
            test = ast.unparse(parent.test)
            is_one = _ONE_RANK.fullmatch(test) and ("== 0" in test or "is_" in test)
            return bool(is_one) and child in parent.body and not parent.orelse
        child = parent
    return False


def _is_in_branch(script: Script, node: ast.AST) -> bool:
    for parent in script.around(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        if isinstance(parent, ast.If) and "rank" in ast.unparse(parent.test).lower():
            return True
    return False


def _is_global_rank(script: Script, node: ast.AST, name: str) -> bool:
    """Return whether each assignment to a name in this function, or file, is the global rank."""
    scope = script.function(node) or script.tree
    values = [
        each.value
        for each in ast.walk(scope)
        if isinstance(each, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == name for t in each.targets)
    ]
    return bool(values) and all(_reads_rank(script, value) for value in values)


def _reads_rank(script: Script, value: ast.expr) -> bool:
    if isinstance(value, ast.Call) and script.name(value.func) == "int" and value.args:
        return _reads_rank(script, value.args[0])
    if isinstance(value, ast.Call):
        named = script.name(value.func)
        is_read = named in ("os.environ.get", "os.getenv") and value.args
        return named == "torch.distributed.get_rank" or bool(
            is_read and text_of(value.args[0]) == "RANK"
        )
    is_item = isinstance(value, ast.Subscript) and script.name(value.value) == "os.environ"
    return is_item and text_of(value.slice) == "RANK"  # type: ignore[attr-defined]


def _is_given_as_secret(script: Script, node: ast.AST) -> bool:
    parent = next(script.around(node), None)
    if isinstance(parent, ast.keyword):
        return parent.arg in ("key", "token", "api_key", "use_auth_token", "hub_token")
    if isinstance(parent, ast.Assign):
        target = ast.unparse(parent.targets[0])
        return bool(re.search("token|key|secret", target, re.IGNORECASE))
    return isinstance(parent, ast.Call) and script.name(parent.func).endswith("login")
