"""The pitfalls of a script and of its job's settings, and how each is found."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from typing import Final

from clusterrun.config.choices import Strategy
from clusterrun.launch.inputs import pairs
from clusterrun.linting.rule import Found, Launch, rule
from clusterrun.linting.source import (
    KNOWN,
    TRAINING,
    Function,
    Script,
    constant,
    has_unknown_arguments,
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
SPAWN: Final = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")
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
ONE_MACHINE: Final = r"/(?:tmp|var/tmp|dev/shm)/"
_LOOPBACK = r"localhost|127\.\d+\.\d+\.\d+|::1"
_LIGHTNING = ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.fabric")
_RUNS: Final = (
    *("os.system", "subprocess.run", "subprocess.call", "subprocess.check_call"),
    *("subprocess.Popen", "subprocess.check_output"),
)
_LAUNCHERS = (
    r"(?:exec |(?:srun|mpirun|mpiexec) (?:-\S+ )*)?"
    r"(torchrun|accelerate launch|python\S* -m torch\.distributed\.\w+|deepspeed)\s.*\.py\b"
)
_OUTPUT = (
    r"(?i)--?(?:(?:model|checkpoint|ckpt)s?[_-])?(?:out|output|save)s?"
    r"(?:[_-](?:dir|path|folder|root))?"
)

# What may be imported without joining the ranks, and what a script that joins them may contain.
_MODELS = ("diffusers", "huggingface_hub", "peft", "torchmetrics", "transformers")
_JOIN_NOTHING: Final = ("absl", "click", "clusterrun", "typer", *_MODELS)
_MAY_JOIN = r"(?i)distributed|device_mesh|exec\(|importlib|runpy|__import__"
_TRAINERS = "trainer|trainingarg|accelerat|deepspeed|lightning|tp_plan"


@rule(
    "never-joins",
    "the script trains, but nothing in it joins the ranks: each would train its own model",
    "wrap the model in DistributedDataParallel after init_process_group(), or use accelerate",
)
def _never_joins(script: Script, launch: Launch) -> Iterator[Found]:
    """Find the training step of a script in which no import and no word could join the ranks."""
    if launch.world_size < 2 or launch.strategy == "none":
        return
    if not is_self_contained(script, also=_JOIN_NOTHING):
        return
    words = _MAY_JOIN if script.packages.isdisjoint(_MODELS) else f"{_MAY_JOIN}|{_TRAINERS}"
    if re.search(words, re.sub(r"(?m)^\s*#.*", "", script.text)):  # comments may say anything
        return
    for call in script.calls(".backward"):
        if _is_repeated(script, call):
            yield call, "the training step is here"
            return


def _is_repeated(script: Script, node: ast.AST) -> bool:
    """Return whether a node is in a loop, or in a function that is called in one."""
    seen, nodes = set[ast.AST](), [node]
    while nodes:
        for parent, _ in script.ancestors(nodes.pop()):
            if isinstance(parent, ast.For | ast.While):
                return True
            if isinstance(parent, Function) and parent not in seen:
                seen.add(parent)
                is_method = isinstance(script.parents[parent], ast.ClassDef)
                nodes += script.calls(f".{parent.name}" if is_method else parent.name)
    return False


@rule(
    "spawns-ranks",
    "each rank that clusterrun starts would start its own ranks",
    "call the function directly, with RANK, LOCAL_RANK and WORLD_SIZE from the environment",
)
def _spawns(script: Script, launch: Launch) -> Iterator[Found]:
    if not any(script.calls(INIT)):  # the processes are no ranks: they may prepare data
        return
    for call in script.certain_calls(*SPAWN):
        if constant(keyword(call, "nprocs")) != 1:
            yield call, "mp.spawn starts the ranks"


@rule(
    "fixed-address",
    "each node would look for rank 0 on itself, and wait in vain or form its own world",
    "remove it: clusterrun sets MASTER_ADDR to the first node",
)
def _fixed_address(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.nodes < 2 or launch.is_simulated:
        return
    for name, value, node in script.environ_assignments():
        if name == "MASTER_ADDR" and re.fullmatch(_LOOPBACK, text_of(value)):
            yield node, f"MASTER_ADDR is set to {text_of(value)}"
    for call in script.certain_calls(INIT):
        method = text_of(keyword(call, "init_method"))
        if re.match(f"tcp://(?:{_LOOPBACK})|file://{ONE_MACHINE}", method):
            yield call, f"the ranks meet at {method}"


@rule(
    "fixed-port",
    "two jobs on one node would use the same port",
    "remove it: clusterrun chooses a free port for each job",
)
def _fixed_port(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.shared_port:  # 0: none was chosen, or no other job can be on the nodes
        yield None, f"main_process_port is {launch.shared_port}, and the nodes are shared"
    for name, value, node in script.environ_assignments():
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
    counts = {"RANK": launch.world_size, "LOCAL_RANK": launch.ranks_per_node}
    for name, value, node in script.environ_assignments():
        if counts.get(name, 1) > 1 and constant(value) is not None:  # with one rank, it may be 0
            yield node, f"{name} is set to {constant(value)}"


@rule(
    "fixed-world-size",
    "the number of ranks in the script differs from the job's",
    "call init_process_group() without world_size and rank: it reads the launcher's variables",
)
def _fixed_world_size(script: Script, launch: Launch) -> Iterator[Found]:
    if not launch.is_sized:  # the number of ranks is only assumed
        return
    for name, value, node in script.environ_assignments():
        fixed = str(constant(value))
        if name == "WORLD_SIZE" and fixed.isdecimal() and int(fixed) != launch.world_size:
            yield node, f"WORLD_SIZE is set to {fixed}, the job has {launch.world_size} ranks"
    for call in script.certain_calls(INIT):
        size = keyword(call, "world_size")
        number = constant(size)
        if isinstance(number, int) and number not in (-1, launch.world_size):
            yield call, f"world_size is {number}, the job has {launch.world_size} ranks"
        is_counted = isinstance(size, ast.Call) and script.name(size.func) == DEVICE_COUNT
        if is_counted and launch.nodes > 1:
            yield call, "world_size is the number of GPUs of one node"


@rule(
    "collective-on-one-rank",
    "the other ranks never enter the collective: the job hangs until the timeout",
    "move it to where all ranks call it",
)
def _collective_on_one_rank(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2:
        return
    calls = list(_joint_calls(script, launch))
    may_be_local = launch.ranks_per_node > 1  # else `local_rank == 0` is true on all ranks
    guarded = [x for x in calls if is_on_one_rank(script, x, may_be_local=may_be_local)]
    others = [x for x in calls if x not in guarded]
    tests = (branch.test for call in others for branch, _ in script.branches(call))
    if any(re.search(_NAMES_RANKS, ast.unparse(test)) for test in tests):
        return  # the other ranks may enter it there
    for call in guarded:
        if not re.search("(?i)group|mesh|pg", ast.unparse(call)):  # a group may be of one rank
            name = script.name(call.func).lstrip(".")
            yield call, f"{name}() is called on one rank only"


def _joint_calls(script: Script, launch: Launch) -> Iterator[ast.Call]:
    """Yield the calls that all ranks must make."""
    yield from script.calls(*COLLECTIVES)
    if "accelerate" in script.packages:
        yield from script.calls(".wait_for_everyone", ".gather_for_metrics")
        names = [".gather", ".reduce", ".pad_across_processes"]
        if launch.is_sharded:
            names.append(".save_state")
        if Strategy(launch.strategy).stage == 3:  # the weights are also sharded
            names.append(".get_state_dict")
        own = script.calls(*names)
        yield from (call for call in own if "accel" in ast.unparse(call.func).lower())
    if "deepspeed" in script.packages:
        for call in script.calls(".save_checkpoint"):
            if re.search("(?i)engine|model", ast.unparse(call.func)):
                yield call


@rule(
    "data-parallel",
    "DataParallel uses all GPUs of the node from each rank, and does not join the ranks",
    "use DistributedDataParallel with device_ids=[local_rank]",
)
def _data_parallel(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size > 1:
        for call in script.certain_calls("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
            yield call, "the model is wrapped in DataParallel"


@rule(
    "local-rank-argument",
    "torchrun and accelerate do not pass this argument: all ranks of a node would use its default, "
    "or argparse would report it as missing",
    'read int(os.environ["LOCAL_RANK"])',
)
def _local_rank_argument(script: Script, launch: Launch) -> Iterator[Found]:
    """Find the argument if the script requires it, or knows its rank from nothing else."""
    knows_rank = re.search("LOCAL_RANK|get_local_rank|SLURM_LOCALID|device_count", script.text)
    uses_argument = re.search(r"\.local_rank\b(?!\s*=[^=])", script.text)
    is_needed = is_self_contained(script) and launch.ranks_per_node > 1  # the ranks must differ
    relies_on_it = is_needed and uses_argument and not knows_rank
    for call in script.calls(".add_argument"):
        flags = {text_of(each) for each in call.args} & {"--local_rank", "--local-rank"}
        is_required = constant(keyword(call, "required")) is True and not script.may_skip(call)
        is_passed = any(word.startswith(tuple(flags)) for word in launch.args)
        if flags and is_required and not is_passed:
            yield call, f"the script requires {min(flags)}"
        elif flags and not is_required and relies_on_it:
            yield call, "the local rank is read from an argument"


@rule(
    "lightning-size",
    "Lightning stops, or each rank trains alone: devices x num_nodes is not the job's world size",
    "set num_nodes to --nodes, and devices to the ranks of a node (--gpus-per-node)",
)
def _lightning_size(script: Script, launch: Launch) -> Iterator[Found]:
    names = [f"{package}.{kind}" for package in _LIGHTNING for kind in ("Trainer", "Fabric")]
    for call in script.certain_calls(*names):
        if not launch.is_sized or has_unknown_arguments(call) or call.args:
            continue  # the job's size is only assumed, or Lightning's is not known
        nodes = keyword(call, "num_nodes")
        count, ranks = constant(nodes) if nodes else 1, _devices(call, launch)
        if isinstance(count, int) and ranks and count * ranks != launch.world_size:
            yield call, f"Lightning uses {ranks} x {count} ranks, the job has {launch.world_size}"


def _devices(call: ast.Call, launch: Launch) -> int:
    """Return how many ranks of a node Lightning expects; 0 if that is not known."""
    given = keyword(call, "devices")
    if isinstance(given, ast.List):
        return len(given.elts)
    value = constant(given)
    if type(value) is int and value > 0:
        return value
    is_auto = given is None or value in (-1, "auto", "-1")
    is_plain = not (keyword(call, "plugins") or keyword(call, "accelerator"))
    return launch.ranks_per_node if is_auto and is_plain and launch.has_gpus else 0


@rule(
    "no-set-epoch",
    "without set_epoch(), the sampler shuffles every epoch in the same order",
    "call sampler.set_epoch(epoch) at the start of each epoch",
)
def _no_set_epoch(script: Script, launch: Launch) -> Iterator[Found]:
    if "set_epoch" in script.text or not _trains_for_epochs(script):
        return
    names = ("DistributedSampler", "distributed.DistributedSampler")
    for call in script.calls(*(f"torch.utils.data.{name}" for name in names)):
        shuffle = keyword(call, "shuffle")
        is_shuffled = shuffle is None or constant(shuffle) is True
        is_plain = not has_unknown_arguments(call) and len(call.args) < 4  # the 4th: shuffle
        is_of_validation = re.search("(?i)val|test", script.lines[call.lineno - 1])
        has_seed = keyword(call, "seed")  # which may change with the epoch
        if is_shuffled and is_plain and not (has_seed or is_of_validation):
            yield call, "the sampler's set_epoch() is never called"


@rule(
    "same-data-on-all-ranks",
    "each rank reads the whole dataset: an epoch costs as much as on one GPU",
    "pass sampler=DistributedSampler(dataset) instead of shuffle=True",
)
def _no_sampler(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2 or re.search(_SPLITS, script.text):
        return  # the script may divide the data itself
    if not any(script.calls(*DDP)) or not _trains_for_epochs(script):
        return
    for call in script.calls(*LOADER):
        if constant(keyword(call, "shuffle")) is True and not has_unknown_arguments(call):
            yield call, "the loader shuffles the whole dataset on each rank"


_SPLITS = (
    r"[Ss]ampler|shard|split_(?:dataset|between)|array_split|prepare\(|\brank\s*::|Subset"
    r"|\w\[[^\]\n{\"']*rank|\{rank\}\.\w|(?:[Dd]ata(?!Parallel)\w*|[Ll]oad\w*|[Ff]iles?)\([^)\n]*rank"
)


@rule(
    "different-splits",
    "each rank would split the data differently: some would train on what others validate on",
    "pass a seed: seed=0, or generator=torch.Generator().manual_seed(0) for random_split()",
)
def _different_splits(script: Script, launch: Launch) -> Iterator[Found]:
    is_seeded = re.search("seed|rng|random_state", script.text)
    if launch.world_size < 2 or is_seeded or not joins(script):
        return
    if not is_self_contained(script, also=TRAINING):
        return  # what else it imports may set a seed
    for call in script.calls_on_all_ranks(".train_test_split"):
        is_fixed = keyword(call, "generator") or keyword(call, "shuffle")  # shuffle may be False
        if not is_fixed and not has_unknown_arguments(call):
            yield call, "train_test_split() has no seed"
    for call in script.calls_on_all_ranks("torch.utils.data.random_split"):
        if len(call.args) == 2 and not call.keywords:
            yield call, "random_split() has no generator, and no seed is set"


@rule(
    "saves-on-all-ranks",
    "all ranks write the same file at once: it may be corrupted",
    "save on rank 0 only, or through clusterrun.runtime.Checkpoints",
)
def _saves_on_all_ranks(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2 or launch.is_sharded or not joins(script):
        return
    for call, path in _plain_saves(script):
        is_name = isinstance(path, ast.Name | ast.Attribute)  # of which nothing is known
        is_buffer = re.search("(?i)buf|bytesio", ast.unparse(path))
        if not (is_name or is_buffer or may_differ_between_ranks(script, path)):
            yield call, f"{script.name(call.func)}() runs on all ranks"


def _plain_saves(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield the calls on all ranks that write a file wherever they run, and the path."""
    for call in script.calls_on_all_ranks("torch.save"):
        path = call.args[1] if len(call.args) > 1 else keyword(call, "f")
        if path is not None:
            yield call, path
    if re.search(_SPLITS_MODEL, script.text):
        return  # all ranks must save a model that is split between them
    for call in script.calls_on_all_ranks(".save_pretrained"):
        path = call.args[0] if call.args else keyword(call, "save_directory")
        is_model = re.search("(?i)model", ast.unparse(call.func).removesuffix("save_pretrained"))
        is_guarded = keyword(call, "is_main_process") or keyword(call, "save_function")
        if path is not None and is_model and not is_guarded and not has_unknown_arguments(call):
            yield call, path


