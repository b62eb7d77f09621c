"""The pitfalls of a script, and how each is found in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from typing import Final

from clusterrun.linting.rule import Found, Launch, rule
from clusterrun.linting.source import (
    Function,
    Script,
    constant,
    has_unknown_arguments,
    is_main_guard,
    keyword,
    text_of,
)
from clusterrun.shared.wording import count

DDP: Final = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
)
LOADER: Final = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
DEVICE_COUNT: Final = "torch.cuda.device_count"
INIT: Final = "torch.distributed.init_process_group"
ARGUMENTS: Final = (
    *(".TrainingArguments", ".Seq2SeqTrainingArguments"),
    *(".SFTConfig", ".DPOConfig", ".GRPOConfig", ".RewardConfig"),
)
COLLECTIVES: Final = tuple(
    f"torch.distributed.{name}"
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
        *("all_to_all", "barrier", "broadcast", "broadcast_object_list", "gather"),
        *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "scatter"),
    )
)
# What a script may import if the rest of the training is to be seen in it.
KNOWN: Final = {
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
ONE_MACHINE: Final = r"/(?:tmp|var/tmp|dev/shm)/"
_LOOPBACK = r"localhost|127\.\d+\.\d+\.\d+|::1"
_CHOOSES_GPU = (
    r"(?i)local_?rank|localid|set_device|device_count|visible_devices|device_mesh|gpu_?id|\bgpu\b|rpc"
    r"|local_process_index|cuda:[^0-9]|cuda\.device\(|\b(?:cuda|to|device\w*)\s*[=(][^\n]*rank"
)
_TOKEN = r"hf_[A-Za-z0-9]{30,}|[0-9a-f]{40}|wandb_v\d_\w{30,}"


# The world


@rule(
    "never-joins",
    "the script trains, but nothing in it joins the ranks: each would train a model of its own",
    "wrap the model in DistributedDataParallel after init_process_group(), or use accelerate",
)
def _never_joins(script: Script, launch: Launch) -> Iterator[Found]:
    joined = "distributed" in script.text.lower() or not is_closed(script)
    if launch.world_size < 2 or joined or launch.strategy == "none":
        return
    if any(word in script.text for word in ("exec(", "import_module", "__import__", "device_mesh")):
        return
    for call in script.calls(".backward"):
        if sum(isinstance(each, ast.For | ast.While) for each in script.around(call)):
            yield call, "the training loop is here"
            return


@rule(
    "spawns-ranks",
    "each rank that clusterrun starts would start ranks of its own",
    "call the function once, with RANK, LOCAL_RANK and WORLD_SIZE from the environment",
)
def _spawns(script: Script, launch: Launch) -> Iterator[Found]:
    if not any(script.calls(INIT)):
        return
    for call in script.calls("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn"):
        if not is_conditional(script, call) and constant(keyword(call, "nprocs")) != 1:
            yield call, "mp.spawn starts the ranks"


@rule(
    "fixed-address",
    "on several nodes, each node would wait for itself or form a world of its own",
    "remove it: clusterrun sets MASTER_ADDR to the first node",
)
def _fixed_address(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.nodes < 2 or launch.is_simulated:
        return
    for name, value, node in unconditional_settings(script):
        if name == "MASTER_ADDR" and re.fullmatch(_LOOPBACK, text_of(value)):
            yield node, f"MASTER_ADDR is set to {text_of(value)}"
    for call in script.calls(INIT):
        method = text_of(keyword(call, "init_method"))
        is_loopback = re.match(f"tcp://(?:{_LOOPBACK})", method)
        is_own_disk = re.match(f"file://{ONE_MACHINE}", method)
        if (is_loopback or is_own_disk) and not is_conditional(script, call):
            yield call, f"the ranks meet at {method}"


@rule(
    "fixed-port",
    "two jobs on one node would use the same port",
    "remove it: clusterrun chooses a free port for each job",
)
def _fixed_port(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.shared_port:
        yield None, f"main_process_port is {launch.shared_port}, and the nodes are shared"
    for name, value, node in unconditional_settings(script):
        number = constant(value)
        if isinstance(value, ast.Call) and script.name(value.func) == "str" and value.args:
            number = constant(value.args[0])
        if name == "MASTER_PORT" and number is not None:
            yield node, f"MASTER_PORT is set to {number}"


@rule(
    "fixed-rank",
    "all ranks would get the same number",
    "remove it: the launcher sets it for each rank",
)
def _fixed_rank(script: Script, launch: Launch) -> Iterator[Found]:
    names = ["RANK"] * (launch.world_size > 1) + ["LOCAL_RANK"] * (launch.ranks_per_node > 1)
    for name, value, node in unconditional_settings(script):
        if name in names and constant(value) is not None:
            yield node, f"{name} is set to {constant(value)}"


@rule(
    "fixed-world-size",
    "the number of ranks in the script is not the job's",
    "call init_process_group() without world_size and rank: it reads the launcher's variables",
)
def _fixed_world_size(script: Script, launch: Launch) -> Iterator[Found]:
    for name, value, node in unconditional_settings(script) if launch.is_sized else ():
        fixed = str(constant(value))
        if name == "WORLD_SIZE" and fixed.isdecimal() and int(fixed) != launch.world_size:
            yield node, f"WORLD_SIZE is set to {fixed}, the job has {launch.world_size} ranks"
    for call in script.calls(INIT) if launch.is_sized else ():
        size = keyword(call, "world_size")
        if is_conditional(script, call):
            continue
        number = constant(size)
        if isinstance(number, int) and number not in (-1, launch.world_size):
            yield call, f"world_size is {number}, the job has {launch.world_size} ranks"
        is_counted = isinstance(size, ast.Call) and script.name(size.func) == DEVICE_COUNT
        if is_counted and launch.nodes > 1:
            yield call, "world_size is the number of GPUs of one node"


@rule(
    "backend-without-gpu",
    "NCCL needs a GPU, and the job has none",
    "call init_process_group() without a backend, or with gloo",
)
def _backend_without_gpu(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.has_gpus or not launch.is_sized:
        return
    for call, backend in _backends(script):
        if backend == "nccl":
            yield call, "the backend is nccl"


@rule(
    "gloo-on-gpus",
    "gloo copies every gradient through the host's memory",
    "use the backend nccl",
)
def _gloo_on_gpus(script: Script, launch: Launch) -> Iterator[Found]:
    is_on_gpus = launch.has_gpus and launch.is_sized and "cuda" in script.text
    if not is_on_gpus or not any(script.calls(*DDP)) or "nccl" in script.text:
        return
    for call, backend in _backends(script):
        if backend == "gloo":
            yield call, "the backend is gloo"


@rule(
    "collective-on-one-rank",
    "the other ranks never enter it: the ranks wait until the timeout",
    "move it to where all ranks call it",
)
def _collective_on_one_rank(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2:
        return
    joint = list(_joint_calls(script, launch))
    is_local = launch.ranks_per_node > 1
    guarded = [c for c in joint if _is_of_one_rank_only(script, c, may_be_local=is_local)]
    if any(_is_in_branch(script, call) for call in joint if call not in guarded):
        return  # the other ranks may meet it there
    for call in guarded:
        if not re.search("(?i)group|mesh|pg", ast.unparse(call)):
            name = script.name(call.func).lstrip(".")
            yield call, f"{name}() is called on one rank only"


def _joint_calls(script: Script, launch: Launch) -> Iterator[ast.Call]:
    """Yield the calls that all ranks must make."""
    yield from script.calls(*COLLECTIVES)
    if "accelerate" in script.packages:
        sharded = [".save_state"] * launch.is_sharded + [".get_state_dict"] * launch.splits_weights
        yield from script.calls(".wait_for_everyone", ".gather_for_metrics")
        own = script.calls(*sharded, ".gather", ".reduce", ".pad_across_processes")
        yield from (c for c in own if "accel" in ast.unparse(c.func).lower())
    if "deepspeed" in script.packages:
        for call in script.calls(".save_checkpoint"):
            if re.search("(?i)engine|model", ast.unparse(call.func)):
                yield call


# Devices


@rule(
    "rank-as-device",
    "on the second node, no GPU has the number of a global rank (invalid device ordinal)",
    'use the local rank: int(os.environ["LOCAL_RANK"])',
)
def _rank_as_device(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.nodes < 2 or not launch.has_gpus:
        return
    for call in script.calls("torch.cuda.set_device", "torch.device", ".cuda", ".to", *DDP):
        if is_conditional(script, call):
            continue
        ids = keyword(call, "device_ids")
        of_list = ids.elts if isinstance(ids, ast.List) else []
        for given in of_list if script.name(call.func) in DDP else call.args[:2]:
            names = [n for n in ast.walk(given) if isinstance(n, ast.Name)]
            is_plain = isinstance(given, ast.Name | ast.JoinedStr)
            if is_plain and len(names) == 1 and _is_global_rank(script, call, names[0].id):
                yield call, f"the device index, {names[0].id}, is the global rank"
                return


@rule(
    "one-gpu-for-all-ranks",
    "all ranks of a node would use its first GPU: NCCL reports a duplicate GPU, or memory runs out",
    'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything else of CUDA',
)
def _one_gpu(script: Script, launch: Launch) -> Iterator[Found]:
    is_distributed = any(script.calls(*DDP, INIT)) and is_closed(script)
    if not (launch.has_gpus and launch.ranks_per_node > 1 and is_distributed):
        return
    is_chosen = re.search(_CHOOSES_GPU, script.text)
    for call in script.calls("torch.device", ".to", ".cuda"):
        named = {text_of(node) for each in call.args for node in ast.walk(each)}
        is_bare = script.name(call.func).endswith(".cuda") and not call.args
        is_plain = (is_bare or named & {"cuda", "cuda:0"}) and not is_chosen
        is_first = _names_first_gpu(script, call) and "VISIBLE_DEVICES" not in script.text
        if (is_plain or is_first) and not is_conditional(script, call):
            yield call, "each rank uses GPU 0" if is_first else "no rank chooses its GPU"
            return


def _names_first_gpu(script: Script, call: ast.Call) -> bool:
    """Return whether a call is `.cuda(0)` or `.to("cuda:0")`."""
    given = call.args[0] if call.args else keyword(call, "device")
    is_number = script.name(call.func).endswith(".cuda") and constant(given) == 0
    return isinstance(call.func, ast.Attribute) and (
        is_number or (call.func.attr in ("to", "cuda") and text_of(given) == "cuda:0")
    )


@rule(
    "device-map",
    "device_map ignores ranks: each would use all GPUs of its node, or the same one",
    'drop device_map, or pass {"": int(os.environ["LOCAL_RANK"])}',
)
def _device_map(script: Script, launch: Launch) -> Iterator[Found]:
    trains = any(script.calls(".backward", ".train"))
    if launch.ranks_per_node < 2 or not launch.has_gpus or not trains:
        return
    for call in script.calls(".from_pretrained"):
        given = keyword(call, "device_map")
        is_spread = text_of(given) in ("auto", "balanced", "sequential")
        values = [constant(each) for each in given.values] if isinstance(given, ast.Dict) else []
        is_first = values in ([0], ["cuda:0"]) and "VISIBLE_DEVICES" not in script.text
        if given and (is_spread or is_first) and not is_conditional(script, call):
            yield call, f"device_map is {ast.unparse(given)}"


@rule(
    "data-parallel",
    "DataParallel uses all GPUs of the node from each rank, and does not join the ranks",
    "use DistributedDataParallel with device_ids=[local_rank]",
)
def _data_parallel(script: Script, launch: Launch) -> Iterator[Found]:
    names = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
    for call in script.calls(*names) if launch.world_size > 1 else ():
        if not is_conditional(script, call):
            yield call, "the model is wrapped in DataParallel"


@rule(
    "local-rank-argument",
    "torchrun and accelerate pass no such argument: all ranks of a node would use the default",
    'read int(os.environ["LOCAL_RANK"])',
)
def _local_rank_argument(script: Script, launch: Launch) -> Iterator[Found]:
    reads_it = re.search("LOCAL_RANK|get_local_rank|SLURM_LOCALID|device_count", script.text)
    is_unused = not re.search(r"\.local_rank\b(?!\s*=[^=])", script.text)
    if reads_it or is_unused or not is_closed(script) or launch.ranks_per_node < 2:
        return
    for call in script.calls(".add_argument"):
        if any(text_of(each) in ("--local_rank", "--local-rank") for each in call.args):
            yield call, "the local rank is read from an argument"


# Data


@rule(
    "no-set-epoch",
    "without it, the sampler shuffles every epoch in the same order",
    "call sampler.set_epoch(epoch) at the start of each epoch",
)
def _no_set_epoch(script: Script, launch: Launch) -> Iterator[Found]:
    if not is_closed(script) or "set_epoch" in script.text or not _trains_for_epochs(script):
        return
    names = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed")
    for call in script.calls(names[0], f"{names[1]}.DistributedSampler"):
        shuffle = keyword(call, "shuffle")
        is_shuffled = shuffle is None or constant(shuffle) is True
        is_plain = not has_unknown_arguments(call) and len(call.args) < 4
        is_of_validation = re.search("(?i)val|test", script.lines[call.lineno - 1])
        if is_shuffled and is_plain and not keyword(call, "seed") and not is_of_validation:
            yield call, "the sampler's set_epoch() is never called"


@rule(
    "same-data-on-all-ranks",
    "each rank reads the whole dataset: an epoch costs as much as on one GPU",
    "pass sampler=DistributedSampler(dataset) instead of shuffle=True",
)
def _no_sampler(script: Script, launch: Launch) -> Iterator[Found]:
    splits = re.search(_SPLITS, script.text) or not _trains_for_epochs(script)
    if launch.world_size < 2 or splits or not any(script.calls(*DDP)) or not is_closed(script):
        return
    for call in script.calls(*LOADER):
        if constant(keyword(call, "shuffle")) is True and not has_unknown_arguments(call):
            yield call, "the loader shuffles the whole dataset on each rank"


_SPLITS = (
    r"[Ss]ampler|shard|split_(?:dataset|between)|array_split|prepare\(|\brank\s*::|Subset"
    r"|\w\[[^\]\n{\"']*rank|\{rank\}\.\w|(?:[Dd]ata(?!Parallel)\w*|[Ll]oad\w*|[Ff]iles?)\([^)\n]*rank"
)


@rule(
    "too-many-workers",
    "more loader workers than CPUs wait for each other, and cost host memory",
    "lower num_workers, or request more CPUs (--cpus-per-gpu)",
)
def _too_many_workers(script: Script, launch: Launch) -> Iterator[Found]:
    cpus = launch.cpus_per_node
    for call in script.calls(*LOADER, *ARGUMENTS) if cpus and launch.is_sized else ():
        name = "num_workers" if script.name(call.func) in LOADER else "dataloader_num_workers"
        workers = constant(keyword(call, name))
        if isinstance(workers, int) and workers > 1:
            total = workers * launch.ranks_per_node
            if total > cpus and not is_conditional(script, call):
                yield call, f"{total} workers on a node with {count(cpus, 'CPU')} for the job"


@rule(
    "downloads-on-all-ranks",
    "unless it is there, all ranks download into the same files, and read what others still write",
    "download on one rank and let the others wait at a barrier, or before you submit",
)
def _downloads(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2:
        return
    names = ("MNIST", "FashionMNIST", "CIFAR10", "CIFAR100", "SVHN", "STL10")
    for call in script.calls(*(f"torchvision.datasets.{name}" for name in names)):
        is_asked = constant(keyword(call, "download")) is True and not differs(script, call)
        if is_asked and not _waits_in_function(script, call) and not script.may_be_chosen(call):
            yield call, "download=True on each rank"


# What it writes


@rule(
    "saves-on-all-ranks",
    "all ranks write the same file at once: it may be corrupted",
    "save on rank 0 only, or through clusterrun.runtime.Checkpoints",
)
def _saves_on_all_ranks(script: Script, launch: Launch) -> Iterator[Found]:
    is_sharded = launch.is_sharded and not ignores_strategy(script)
    if launch.world_size < 2 or is_sharded or not joins(script):
        return
    for call in _plain_saves(script):
        at, name = (1, "f") if script.name(call.func) == "torch.save" else (0, "save_directory")
        path = call.args[at] if len(call.args) > at else keyword(call, name)
        is_buffer = path is not None and re.search("(?i)buf|bytesio", ast.unparse(path))
        if path is None or is_buffer or differs(script, path):
            continue
        if not isinstance(path, ast.Name | ast.Attribute) and not script.may_be_chosen(call):
            yield call, f"{script.name(call.func)}() runs on all ranks"


def _plain_saves(script: Script) -> Iterator[ast.Call]:
    """Yield the calls that write a file on whichever rank makes them."""
    yield from script.calls("torch.save")
    is_split = re.search(_SPLITS_MODEL, script.text)
    for call in () if is_split else script.calls(".save_pretrained"):
        is_model = re.search("(?i)model", ast.unparse(call.func).removesuffix("save_pretrained"))
        is_asked = keyword(call, "is_main_process") or keyword(call, "save_function")
        if is_model and not is_asked and not has_unknown_arguments(call):
            yield call


@rule(
    "loads-onto-one-gpu",
    "tensors that were saved from a GPU return to it: each rank would fill the first GPU",
    'pass map_location="cpu", or the device of the rank',
)
def _loads_onto_one_gpu(script: Script, launch: Launch) -> Iterator[Found]:
    is_distributed = any(script.calls(*DDP, INIT)) and any(script.calls("torch.save"))
    is_placed = re.search(r"map_location|cpu\(\)|to\(.cpu|set_default", script.text)
    if not is_distributed or is_placed or "cuda" not in script.text:
        return
    if not launch.has_gpus or launch.ranks_per_node < 2:
        return
    saved = {ast.unparse(call.args[1]) for call in script.calls("torch.save") if call.args[1:]}
    for call in script.calls("torch.load"):
        is_own = bool(call.args) and ast.unparse(call.args[0]) in saved
        is_model = is_own or re.search("(?i)ckpt|check|resume|snap", ast.unparse(call))
        is_plain = len(call.args) == 1 and not has_unknown_arguments(call)
        if is_model and is_plain and not branch_of_one_rank(script, call):
            yield call, "torch.load() has no map_location"


@rule(
    "creates-existing-directory",
    "another rank, or an earlier attempt, creates it first: FileExistsError",
    "pass exist_ok=True",
)
def _creates_directory(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2 or not joins(script):
        return
    for call in script.calls("os.makedirs", ".mkdir"):
        is_of_os = script.name(call.func).startswith("os.")
        if bool(call.args) != is_of_os:
            continue
        path = call.args[0] if is_of_os else call.func.value  # type: ignore[attr-defined]
        if keyword(call, "exist_ok") or differs(script, path) or script.is_tried(call):
            continue
        if not script.may_be_chosen(_existence_test(script, call) or call):
            yield call, f"all ranks create the directory {ast.unparse(path)}"


@rule(
    "different-splits",
    "each rank would split the data differently: some train on what others validate with",
    "pass a seed: seed=0, or generator=torch.Generator().manual_seed(0) for random_split()",
)
def _different_splits(script: Script, launch: Launch) -> Iterator[Found]:
    is_alone = launch.world_size < 2 or not joins(script) or not is_closed(script, also=TRAINING)
    if is_alone or re.search("seed|rng|random_state", script.text):
        return
    for call in script.calls(".train_test_split"):
        is_asked = keyword(call, "generator") or keyword(call, "shuffle")
        if not is_asked and not has_unknown_arguments(call) and not script.may_be_chosen(call):
            yield call, "train_test_split() has no seed"
    for call in script.calls("torch.utils.data.random_split"):
        if len(call.args) == 2 and not call.keywords and not script.may_be_chosen(call):
            yield call, "random_split() has no generator, and no seed is set"


@rule(
    "secret-in-script",
    "everybody who can read the script, or a copy of it, can use the token",
    "pass it by name: --pass-env, and revoke this one",
)
def _secret(script: Script, launch: Launch) -> Iterator[Found]:
    for node in script.nodes:
        is_token = isinstance(node, ast.Constant) and re.fullmatch(_TOKEN, text_of(node))
        if is_token and len(set(text_of(node))) > 10 and _is_given_as_secret(script, node):
            yield node, "a token is written in the script"


# Speed, and what no one can answer


@rule(
    "waits-for-input",
    "a job has no terminal: it fails or waits until the time limit",
    "remove it",
)
def _waits_for_input(script: Script, launch: Launch) -> Iterator[Found]:
    for call in script.calls(
        "input", "breakpoint", "pdb.set_trace", "ipdb.set_trace", "IPython.embed"
    ):
        is_certain = not is_conditional(script, one_rank_is_enough(script, call))
        if is_certain or _is_at_a_step(script, call):
            yield call, f"{script.name(call.func)}() waits for somebody"


def _is_at_a_step(script: Script, call: ast.Call) -> bool:
    """Return whether a comparison with the progress decides, as in `if step == 100`."""
    branch = next((each for each in script.around(call) if isinstance(each, ast.If)), None)
    is_comparison = branch is not None and isinstance(branch.test, ast.Compare)
    return is_comparison and not script.may_be_chosen(call)


@rule(
    "refused-argument",
    "the script's own argparse refuses the arguments: every rank would exit with 2",
    "correct the arguments after the script",
)
def _refused_argument(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.args is None or "sys.argv" in script.text or "argparse" not in script.text:
        return
    from clusterrun.linting.arguments import refusal  # slow to import

    if (found := refusal(script, launch.args)) and not is_conditional(script, found[0]):
        yield found


# What the rules share


def joins(script: Script) -> bool:
    """Return whether the script joins the ranks itself, or has a library do it."""
    names = ("accelerate.Accelerator", "transformers.Trainer", "transformers.Seq2SeqTrainer")
    return any(script.calls(*DDP, INIT, *names, "deepspeed.initialize"))


_OF_ONE_RANK = "(?i)rank|host|pid|uuid|te?mp|time|node|process_index|random"


def differs(script: Script, node: ast.AST) -> bool:
    """Return whether an expression may have another value on each rank."""
    open_: list[ast.AST] = [node]
    seen: set[str] = set()
    while open_:
        each = open_.pop()
        if re.search(_OF_ONE_RANK, ast.unparse(each)):
            return True
        found = (n for n in ast.walk(each) if isinstance(n, ast.Name | ast.Attribute))
        names = {script.name(n) for n in found} - seen
        seen |= names
        open_ += [value for name in names for value in script.values.get(name, ())]
    return False


def _existence_test(script: Script, call: ast.Call) -> ast.AST | None:
    """Return the `if not os.path.exists(path)` around a call; None without one."""
    branch = next((each for each in script.around(call) if isinstance(each, ast.If)), None)
    test = branch.test if branch else None
    is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    asked = test.operand if is_not else None  # type: ignore[union-attr]
    is_existence = isinstance(asked, ast.Call) and re.search(_EXISTS, script.name(asked.func))
    return branch if is_existence else None


_EXISTS = r"\.(?:exists|isdir|is_dir)$"


# What trains, and calls nothing of the user's that this file does not show.
TRAINING: Final = (
    *("accelerate", "deepspeed", "lightning", "peft", "pytorch_lightning", "transformers", "trl"),
)
_SPLITS_MODEL = "(?i)fsdp|fully_?shard|deepspeed|parallelism_?config|tp_plan|megatron"
_SHARDS = r"(?i)fully_?shard|fsdp|accelerate|deepspeed|zero_?(?:redund|optim|stage|[123])"


def ignores_strategy(script: Script) -> bool:
    """Return whether a script wraps its model in plain DDP, and uses nothing that shards it."""
    return any(script.calls(*DDP)) and is_closed(script) and not re.search(_SHARDS, script.text)


def is_closed(script: Script, *, also: Collection[str] = ()) -> bool:
    """Return whether the whole training is in this file, as far as its imports show."""
    return script.packages <= KNOWN.union(also)


def is_conditional(script: Script, node: ast.AST, seen: set[ast.AST] | None = None) -> bool:
    """Return whether a node may not run: for a branch, an early return, or its function's callers.

    A function that this file does not call may not run.
    """
    child = node
    for parent in script.around(node):
        if isinstance(parent, ast.Lambda):
            return True
        is_main = isinstance(parent, ast.If) and is_main_guard(parent.test)
        if isinstance(parent, _BRANCHES) and not is_main and child is not vars(parent).get("test"):
            return True
        if script.left_before(parent, child):
            return True
        if isinstance(parent, Function):
            break
        child = parent
    function = script.function(node)
    if function is None:
        return False
    seen = set() if seen is None else seen
    if function in seen:
        return True
    seen.add(function)
    is_class = function.name == "__init__"
    name = getattr(next(script.around(function)), "name", "?") if is_class else function.name
    return all(is_conditional(script, call, seen) for call in script.calls(name, f".{name}"))


_BRANCHES = (ast.If, ast.IfExp, ast.While, ast.Try, ast.ExceptHandler, ast.BoolOp, ast.Match)


def unconditional_settings(script: Script) -> Iterator[tuple[str, ast.expr, ast.AST]]:
    """Yield what is assigned to `os.environ` without a condition: variable, value, statement."""
    for name, value, node in script.settings():
        if not is_conditional(script, node):
            yield name, value, node


def _backends(script: Script) -> Iterator[tuple[ast.Call, str]]:
    for call in script.calls(INIT):
        if not is_conditional(script, call):
            yield call, text_of(call.args[0] if call.args else keyword(call, "backend"))


def _waits_in_function(script: Script, node: ast.AST) -> bool:
    """Return whether ranks wait for each other in the function of a node."""
    waits = script.calls(".barrier", ".monitored_barrier", ".wait_for_everyone")
    return any(script.function(call) is script.function(node) for call in waits)


def _trains_for_epochs(script: Script) -> bool:
    """Return whether a loop over several epochs is in the script."""
    for loop in script.nodes:
        if isinstance(loop, ast.For) and "epoch" in ast.unparse(loop.target):
            bounds = loop.iter.args if isinstance(loop.iter, ast.Call) else []
            return [constant(bound) for bound in bounds] != [1]
    return False


_TEXT = r"(?:os\.)?(?:environ(?:\.get)?|getenv)[\[(]'(?:LOCAL_)?RANK'(?:, '?-?\d'?)?[\])]"
_NUMBER = rf"(?:(?:\w+\.)*(?:\w*rank|get_rank\(\))|int\({_TEXT}\))"
_MAIN = r"(?:\w+\.)*(?:is_main_process|is_local_main_process|is_master)"
_ONE_RANK = rf"{_NUMBER} == 0|not {_NUMBER}|{_TEXT} == '0'|{_MAIN}"
_OTHER_RANKS = rf"{_NUMBER} (?:!=|>) 0|{_TEXT} != '0'|not {_MAIN}"
_EXITS: Final = ("sys.exit", "exit", "quit", "os._exit")
_NAMES_RANKS = "(?i)rank|main|master|primary|leader|chief|root"


def branch_of_one_rank(script: Script, node: ast.AST, *, may_be_local: bool = True) -> bool:
    """Return whether the innermost branch around a node is taken by one rank alone."""
    child = node
    for parent in script.around(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        if isinstance(parent, ast.If):
            is_and = isinstance(parent.test, ast.BoolOp) and isinstance(parent.test.op, ast.And)
            tests = parent.test.values if is_and else [parent.test]  # type: ignore[attr-defined]
            ones = [text for test in tests if re.fullmatch(_ONE_RANK, text := ast.unparse(test))]
            is_one = any(may_be_local or "local" not in text.lower() for text in ones)
            return is_one and child in parent.body and not parent.orelse
        child = parent
    return False


def one_rank_is_enough(script: Script, call: ast.Call) -> ast.AST:
    """Return the `if rank == 0` around a call, the call itself without one."""
    branch = next(each for each in script.around(call) if isinstance(each, ast.If | ast.Module))
    is_plain = isinstance(branch, ast.If) and not isinstance(branch.test, ast.BoolOp)
    return branch if is_plain and branch_of_one_rank(script, call) else call


def _is_of_one_rank_only(script: Script, call: ast.Call, *, may_be_local: bool) -> bool:
    """Return whether the other ranks take another branch, or have left."""
    if branch_of_one_rank(script, call, may_be_local=may_be_local):
        return True
    child: ast.AST = call
    for parent in script.around(call):
        block = getattr(parent, "body", None)
        earlier = block[: block.index(child)] if isinstance(block, list) and child in block else []
        if any(_only_others_leave(script, each, may_be_local=may_be_local) for each in earlier):
            return True
        if isinstance(parent, Function):
            return False
        child = parent
    return False


def _only_others_leave(script: Script, node: ast.stmt, *, may_be_local: bool) -> bool:
    if not isinstance(node, ast.If) or node.orelse or len(node.body) > 1:
        return False
    last, test = node.body[0], ast.unparse(node.test)
    call = last.value if isinstance(last, ast.Expr) else None
    is_exit = isinstance(call, ast.Call) and script.name(call.func) in _EXITS
    is_left = isinstance(last, ast.Return | ast.Raise) or is_exit
    is_others = re.fullmatch(_OTHER_RANKS, test) and (may_be_local or "local" not in test.lower())
    return is_left and bool(is_others)


def _is_in_branch(script: Script, node: ast.AST) -> bool:
    for parent in script.around(node):
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        if isinstance(parent, ast.If) and re.search(_NAMES_RANKS, ast.unparse(parent.test)):
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
    bound = [
        each
        for each in ast.walk(scope)
        if (isinstance(each, ast.arg) and each.arg == name)
        or (isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store))
    ]
    return len(bound) == len(values) > 0 and all(_reads_rank(script, value) for value in values)


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
    is_hash = re.fullmatch("[0-9a-f]{40}", text_of(node))
    if isinstance(parent, ast.Assign):
        wanted = "wandb.*key" if is_hash else "token|key|secret"
        return bool(re.search(wanted, ast.unparse(parent.targets[0]), re.IGNORECASE))
    call = next(script.around(parent), None) if isinstance(parent, ast.keyword) else parent
    if isinstance(call, ast.Call) and script.name(call.func).endswith("login"):
        return True
    names = ("key", "token", "api_key", "use_auth_token", "hub_token")
    return isinstance(parent, ast.keyword) and parent.arg in names and not is_hash
