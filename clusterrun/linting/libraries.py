"""The pitfalls of scripts that use Lightning or Weights & Biases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from clusterrun.linting.rule import Found, Launch, rule
from clusterrun.linting.rules import TRAINING, is_closed, is_conditional, joins, one_rank_is_enough
from clusterrun.linting.source import Script, constant, has_unknown_arguments, keyword

_LIGHTNING = ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.fabric")


@rule(
    "lightning-size",
    "Lightning stops, or trains a model on each rank: devices x num_nodes is not the job's size",
    "pass the job's num_nodes and devices",
)
def _lightning_size(script: Script, launch: Launch) -> Iterator[Found]:
    names = [f"{package}.{kind}" for package in _LIGHTNING for kind in ("Trainer", "Fabric")]
    for call in script.calls(*names) if launch.is_sized else ():
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
    variables = " ".join((*launch.inherited, *launch.env, *launch.setup))
    is_chosen = re.search("WANDB_(?:MODE|DISABLED|RUN_)", variables)
    if launch.world_size < 2 or is_chosen or not joins(script):
        return
    for call in _wandb_calls(script):
        if not (keyword(call, "group") or keyword(call, "id")) and not script.may_be_chosen(call):
            yield call, "wandb.init() is called on all ranks"


@rule(
    "wandb-without-key",
    "wandb.init() asks for a key, and a job has no terminal",
    "run wandb login, pass --pass-env WANDB_API_KEY, or --env WANDB_MODE=offline",
)
def _wandb_key(script: Script, launch: Launch) -> Iterator[Found]:
    is_closed_but = is_closed(script, also=TRAINING)
    is_given = re.search(r"(?i)environ(?:\.update|\[\w)|netrc|dotenv|secret|api_key", script.text)
    if launch.has_wandb_key or any(script.calls("wandb.login")) or is_given or not is_closed_but:
        return
    for call in _wandb_calls(script):
        yield call, "no key of Weights & Biases was found here"


def _wandb_calls(script: Script) -> Iterator[ast.Call]:
    """Yield what certainly starts an online run."""
    if "WANDB_" in script.text:
        return
    for call in script.calls("wandb.init"):
        chosen = any(keyword(call, name) for name in ("mode", "settings", "anonymous"))
        is_plain = not chosen and not has_unknown_arguments(call)
        if is_plain and not is_conditional(script, one_rank_is_enough(script, call)):
            yield call