@rule(
    "starts-a-launcher",
    "clusterrun already starts the ranks: each would start the launcher once more",
    "submit the script that trains",
)
def _starts_launcher(script: Script, launch: Launch) -> Iterator[Found]:
    for line in launch.setup:
        if found := re.match(_LAUNCHERS, line.strip()):
            yield None, f"setup runs {found[1]}"
    for call in script.certain_calls(*_RUNS):
        words = (text_of(node) for node in ast.walk(call.args[0])) if call.args else ()
        if found := re.match(_LAUNCHERS, " ".join(filter(None, words))):
            yield call, f"the script runs {found[1]}"


@rule(
    "saves-on-one-machine",
    "the next attempt, or another node, does not see the files",
    "save into a directory that all nodes share",
)
def _saves_on_one_machine(script: Script, launch: Launch) -> Iterator[Found]:
    is_copied = re.search(_COPIES, script.text + " ".join(launch.args))
    if launch.nodes < 2 or launch.is_simulated or is_copied:
        return
    for name, value in pairs(launch.args):
        if re.fullmatch(_OUTPUT, name) and re.match(ONE_MACHINE, value):
            yield None, f"{name} {value} is on the node's own disk"
    for call in script.calls("torch.save", ".save_pretrained", ".save_state", ".save_checkpoint"):
        for path in map(text_of, call.args[:2]):
            if re.match(ONE_MACHINE, path) and script.text.count(path) == 1:  # it is not used again
                yield call, f"{path} is on the node's own disk"
    for call in script.calls(".TrainingArguments", ".SFTConfig", ".Trainer", ".ModelCheckpoint"):
        for name in ("output_dir", "default_root_dir", "dirpath"):
            path = text_of(keyword(call, name))
            if re.match(ONE_MACHINE, path):
                yield call, f"{path} is on the node's own disk"


