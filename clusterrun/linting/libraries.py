"""The pitfalls of scripts that train with accelerate, Lightning or Weights & Biases."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from clusterrun.linting.rule import Found, Launch, rule
from clusterrun.linting.rules import branch_of_one_rank, is_conditional, joins
from clusterrun.linting.settings import section
from clusterrun.linting.source import Script, constant, has_unknown_arguments, keyword


@rule(
    "optimizer-twice",
    "accelerate refuses an optimizer or a scheduler that is both in the DeepSpeed JSON and in the "
    "script",
    "remove it from the DeepSpeed JSON, or create accelerate.utils.DummyOptim and DummyScheduler",
)
def _optimizer_twice(script: Script, launch: Launch) -> Iterator[Found]:
    if (
        "accelerate" not in script.packages
        or not any(script.calls(".prepare"))
        or "Dummy" in script.text
    ):
        return
    for key, beginning in (("optimizer", "torch.optim."), ("scheduler", "torch.optim.lr_")):
        calls = (call for call in _calls_of(script, beginning) if key in launch.deepspeed)
        for call in calls:
            is_scheduler = "lr_scheduler" in script.name(call.func)
            if is_scheduler == (key == "scheduler") and not is_conditional(script, call):
                yield call, f"the DeepSpeed JSON has {key}, and so has the script"
                break


def _calls_of(script: Script, beginning: str) -> Iterator[ast.Call]:
    for node in script.nodes:
        if isinstance(node, ast.Call) and script.name(node.func).startswith(beginning):
            yield node


@rule(
    "cannot-gather-weights",
    "accelerator.get_state_dict() fails at the end of the training: ZeRO-3 may not gather the "
    "weights",
    'write "stage3_gather_16bit_weights_on_model_save": true into zero_optimization, or '
    "zero3_save_16bit_model: true into deepspeed_config",
)
def _cannot_gather(script: Script, launch: Launch) -> Iterator[Found]:
    of_json = section(launch.deepspeed, "zero_optimization")
    of_yaml = section(launch.accelerate, "deepspeed_config")
    is_json = of_json.get("stage") == 3
    may = of_json.get("stage3_gather_16bit_weights_on_model_save") is True
    if not is_json and not launch.deepspeed:
        is_json, may = of_yaml.get("zero_stage") == 3, of_yaml.get("zero3_save_16bit_model") is True
    if is_json and not may and "accelerate" in script.packages:
        for call in script.calls(".get_state_dict"):
            tests = (getattr(each, "test", None) for each in script.around(call))
            if not any("fsdp" in ast.unparse(test).lower() for test in tests if test):
                yield call, "get_state_dict() is called"


@rule(
    "trains-on-cpu",
    "the job has GPUs, and the script does not use them",
    "remove it, or pass --device cpu",
)
def _trains_on_cpu(script: Script, launch: Launch) -> Iterator[Found]:
    switches = {
        "accelerate.Accelerator": ("cpu",),
        "transformers.TrainingArguments": ("use_cpu", "no_cuda"),
    }
    for name, words in switches.items() if launch.has_gpus else ():
        for call in script.calls(name):
            for word in words:
                if constant(keyword(call, word)) is True and not is_conditional(script, call):
                    yield call, f"{word}=True is passed"


_LIGHTNING = ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.fabric")


@rule(
    "lightning-size",
    "Lightning stops, or trains a model on each rank: devices x num_nodes is not the job's size",
    "pass the job's num_nodes and devices",
)
def _lightning_size(script: Script, launch: Launch) -> Iterator[Found]:
    names = [f"{package}.{kind}" for package in _LIGHTNING for kind in ("Trainer", "Fabric")]
    for call in script.calls(*names):
        nodes, devices = keyword(call, "num_nodes"), keyword(call, "devices")
        is_other = keyword(call, "plugins") or keyword(call, "accelerator")
        if has_unknown_arguments(call) or is_conditional(script, call) or call.args:
            continue
        count = constant(nodes) if nodes else 1
        each = _devices(devices, launch, is_plain=not is_other)
        if isinstance(count, int) and each and count * each != launch.world_size:
            yield call, f"devices x num_nodes is {each} x {count}, the job has {launch.world_size}"


def _devices(given: ast.expr | None, launch: Launch, *, is_plain: bool) -> int:
    """Return how many ranks of a node Lightning expects; 0 if that is not known."""
    if isinstance(given, ast.List):
        return len(given.elts)
    value = constant(given)
    if type(value) is int and value > 0:
        return value
    is_auto = given is None or value in (-1, "auto", "-1")
    return launch.ranks_per_node if is_auto and is_plain and launch.has_gpus else 0


# Weights & Biases


@rule(
    "wandb-run-per-rank",
    "each rank would start a run of its own in Weights & Biases",
    "call wandb.init() on rank 0 only, or pass group=",
)
def _wandb_runs(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.world_size < 2 or not joins(script):
        return
    for call in _wandb_calls(script):
        if not keyword(call, "group") and not script.may_be_chosen(call):
            yield call, "wandb.init() is called on all ranks"


@rule(
    "wandb-without-key",
    "wandb.init() asks for a key, and a job has no terminal: it fails",
    "run wandb login, pass --pass-env WANDB_API_KEY, or --env WANDB_MODE=offline",
)
def _wandb_key(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.has_wandb_key or any(script.calls("wandb.login")):
        return
    for call in _wandb_calls(script):
        yield call, "no key of Weights & Biases was found"


def _wandb_calls(script: Script) -> Iterator[ast.Call]:
    """Yield what certainly starts an online run."""
    if "WANDB_" in script.text:
        return
    for call in script.calls("wandb.init"):
        is_plain = keyword(call, "mode") is None and not has_unknown_arguments(call)
        branch = next(each for each in script.around(call) if isinstance(each, ast.If | ast.Module))
        is_plain_branch = isinstance(branch, ast.If) and not isinstance(branch.test, ast.BoolOp)
        at = branch if is_plain_branch and branch_of_one_rank(script, call) else call
        if is_plain and not is_conditional(script, at):
            yield call
