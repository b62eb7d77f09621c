"""Estimate the memory of a training: of each GPU, and of each node's host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

from clusterrun.config.choices import Optimizer, Strategy
from clusterrun.estimates.inputs import GIB, Setup, Term, term, total

CONTEXT = "CUDA and NCCL"
CUDA_BYTES = GIB * 3 // 2
PROCESS_BYTES = 3 * GIB
CPU_PROCESS_BYTES = GIB // 2
BUFFER_FACTOR = 1.5  # of all host memory, the default of DeepSpeed's estimators
# Measured over estimated: one or two ranks of examples/train_lm.py took 0.63 to 1.03, with 0.5 to
# 171 million parameters, under ddp, zero2 and zero3 in fp32.
CPU_BAND = (0.6, 1.1)


def gpu_terms(setup: Setup) -> tuple[Term, ...]:
    """Return the parts of a GPU's peak memory; omit those of an unknown shape or sample length."""
    setup = setup.of_gpu
    always = (*states(setup), *buffers(setup))
    in_passes = (_cast_weights(setup), _dequantized(setup), *activation_terms(setup))
    # The step of AdamW reuses the memory that the passes before it freed, and may need more.
    is_adamw = setup.optimizer is Optimizer.ADAMW and not setup.offloads_optimizer
    symbol, divisor = symbols(setup)
    adamw_bytes = 4 * setup.trained / setup.shards if is_adamw else 0
    formula = f"max(0, 4 {symbol}{divisor} - activations)"
    source = "torch AdamW, foreach: a copy of one state for all"
    step = term("optimizer step", max(0, adamw_bytes - total(in_passes)), formula, source)
    context = term(CONTEXT, CUDA_BYTES, "1.5 GiB", "an allowance; 0.3 to 2 GiB seen")
    return _without_empty((*always, *in_passes, step, context))


def _without_empty(terms: Iterable[Term]) -> tuple[Term, ...]:
    return tuple(term for term in terms if term.bytes)


def _cast_weights(setup: Setup) -> Term:
    """Return the 16-bit copies that autocast keeps of fp32 weights."""
    size = 2 * setup.trained if arithmetic(setup) is Arithmetic.AUTOCAST else 0
    return term("cast weights", size, f"2 {symbols(setup)[0]}", "torch autocast, its cache")


def _dequantized(setup: Setup) -> Term:
    """Return the largest 4-bit layer of a block in 16 bits: bitsandbytes computes with copies."""
    model = setup.model
    size = setup.number_bytes * model.hidden * max(model.ffn, model.query_width)
    formula = f"{setup.number_bytes} h max(f h, q)"
    source = "bitsandbytes, MatMul4Bit"
    return term("dequantized layer", size if setup.load_in_4bit else 0, formula, source)


def cpu_terms(setup: Setup) -> tuple[Term, ...]:
    """Return what a node's host memory holds in a training on CPUs; see CPU_BAND."""
    setup = setup.of_gpu
    if setup.offloads_optimizer:  # offloading changes nothing on CPUs
        strategy = Strategy.simplest(setup.strategy.engine, setup.strategy.stage)
        setup = replace(setup, strategy=strategy)
    bucket = min(REDUCE_BUCKET_SIZE, setup.model.params)  # only pages in use take memory
    ranks, width = setup.procs_per_node, setup.number_bytes
    # The C library's allocator keeps the memory of the weights that ZeRO-3 releases.
    is_zero3 = setup.strategy.is_deepspeed and setup.strategy.stage == 3
    size = width * setup.model.params if is_zero3 else 0
    kept = term("not given back", size, f"{width} P", "measured")
    parts = (*states(setup), *buffers(setup, bucket), kept, _cast_weights(setup))
    of_rank = (*parts, *activation_terms(setup))
    of_node = (replace(x, bytes=ranks * x.bytes, formula=f"n ({x.formula})") for x in of_rank)
    processes = term("processes", ranks * CPU_PROCESS_BYTES, "n x 0.5 GiB", "measured")
    return _without_empty((processes, *of_node))


def host_terms(setup: Setup) -> tuple[Term, ...]:
    """Return the parts of a node's peak host memory: while the model is loaded, or later.

    Under ZeRO-3 weights are loaded in shards: from_pretrained does so with our configs.
    """
    size = setup.procs_per_node * PROCESS_BYTES
    processes = term("processes", size, "n x 3 GiB", "an allowance for torch, CUDA")
    model = _zero_host(setup) if setup.strategy.is_deepspeed else _plain_host(setup)
    return _without_empty((processes, model))