_COPIES = (
    r"(?i)shutil|upload|push_to_hub|fsspec|boto|rsync|gsutil|s3|log_artifact|\bcp\b"
    r"|save_strategy\W+no\b"
)


@rule(
    "starts-over",
    "a restart would train from the beginning again",
    "load the newest checkpoint at the start: see docs/checkpoints.md",
)
def _starts_over(script: Script, launch: Launch) -> Iterator[Found]:
    resumes = any(re.match("-[^=]*resume", word) for word in launch.args)
    if resumes or launch.max_restarts < 1 or re.search(_RESUMES, script.text):
        return
    step = next(script.calls(".backward"), None)
    if step and is_self_contained(script):
        yield step, f"the script loads no checkpoint, and max_restarts is {launch.max_restarts}"


_RESUMES = r"(?i)\bload\(|load_|resum|restor|checkpoint|ckpt|snapshot|clusterrun"


@rule(
    "missing-file",
    "the job would wait in the queue, and then the ranks would not find the file",
    "correct the path; a relative path starts from the directory where you submit",
)
def _missing_file(script: Script, launch: Launch) -> Iterator[Found]:
    for path in launch.missing:  # of the accelerate YAML
        if path.rpartition("/")[2] in "\n".join((script.text, *launch.setup)):
            continue  # the script or setup may write it first
        yield None, f"your accelerate YAML names {path}, which does not exist"
    for call in script.certain_calls(*ARGUMENTS):
        path = text_of(keyword(call, "deepspeed"))
        is_only_read = "chdir" not in script.text and script.text.count(path) == 1
        if path.endswith(".json") and is_only_read and launch.is_missing(path):
            yield call, f"deepspeed names {path}, which does not exist"


