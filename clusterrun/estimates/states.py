"""Estimate the model's states on each GPU by strategy, and the communication buffers."""

from __future__ import annotations

from clusterrun.config.choices import Strategy
from clusterrun.errors import UsageError
from clusterrun.estimates.inputs import Model, Setup, Term, term

ZERO_12, ZERO_3 = "DeepSpeed 0.19 stage_1_and_2.py", "DeepSpeed 0.19 stage3.py"
ESTIMATORS = "DeepSpeed 0.19, estimate_zero*_model_states_mem_needs"
FSDP = "torch fully_shard as accelerate 1.15 prepares it"
# bitsandbytes, NF4 with double quantization: half a byte per weight, an 8-bit scale per 64 weights,
# a 32-bit scale per 256 of those scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
QLORA = "bitsandbytes NF4, double quantization; peft keeps the rest in fp32"
# Defaults of DeepSpeed's configuration, in elements.
REDUCE_BUCKET_SIZE = 500_000_000
STAGE3_MAX_LIVE_PARAMETERS = 1_000_000_000
NO_SYNC = "accelerate 1.15, accumulate(): FSDP reduces after the last pass of a step"


def adapter_params(model: Model, rank: int) -> int:
    """Return the parameters of LoRA adapters on all projections of attention and feed-forward.

    peft makes these for "all-linear", and fewer for a list of layers. It makes none for routed
    experts, which transformers 5 keeps as one tensor. Raises UsageError if the shape of the model
    is unknown.
    """
    if not rank:
        return 0
    if not model.has_shape:
        raise UsageError(
            "the size of LoRA's adapters depends on the model's shape",
            hint="add --hidden, --layers, --heads and --ffn, or pass --model",
        )
    attention = 2 * (model.hidden + model.query_width) + 2 * (model.hidden + model.key_value_width)
    ffn = model.ffn - model.experts_met * model.expert_ffn
    feed_forward = (3 if model.gated else 2) * (model.hidden + ffn) if ffn else 0
    return rank * ((model.layers + model.cross_layers) * attention + model.layers * feed_forward)


def trainable_params(setup: Setup) -> int:
    """Return the number of trained parameters: those of the adapters, else all."""
    return adapter_params(setup.model, setup.lora) or setup.model.params


def frozen_bytes(setup: Setup) -> tuple[float, str]:
    """Return the bytes of the weights that LoRA freezes, and their formula."""
    model, width = setup.model, setup.number_bytes
    if not setup.load_in_4bit:
        return width * model.params, f"{width} P"
    rest = model.params - model.linear_params
    return NF4_BYTES * model.linear_params + 4 * rest, f"{NF4_BYTES:.3g} P_4 + 4 (P - P_4)"


def symbols(setup: Setup) -> tuple[str, str]:
    """Return the trained parameters and their divisor in the notation of the formulas."""
    return "P_t" if setup.lora else "P", f"/{setup.shards}" if setup.shards > 1 else ""


def states(setup: Setup) -> tuple[Term, Term, Term]:
    """Return the weights, gradients and optimizer states that a GPU holds under the strategy."""
    if setup.strategy.is_deepspeed:
        return _zero_states(setup)
    trained, sharers = trainable_params(setup), setup.shards
    symbol, by = symbols(setup)
    frozen, formula = frozen_bytes(setup) if setup.lora else (0, "")
    each = setup.optimizer.state_bytes
    weights = _shared(f"{formula} + 4 P_t", by) if frozen else f"4 P{by}"
    source = FSDP if setup.strategy.is_fsdp else "accelerate keeps fp32, except for frozen weights"
    source = QLORA if setup.load_in_4bit else source
    on_gpu = 0 if setup.offloads_params else 1
    return (
        term("weights", on_gpu * (frozen + 4 * trained) / sharers, weights, source),
        term("gradients", on_gpu * 4 * trained / sharers, f"4 {symbol}{by}", source),
        term("optimizer", on_gpu * each * trained / sharers, f"{each} {symbol}{by}", source),
    )


def _shared(formula: str, by: str) -> str:
    return f"({formula}){by}" if by and "+" in formula else f"{formula}{by}"