def _loaded_model(setup: Setup) -> tuple[int, str]:
    """Return the bytes of the whole model that one process loads, and their formula."""
    if not setup.lora:
        return 4 * setup.model.params, "4 P"
    size = setup.number_bytes * setup.model.params + 4 * setup.trained
    return size, f"({setup.number_bytes} P + 4 P_t)"


def _plain_host(setup: Setup) -> Term:
    """Return the copies of the model while it is loaded; under fsdp-offload also the states."""
    loaded, formula = _loaded_model(setup.of_gpu)
    source = "cpu_ram_efficient_loading: one process of a node loads"
    if not setup.strategy.is_fsdp or setup.parallel.tensor > 1:
        loaded, formula = setup.procs_per_node * loaded, f"n {formula}"
        source = "each process loads it"
    if not setup.offloads_params:
        return term("model while loading", loaded, formula, source)
    width, per_trained, replicas = setup.number_bytes, _state_bytes(setup), setup.sizes.replicate
    frozen = width * setup.model.params if setup.lora else 0
    # All replicas are spread evenly over the nodes.
    states = (frozen + per_trained * setup.trained) * replicas / setup.nodes
    states_formula = f"({width} P + {per_trained} P_t)/M" if setup.lora else f"{per_trained} P/M"
    copies = f"{replicas} x " if replicas > 1 else ""
    formula = f"{copies}{states_formula} + {formula}"
    return term("states and model while loading", states + loaded, formula, source)


def _zero_host(setup: Setup) -> Term:
    """Return DeepSpeed's estimate; for ZeRO-2 with offload, the one for a job of one node."""
    is_zero3, ranks = setup.strategy.stage == 3, setup.procs_per_node
    model_bytes, formula = _loaded_model(setup)
    size, formula = float(ranks * model_bytes), f"n {formula}"
    name = "offloaded states" if setup.offloads_optimizer else "model while loading"
    if setup.offloads_optimizer:
        states, states_formula = _offloaded(setup)
        size, formula = max(size, states), f"max({formula}, {states_formula})"
        if is_zero3:
            size, formula = states / setup.nodes, f"{states_formula}/M"
    elif is_zero3:  # weights are loaded in shards
        size, formula = 4 * setup.model.largest_layer * ranks, "4 L_max n"
    return term(name, size * BUFFER_FACTOR, f"{formula} x 1.5", ESTIMATORS)


def _offloaded(setup: Setup) -> tuple[int, str]:
    """Return the bytes that all nodes offload and their formula; under ZeRO-3 also the weights."""
    trained, width, per_trained = setup.trained, setup.number_bytes, _state_bytes(setup)
    if not setup.offloads_params:
        return per_trained * trained, f"{per_trained} {symbols(setup)[0]}"
    if setup.lora:
        size = width * (setup.model.params + trained) + per_trained * trained
        return size, f"({width} (P + P_t) + {per_trained} P_t)"
    return (width + per_trained) * trained, f"{width + per_trained} P"


def _state_bytes(setup: Setup) -> int:
    """Return the bytes of a trained parameter's fp32 weight, gradient and states."""
    return 8 + setup.optimizer.state_bytes


FP32 = 4
RANDOM_BYTES = 14_500  # random_states_<rank>.pkl: Python's, NumPy's and torch's generators
SCRIPTS_BYTES = 41_000  # zero_to_fp32.py and zero_to_torch.py, which DeepSpeed adds


def checkpoint_terms(setup: Setup) -> tuple[Term, ...]:
    """Return the sizes of one checkpoint's groups of files; omit a group without bytes.

    DDP and FSDP save fp32 weights and states in any precision. FSDP saves one copy in shards even
    if it replicates them; the 2 kB that its writer adds per tensor and rank are not counted. ZeRO
    saves the fp32 weights with the optimizer's states. Stages 1 and 2 write the weights once more
    in the precision of the forward pass. Stage 3 does so only in `save_model`, which HF's Trainer
    calls: the Trainer's checkpoints hold one more copy than counted here.

    With LoRA only what peft and HF's Trainer write is counted: the adapters. accelerate's
    `save_state` also writes the frozen weights.
    """
    weight_bytes, optimizer_bytes = FP32, setup.optimizer.state_bytes  # of a trained parameter
    if setup.strategy.is_deepspeed:
        copies = 1 if setup.strategy.stage < 3 else 0
        copies += 1 if setup.lora else 0  # peft's own file of the adapters
        weight_bytes, optimizer_bytes = copies * setup.number_bytes, FP32 + optimizer_bytes
    weights = _per_parameter("weights", setup, weight_bytes)
    optimizer = _per_parameter("optimizer", setup, optimizer_bytes)
    return _without_empty((weights, optimizer, _random_states(setup)))