# What the rules share


def joins(script: Script) -> bool:
    """Return whether the script joins the ranks itself, or has a library do it."""
    names = ("accelerate.Accelerator", "transformers.Trainer", "transformers.Seq2SeqTrainer")
    return any(script.calls(*DDP, INIT, *names, "deepspeed.initialize"))


_OF_ONE_RANK = "(?i)rank|host|pid|uuid|te?mp|time|node|process_index|random"


def may_differ_between_ranks(script: Script, node: ast.AST) -> bool:
    """Return whether an expression, or what its names stand for, may differ between ranks."""
    expressions, seen = [node], set[str]()
    while expressions:
        expression = expressions.pop()
        if re.search(_OF_ONE_RANK, ast.unparse(expression)):
            return True
        found = (n for n in ast.walk(expression) if isinstance(n, ast.Name | ast.Attribute))
        names = {script.name(n) for n in found} - seen
        seen |= names
        expressions += [value for name in names for value in script.values.get(name, ())]
    return False


_SPLITS_MODEL = "(?i)fsdp|fully_?shard|deepspeed|parallelism_?config|tp_plan|megatron"


def is_self_contained(script: Script, *, also: Collection[str] = ()) -> bool:
    """Return whether the whole training is in this file, as far as its imports show."""
    return script.packages <= KNOWN.union(also)


