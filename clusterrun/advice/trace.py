"""Trace a model: build it from its config, and record what its forward pass saves.

Weights and activations are FakeTensors, which have sizes and no memory. Tokens and positions are
real: transformers reads their values, and from fake ones makes masks that no training has.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

from clusterrun.errors import UsageError
from clusterrun.estimates import experts
from clusterrun.estimates.activations import Activations, Arithmetic, arithmetic
from clusterrun.estimates.estimate import Question
from clusterrun.estimates.inputs import Setup

FEW, MANY = 1, 3  # layers of the models that are built
WITHOUT: Final = "omit --trace to estimate with formulas"
# Keys of a config about how a model was trained or is loaded, not about its shape.
LOADING: Final = (
    *("dtype", "torch_dtype", "attn_implementation", "_attn_implementation"),
    *("auto_map", "quantization_config", "use_cache"),
)
ATTENTION_DROPOUT: Final = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
WIDEST_MASK: Final = 8192  # tokens; masks are real, and grow with the square
# Steps of autograd that change only the type or the order of a weight.
COPIES: Final = ("ToCopyBackward0", "TBackward0", "TransposeBackward0")


class Line(NamedTuple):
    """The bytes that a model of n layers saves: `outside` + n x `each`."""

    each: float
    outside: float


def traced(question: Question, values: Mapping[str, Any]) -> Question:
    """Trace a forward pass of a config.json's model, and add what it saves to the question.

    Raises UsageError if torch or transformers is missing, or the model can't be built or trained
    as requested.
    """
    setup = question.setup
    if not setup.seq_len:
        raise UsageError("--trace needs the length of a sample", hint="pass --seq-len")
    if setup.lora:
        raise UsageError("--trace does not support LoRA", hint=WITHOUT)
    if setup.parallel.model > 1:
        raise UsageError("--trace does not support tensor, context or sequence sizes", hint=WITHOUT)
    versions = _versions()
    _refuse_config(values, setup)
    whole = _line(values, setup)
    kept = _line(values, setup, recomputes=True) if setup.grad_ckpt else whole
    elements = setup.micro_batch * setup.seq_len * setup.model.hidden
    found = Activations(
        block=whole.each / elements,
        kept=kept.each / elements,
        outside=kept.outside / elements,
        source=f"traced on a CPU with {FEW} and {MANY} layers, {versions}",
        is_traced=True,
    )
    return replace(question, traced=found)


def _line(values: Mapping[str, Any], setup: Setup, *, recomputes: bool = False) -> Line:
    few, many = (
        traced_bytes(values, setup, layers=layers, recomputes=recomputes) for layers in (FEW, MANY)
    )
    each = (many - few) / (MANY - FEW)
    return Line(each, few - FEW * each)


def traced_bytes(
    values: Mapping[str, Any], setup: Setup, *, layers: int, recomputes: bool = False
) -> int:
    """Return the bytes that a rank's model with `layers` layers saves in a forward pass."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with _asking():
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = model_of(values, setup, layers=layers, recomputes=recomputes)
        words = torch.zeros(setup.micro_batch, setup.seq_len, dtype=torch.long)
        return saved_bytes(model, words, autocasts=arithmetic(setup) is Arithmetic.AUTOCAST)


def saved_bytes(model: Any, words: Any, *, autocasts: bool) -> int:
    """Return the bytes that autograd saves in a forward pass, without weights and their casts.

    `words` has the shape (sequences, tokens). A shared storage counts once. Without labels there
    is no loss, and no logits are saved.
    """
    import torch

    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    storages: dict[int, Any] = {}  # kept alive, so that no address is reused

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and not _is_cast_weight(tensor):
            storages[storage._cdata] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocasts),
    ):
        model(input_ids=words)
    return sum(storage.nbytes() for storage in storages.values())


def _is_cast_weight(tensor: Any) -> bool:
    """Return whether a tensor is autocast's copy of a weight, which another term counts."""
    step = tensor.grad_fn
    while step is not None and step.name() in COPIES:
        step = step.next_functions[0][0]
    return hasattr(step, "variable")  # the step that adds up a weight's gradient