def _zero_states(setup: Setup) -> tuple[Term, Term, Term]:
    """Return DeepSpeed's states; in half precision the sums are those of its own estimators.

    Gradients are counted as computed (whole in stage 1), and in fp32 for the optimizer's step. For
    stage 3 in half precision the estimator counts only the fp32 gradients.
    """
    stage = setup.strategy.stage
    width, each = setup.number_bytes, setup.optimizer.state_bytes
    trained, sharers = trainable_params(setup), setup.shards
    symbol, by = symbols(setup)
    kept, every = frozen_bytes(setup)
    if setup.lora:
        kept, every = kept + width * trained, f"{every} + {width} P_t"
    full = width if stage == 1 else 0
    shard = 4 if stage == 1 or (stage == 3 and setup.is_half) else width + 4
    gradients = f"{full} {symbol} + {shard} {symbol}{by}" if full else f"{shard} {symbol}{by}"
    weights = 0 if setup.offloads_params else kept / (sharers if stage == 3 else 1)
    on_gpu = 0 if setup.offloads_optimizer else 1
    return (
        term("weights", weights, _shared(every, by if stage == 3 else ""), ESTIMATORS),
        term("gradients", on_gpu * (full + shard / sharers) * trained, gradients, ESTIMATORS),
        term(
            "optimizer",
            on_gpu * (4 + each) * trained / sharers,
            f"{4 + each} {symbol}{by}",
            ESTIMATORS,
        ),
    )


def buffers(setup: Setup, bucket: int = REDUCE_BUCKET_SIZE) -> tuple[Term, ...]:
    """Return the buffers that the strategy needs to communicate."""
    if setup.strategy is Strategy.DDP and setup.world > 1:
        size, symbol = 4 * trainable_params(setup), symbols(setup)[0]
        return (term("gradient buckets", size, f"4 {symbol}", "torch DDP, gradients are copied"),)
    if setup.strategy.is_fsdp:
        width, symbol = setup.number_bytes, symbols(setup)[0]
        size = width * trainable_params(setup) if setup.accumulation > 1 else 0
        # Of a step's passes: FSDP reduces them after the last.
        summed = term("accumulated gradients", size, f"{width} {symbol}", NO_SYNC)
        return (*_fsdp_buffers(setup), summed)
    if setup.strategy.is_deepspeed:
        return _zero_buffers(setup, bucket)
    return ()


def _zero_buffers(setup: Setup, bucket: int) -> tuple[Term, ...]:
    width, model, is_zero3 = setup.number_bytes, setup.model, setup.strategy.stage == 3
    source = ZERO_3 if is_zero3 else ZERO_12
    reduce = term("reduce bucket", width * bucket, f"{width} reduce_bucket_size", source)
    if not is_zero3:
        size = 0 if setup.strategy.stage == 1 or setup.lora else width * model.largest_layer
        return (reduce, term("largest gradient", size, f"{width} L_max", ZERO_12))
    live = max(min(STAGE3_MAX_LIVE_PARAMETERS, model.params), 2 * model.largest_layer)
    formula = f"{width} max(min(stage3_max_live_parameters, P), 2 L_max)"
    return (reduce, term("gathered weights", width * live, formula, ZERO_3))


def _fsdp_buffers(setup: Setup) -> tuple[Term, ...]:
    """Return the gathered weights, and the gradients before they are sharded.

    At the peak the current block, the next one and all weights outside the blocks are gathered. A
    gradient exists twice: as computed and as sent.
    """
    model, width = setup.model, setup.number_bytes
    if not (model.block and model.layers):
        return ()
    outside = max(0, model.params - model.layers * model.block)
    graded, symbol = (
        (trainable_params(setup) // model.layers, "P_t/L")
        if setup.lora
        else (max(model.block, model.largest_layer), "max(U, L_max)")
    )
    return (
        term("gathered weights", width * (outside + 2 * model.block), f"{width} (E + 2 U)", FSDP),
        term("whole gradients", 2 * width * graded, f"{2 * width} {symbol}", FSDP),
    )