def _trains_for_epochs(script: Script) -> bool:
    """Return whether the whole training is in this file, and loops over several epochs."""
    if not is_self_contained(script):
        return False
    for loop in script.nodes:
        if isinstance(loop, ast.For) and "epoch" in ast.unparse(loop.target):
            bounds = loop.iter.args if isinstance(loop.iter, ast.Call) else []
            return [constant(bound) for bound in bounds] != [1]  # range(1) is no loop
    return False


_TEXT = r"(?:os\.)?(?:environ(?:\.get)?|getenv)[\[(]'(?:LOCAL_)?RANK'(?:, '?-?\d'?)?[\])]"
_NUMBER = rf"(?:(?:\w+\.)*(?:\w*rank|get_rank\(\))|int\({_TEXT}\))"
_MAIN = r"(?:\w+\.)*(?:is_main_process|is_local_main_process|is_master)"
_ONE_RANK = rf"{_NUMBER} == 0|not {_NUMBER}|{_TEXT} == '0'|{_MAIN}"
_NAMES_RANKS = "(?i)rank|main|master|primary|leader|chief|root"


def is_on_one_rank(script: Script, node: ast.AST, *, may_be_local: bool = True) -> bool:
    """Return whether the innermost `if` around a node chooses one rank, or one per node.

    One per node is enough if `may_be_local`. With an `else`, the other ranks may do the same there.
    """
    branch, child = next(script.branches(node), (None, None))
    if branch is None or child not in branch.body or branch.orelse:
        return False
    conditions = [branch.test]
    if isinstance(branch.test, ast.BoolOp) and isinstance(branch.test.op, ast.And):
        conditions = branch.test.values
    texts = (ast.unparse(each) for each in conditions)
    chosen = [text for text in texts if re.fullmatch(_ONE_RANK, text)]
    return any(may_be_local or "local" not in text.lower() for text in chosen)