def best_terms(setup: Setup, kept: int) -> tuple[Term, ...]:
    """Return the size of the `kept` best checkpoints: they hold only fp32 weights."""
    size = FP32 * kept * setup.trained
    formula = f"{kept} x {FP32} {symbols(setup)[0]}"
    return _without_empty([term("weights of the best", size, formula, "safetensors")])


def _per_parameter(name: str, setup: Setup, width: int) -> Term:
    """Return the files with `width` bytes of each trained parameter."""
    writer = "DeepSpeed save_checkpoint" if setup.strategy.is_deepspeed else "accelerate save_state"
    source = "peft and HF's Trainer" if setup.lora else writer
    return term(name, width * setup.trained, f"{width} {symbols(setup)[0]}", source)


def _random_states(setup: Setup) -> Term:
    """Return the files of random states; scaler, scheduler and counters add only 1 or 2 kB."""
    scripts = SCRIPTS_BYTES if setup.strategy.is_deepspeed else 0
    formula = "14.5 kB x ranks" + (" + 41 kB" if scripts else "")
    source = "measured: accelerate 1.15" + (", DeepSpeed 0.19.8" if scripts else "")
    size = RANDOM_BYTES * setup.world + scripts
    return term("random numbers, scaler, scheduler", size, formula, source)


# The states of the model on a GPU, by strategy, and the buffers to communicate

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


def frozen_bytes(setup: Setup) -> tuple[float, str]:
    """Return the bytes of the weights that LoRA freezes, and their formula."""
    model, width = setup.model, setup.number_bytes
    if not setup.load_in_4bit:
        return width * model.params, f"{width} P"
    rest = model.params - model.linear_params
    return NF4_BYTES * model.linear_params + 4 * rest, f"{NF4_BYTES:.3g} P_4 + 4 (P - P_4)"


def symbols(setup: Setup) -> tuple[str, str]:
    """Return what formulas call the trained parameters, and their division by shards: P, /8."""
    return "P_t" if setup.lora else "P", f"/{setup.shards}" if setup.shards > 1 else ""


def states(setup: Setup) -> tuple[Term, Term, Term]:
    """Return the weights, gradients and optimizer states that a GPU holds under the strategy."""
    if setup.strategy.is_deepspeed:
        return _zero_states(setup)
    trained, ranks = setup.trained, setup.shards
    symbol, divisor = symbols(setup)
    frozen, frozen_formula = frozen_bytes(setup) if setup.lora else (0, "")
    width = setup.optimizer.state_bytes
    weights = _divided(f"{frozen_formula} + 4 P_t", divisor) if frozen else f"4 P{divisor}"
    source = FSDP if setup.strategy.is_fsdp else "accelerate keeps fp32, except for frozen weights"
    source = QLORA if setup.load_in_4bit else source
    on_gpu = 0 if setup.offloads_params else 1
    return (
        term("weights", on_gpu * (frozen + 4 * trained) / ranks, weights, source),
        term("gradients", on_gpu * 4 * trained / ranks, f"4 {symbol}{divisor}", source),
        term("optimizer", on_gpu * width * trained / ranks, f"{width} {symbol}{divisor}", source),
    )


def _divided(formula: str, divisor: str) -> str:
    return f"({formula}){divisor}" if divisor and "+" in formula else f"{formula}{divisor}"


def _zero_states(setup: Setup) -> tuple[Term, Term, Term]:
    """Return DeepSpeed's states; in half precision the sums are those of its own estimators.

    Gradients are counted as computed (whole in stage 1), and in fp32 for the optimizer's step. For
    stage 3 in half precision the estimator counts only the fp32 gradients.
    """
    stage, is_zero3 = setup.strategy.stage, setup.strategy.stage == 3
    width, optimizer_width = setup.number_bytes, 4 + setup.optimizer.state_bytes  # 4: fp32 weight
    trained, ranks = setup.trained, setup.shards
    symbol, divisor = symbols(setup)
    size, formula = frozen_bytes(setup)
    if setup.lora:
        size, formula = size + width * trained, f"{formula} + {width} P_t"
    # Bytes of a parameter's gradient: in a copy that is not sharded, and in shards.
    whole = width if stage == 1 else 0
    sharded = 4 if stage == 1 or (is_zero3 and setup.is_half) else width + 4
    gradients = (f"{whole} {symbol} + " if whole else "") + f"{sharded} {symbol}{divisor}"
    optimizer = f"{optimizer_width} {symbol}{divisor}"
    weights = 0 if setup.offloads_params else size / (ranks if is_zero3 else 1)
    on_gpu = 0 if setup.offloads_optimizer else 1
    return (
        term("weights", weights, _divided(formula, divisor if is_zero3 else ""), ESTIMATORS),
        term("gradients", on_gpu * (whole + sharded / ranks) * trained, gradients, ESTIMATORS),
        term("optimizer", on_gpu * optimizer_width * trained / ranks, optimizer, ESTIMATORS),
    )