# The model


def model_of(
    values: Mapping[str, Any], setup: Setup, *, layers: int, recomputes: bool = False
) -> Any:
    """Build the causal model of a config with `layers` layers, in the planned precision."""
    import torch
    import transformers

    dtype = torch.bfloat16 if arithmetic(setup) is Arithmetic.HALF else torch.float32
    # `torch_dtype` is the older name of `dtype`; some 4.x versions know only the older one
    model = transformers.AutoModelForCausalLM.from_config(
        _config(values, layers), torch_dtype=dtype, trust_remote_code=False
    ).train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _config(values: Mapping[str, Any], layers: int = 0) -> Any:
    """Return transformers' config of a config.json, with `layers` layers if given.

    Lists with a value per layer are cut or repeated: all layers are alike.
    """
    import transformers

    family = transformers.CONFIG_MAPPING[values["model_type"]]
    shape = {key: value for key, value in values.items() if key not in LOADING}
    if layers:
        key = family.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        lists = {k: v for k, v in shape.items() if isinstance(v, list) and len(v) == shape.get(key)}
        shape |= {name: (value * layers)[:layers] for name, value in lists.items()} | {key: layers}
    config = family.from_dict({**shape, "use_cache": False})
    for key in ATTENTION_DROPOUT:
        if hasattr(config, key):
            setattr(config, key, 0.0)  # CPU kernels keep its mask, fused GPU kernels do not
    return config


@contextmanager
def _asking() -> Iterator[None]:
    """Call transformers quietly; report any failure as a UsageError."""
    silenced = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # a config can cause any
        first_line = (str(error).splitlines() or [""])[0]
        raise UsageError(
            "the model can't be traced", cause=f"{type(error).__name__}: {first_line}", hint=WITHOUT
        ) from error
    finally:
        logging.disable(silenced)


# Refusals


def _versions() -> str:
    """Import what is needed, and return its versions."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(
            "--trace needs torch and transformers",
            cause=str(error),
            hint="pip install torch transformers, or omit --trace",
        ) from error
    return f"transformers {transformers.__version__}, torch {torch.__version__}"


def _refuse_config(values: Mapping[str, Any], setup: Setup) -> None:
    """Refuse models without a causal class in transformers, or that few layers don't represent."""
    config = _known_config(values)
    if any(getattr(config, key, None) for key in experts.COUNTS):
        raise UsageError("mixture-of-experts models can't be traced", hint=WITHOUT)
    if not setup.model.has_shape:
        raise UsageError(
            "--trace needs the model's shape",
            hint="pass --hidden, --layers, --heads and --ffn with --params",
        )
    layers, hidden = (getattr(config, x, None) for x in ("num_hidden_layers", "hidden_size"))
    if (layers, hidden) != (setup.model.layers, setup.model.hidden):
        raise UsageError(
            f"the config has {layers} layers of width {hidden}, the options "
            f"{setup.model.layers} of {setup.model.hidden}",
            hint="leave out the options, or pass the config's numbers",
        )
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1:
        raise UsageError(f"--trace needs layers of one kind, not {', '.join(kinds)}", hint=WITHOUT)
    _refuse_length(config, setup.seq_len)


def _known_config(values: Mapping[str, Any]) -> Any:
    import transformers

    family = values.get("model_type")
    if family not in transformers.CONFIG_MAPPING:
        own = ", and the config's own code is never run" if values.get("auto_map") else ""
        raise UsageError(f"transformers has no models of type '{family}'{own}", hint=WITHOUT)
    with _asking():
        config = _config(values)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(f"'{family}' models are not causal language models", hint=WITHOUT)
    return config


def _refuse_length(config: Any, seq_len: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise UsageError(
            f"samples of {seq_len:,} tokens are longer than the model's {longest:,}",
            hint="lower --seq-len, or raise max_position_embeddings in the config",
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < seq_len > WIDEST_MASK:
        raise UsageError(
            f"samples of {seq_len:,} tokens are longer than the window of {window:,}: the mask "
            "that transformers makes is too large to trace",
            hint=WITHOUT,
        )
