"""Find the size and shape of a model from numbers or from a name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from clusterrun.errors import UsageError
from clusterrun.estimates.inputs import Model
from clusterrun.shared import assets
from clusterrun.shared.typed import decoded


def from_numbers(given: Model) -> Model:
    """Complete a model of which the parameters, the shape, or both are given.

    Without `params` the whole shape is needed, and its parameters are counted as in Llama. With
    both, blocks have a gate as in Llama if they then fit into `params`. `kv_heads` 0 means `heads`.
    """
    if given.active_params > given.params:
        text = f"--active-params {given.active_params} is more than --params {given.params}"
        hint = "--params counts all parameters, --active-params those that a token uses"
        raise UsageError(text, hint=hint)
    needed = ("hidden", "layers", "heads", "ffn", "vocab")
    missing = [f"--{name}" for name in needed if not getattr(given, name)]
    if not given.params and missing:
        text = f"the size of the model is unknown: {', '.join(missing)} missing"
        raise UsageError(text, hint="add them, or pass the number of parameters: --params 8e9")
    shape = replace(given, kv_heads=given.kv_heads or given.heads)
    is_shape_known = shape.hidden and shape.layers and shape.heads and shape.ffn
    return _with_block(shape) if is_shape_known else shape


def _with_block(shape: Model) -> Model:
    """Add what a shape determines; assume a gated feed-forward (3 matrices) if it fits `params`."""
    hidden, ffn, layers, params = shape.hidden, shape.ffn, shape.layers, shape.params
    # The matrices of queries and outputs, and those of keys and values.
    attention = 2 * hidden * (hidden + hidden * shape.kv_heads // shape.heads)
    norms, matrix = 2 * hidden, hidden * ffn
    has_gate = not params or layers * (attention + norms + 3 * matrix) <= params
    block = attention + norms + (3 if has_gate else 2) * matrix
    if params and layers * block > params:
        block_sizes = f"{layers} layers of --hidden {hidden} and --ffn {ffn}"
        text = f"{block_sizes} have more parameters than --params {params}"
        hint = "leave out --params, or --hidden, --layers, --heads and --ffn"
        raise UsageError(text, hint=hint)
    embedding = shape.vocab * hidden
    return replace(
        shape,
        params=params or layers * block + 2 * embedding + hidden,  # input, output, last norm
        largest_layer=max(embedding, matrix, hidden * hidden),
        block=block,
        linear_params=layers * block,
        gated=has_gate,
    )


_TABLE: Final[Mapping[str, Any]] = assets.read_json("estimates/models.json")["models"]
BUILT_IN: Final[Mapping[str, Model]] = {
    name: decoded(Model, {"name": name, **entry["shape"]}) for name, entry in _TABLE.items()
}
# Endings of repository names that change no shape: of fine-tuned models, and of storage formats.
_VARIANT = re.compile(r"(-(hf|chat|instruct|it|pt|base|thinking|reasoning|fp8|bf16|2507))+$")


def find(name: str) -> Model | None:
    """Return a built-in model by one of its usual names, in any case; else None."""
    names = _names()
    built_in = names.get(name.lower()) or names.get(_without_variant(name))
    return replace(BUILT_IN[built_in], name=name) if built_in else None


def nearest(name: str) -> list[str]:
    """Return up to two built-in names that begin with `name`, or the two most similar ones."""
    plain = _without_variant(name).rpartition("/")[2]
    longer = [known for known in BUILT_IN if plain and known.startswith(plain)]
    return longer[:2] or difflib.get_close_matches(plain, list(BUILT_IN), n=2, cutoff=0.75)


def _without_variant(name: str) -> str:
    return _VARIANT.sub("", name.lower())


@cache
def _names() -> Mapping[str, str]:
    """Map each usual name, in lower case, with and without the owner, to its built-in name."""
    names: dict[str, str] = {}
    for built_in, entry in _TABLE.items():
        names[built_in] = built_in
        for full in map(str.lower, entry["repos"]):
            owner, _, short = full.partition("/")
            variants = (_without_variant(full), _without_variant(short))
            for usual in (full, short, *variants, f"{owner}/{built_in}"):
                names.setdefault(usual, built_in)
    return names