def buffers(setup: Setup, bucket: int = REDUCE_BUCKET_SIZE) -> tuple[Term, ...]:
    """Return a GPU's buffers for communication; ZeRO's reduce bucket has `bucket` elements."""
    width, symbol = setup.number_bytes, symbols(setup)[0]
    if setup.strategy is Strategy.DDP and setup.world > 1:
        source = "torch DDP, gradients are copied"
        return (term("gradient buckets", 4 * setup.trained, f"4 {symbol}", source),)
    if setup.strategy.is_fsdp:
        # Whole gradients are kept during accumulation: FSDP reduces after the last pass of a step.
        size = width * setup.trained if setup.accumulation > 1 else 0
        summed = term("accumulated gradients", size, f"{width} {symbol}", NO_SYNC)
        return (*_fsdp_buffers(setup), summed)
    if setup.strategy.is_deepspeed:
        return _zero_buffers(setup, bucket)
    return ()


def _zero_buffers(setup: Setup, bucket: int) -> tuple[Term, ...]:
    """Return the reduce bucket, and the largest gradient or, in stage 3, the gathered weights."""
    width, model, is_zero3 = setup.number_bytes, setup.model, setup.strategy.stage == 3
    source = ZERO_3 if is_zero3 else ZERO_12
    reduce = term("reduce bucket", width * bucket, f"{width} reduce_bucket_size", source)
    if not is_zero3:
        # In stage 1 the states include all gradients, and those of adapters are small.
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
    if not (model.block and model.layers):  # the size of a block is unknown
        return ()
    outside = max(0, model.params - model.layers * model.block)
    grad_params, symbol = max(model.block, model.largest_layer), "max(U, L_max)"
    if setup.lora:
        grad_params, symbol = setup.trained // model.layers, "P_t/L"
    return (
        term("gathered weights", width * (outside + 2 * model.block), f"{width} (E + 2 U)", FSDP),
        term("whole gradients", 2 * width * grad_params, f"{2 * width} {symbol}", FSDP),
    )


# What the forward pass saves on a GPU for the backward pass: activations and logits

MEASURED = "measured on transformers 5.23, fused attention, no dropout"


class Arithmetic(IntEnum):
    """The precision of a forward pass, which decides what it saves; its place in each `Bytes`."""

    FP32 = 0
    AUTOCAST = 1  # fp32 weights and residuals, 16-bit products
    HALF = 2  # 16-bit weights and residuals


Bytes = tuple[float, float, float]


class Saved(NamedTuple):
    """Bytes that a block saves for each element: by arithmetic, in fp32, autocast and 16 bits."""

    fixed: Bytes = (0, 0, 0)  # for an element of the hidden states
    query: Bytes = (0, 0, 0)  # of all heads together
    kv: Bytes = (0, 0, 0)  # of all heads of keys together
    ffn: Bytes = (0, 0, 0)  # of the feed-forward network
    routed: Bytes = (0, 0, 0)  # of all experts that a token uses
    score: Bytes = (0, 0, 0)  # of the attention scores, if attention is not fused


# The blocks of Llama, and of GPT-2, whose GELU is not fused. Those of GPT-NeoX and BERT save less
# than GPT-2's.
GATED = Saved(fixed=(24, 26, 16), query=(8, 4, 4), kv=(8, 4, 4), ffn=(16, 8, 8))
UNGATED = Saved(fixed=(32, 20, 16), ffn=(20, 10, 10))
# The blocks of T5's encoder, and what the second attention of its decoder saves.
T5_GATED = Saved(fixed=(24, 26, 20), query=(16, 14, 14), ffn=(28, 14, 14))
T5_UNGATED = Saved(fixed=(24, 24, 20), query=(16, 14, 14), ffn=(4, 4, 2))
CROSS = Saved(fixed=(12, 14, 10), query=(16, 8, 8))
# What norms of queries and keys save in addition.
HEAD_NORM = Saved(query=(8.1, 6.1, 6.1), kv=(8.1, 6.1, 6.1))
# What experts save beyond one feed-forward network of the same width: each has its own input and
# output, and autocast leaves their products in fp32.
EXPERT = Saved(fixed=(8.2, 8.2, 4.2))
ROUTED = Saved(routed=(0, 8, 0))

_BIASED = Saved(score=(4, 4, 4))  # the bias of positions is added to the mask in each block
_LATENT = Saved(query=(16.5, 22.5, 24))  # 13 to 16, 19 to 22 and 20 to 24 were measured
MORE = {  # than Llama's blocks, by family
    "phi3": Saved(fixed=(9.2, 0, 4.7)),
    "olmo2": Saved(fixed=(0.1, 2.6, 6.6)),
    "gemma": Saved(fixed=(0.1, 0.1, 4.2)),
    "gemma2": Saved(fixed=(22.1, 19.1, 23.1), score=(8, 8, 8)),
    "gemma3_text": Saved(fixed=(16.1, 18.6, 22.6)),
    "qwen2_moe": Saved(fixed=(4.1, 8.3, 2.1)),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "t5": _BIASED,
    "mt5": _BIASED,
    "gpt_oss": Saved(routed=(14.2, 13.3, 8.7), score=(4, 6, 2)),
}
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2", "gpt_neox", "bert", "vit")
FAMILIES = {"", *PLAIN, "mixtral", "qwen3_moe", *MORE}  # whose blocks were measured
CHECKPOINT = (4, 4, 2)
# Live tensors as a multiple of saved ones: of each block, and in addition of the one in backward.
EACH_BLOCK, ONE_BLOCK = 1.15, 0.35
# Each logit takes 4 bytes four times: as accelerate returns it, log-softmax, and both gradients.
LOGIT_BYTES = 16


def saved_bytes(setup: Setup) -> float:
    """Return the bytes that one block saves per element of its hidden states.

    Attention is the default of transformers (fused, except in Gemma 2 and gpt-oss); dropout is
    off. For a model with an encoder and a decoder, this is the mean of their blocks.
    """
    model = setup.model
    gated, ungated = (T5_GATED, T5_UNGATED) if model.cross_layers else (GATED, UNGATED)
    # Each part with its number in a block, or the share of blocks that have it.
    parts = (
        (gated if model.gated else ungated, 1.0),
        (HEAD_NORM, 1.0 if model.head_norm else 0.0),
        (CROSS, model.cross_layers / model.layers),
        (MORE.get(model.family, Saved()), 1.0),
        (EXPERT, model.experts_met),
        (ROUTED, 1.0),
    )
    size = 0.0
    for saved, factor in parts:
        fixed, query, kv, ffn, routed, score = (widths[arithmetic(setup)] for widths in saved)
        # Bytes of a token in tensors whose width is not defined by the hidden size.
        other = query * model.query_width + kv * model.key_value_width + ffn * model.ffn
        other += routed * model.experts_met * model.expert_ffn + score * model.heads * setup.seq_len
        size += factor * (fixed + other / model.hidden)
    return size


def arithmetic(setup: Setup) -> Arithmetic:
    """Return the precision of the strategy's forward pass."""
    if not setup.is_half:
        return Arithmetic.FP32
    return Arithmetic.HALF if setup.strategy.stage else Arithmetic.AUTOCAST


def activation_terms(setup: Setup) -> tuple[Term, ...]:
    """Return activations and logits; () if shape or sequence length is unknown."""
    model = setup.model
    if not (model.has_shape and setup.seq_len):
        return ()
    tokens, hidden = setup.seq_len * setup.micro_batch, model.hidden
    block = saved_bytes(setup)
    logits = term("logits", LOGIT_BYTES * tokens * model.vocab, f"{LOGIT_BYTES} s b V", MEASURED)
    if not setup.grad_ckpt:
        size = block * (EACH_BLOCK * model.layers + ONE_BLOCK) * tokens * hidden
        formula = f"{block:.4g} s b h ({EACH_BLOCK} L + {ONE_BLOCK})"
        return term("activations", size, formula, MEASURED), logits
    # Checkpointing keeps the inputs of all blocks but one, which saves everything, also its input.
    kept, factor = CHECKPOINT[arithmetic(setup)], EACH_BLOCK + ONE_BLOCK
    size, formula = kept * (model.layers - 1) * tokens * hidden, f"{kept:.4g} s b h (L - 1)"
    inputs = term("checkpointed activations", size, formula, MEASURED)
    size, formula = block * factor * tokens * hidden, f"{block:.4g} s b h x {factor:g}"
    return inputs, term("one block's activations", size, formula, MEASURED), logits
