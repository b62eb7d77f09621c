"""The inputs of an estimate, and the terms that it adds up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from clusterrun.config.choices import Optimizer, Strategy
from clusterrun.errors import UsageError
from clusterrun.launch.plan import Parallel

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Model:
    """The size and shape of a model; unknown numbers of the shape are 0."""

    name: str
    params: int  # tied weights count once
    largest_layer: int = 0  # own parameters of the largest module (DeepSpeed's definition)
    block: int = 0  # parameters of one transformer block
    hidden: int = 0
    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0  # 0: the heads share the hidden size
    ffn: int = 0  # the width of all that a token uses, also of its experts
    vocab: int = 0
    gated: bool = True  # the feed-forward network has a gate, as in Llama, not GPT-2
    head_norm: bool = False  # queries and keys have norms, as in Qwen 3
    family: str = ""  # the `model_type` of a config; "": there is none
    active_params: int = 0  # that a token uses; 0 if the model has no experts
    experts_met: int = 0  # that a token uses in a block
    expert_ffn: int = 0  # the width of one
    cross_layers: int = 0  # of `layers`, those that also attend to what an encoder read
    linear_params: int = 0  # parameters of all blocks, without experts
    positions: int = 0  # tokens of the longest sample; if not `is_text`, of every sample
    is_text: bool = True

    @property
    def has_shape(self) -> bool:
        """Return whether activations can be estimated: all sizes of a block are known."""
        has_unknown_experts = self.active_params > 0 and self.experts_met == 0
        return min(self.hidden, self.layers, self.heads, self.ffn) > 0 and not has_unknown_experts

    @property
    def query_width(self) -> int:
        """Return the width of all heads together; the hidden size if it is unknown."""
        return self.heads * self.head_dim or self.hidden

    @property
    def key_value_width(self) -> int:
        """Return the width of all key heads together, which is also that of the value heads."""
        return self.query_width * (self.kv_heads or self.heads) // max(1, self.heads)

    def adapter_params(self, rank: int) -> int:
        """Return the parameters of LoRA adapters on all projections of attention and feed-forward.

        The adapter of an a x b projection has rank x (a + b) parameters. peft makes these for
        "all-linear", fewer for a list of layers, and none for routed experts, which transformers 5
        keeps as one tensor. Raises UsageError if the shape is unknown.
        """
        if not rank:
            return 0
        if not self.has_shape:
            hint = "add --hidden, --layers, --heads and --ffn, or pass --model"
            raise UsageError("LoRA's adapters can't be sized without the model's shape", hint=hint)
        # The projections of queries and outputs, and those of keys and values.
        attention = 2 * (self.hidden + self.query_width) + 2 * (self.hidden + self.key_value_width)
        dense_ffn = self.ffn - self.experts_met * self.expert_ffn  # 0: all experts are routed
        feed_forward = (3 if self.gated else 2) * (self.hidden + dense_ffn) if dense_ffn else 0
        return rank * ((self.layers + self.cross_layers) * attention + self.layers * feed_forward)

    def divided(self, tensor: int) -> Model:
        """Return the part of the model on each of `tensor` GPUs under tensor parallelism.

        It follows transformers' plans, after Megatron (arXiv 1909.08053), which divide the matrices
        of the blocks and what they save (arXiv 2205.05198), but no norms, residuals or weights
        outside the blocks. If the size of a block is unknown, all parameters are divided.
        """
        in_blocks = (self.layers * self.block) or self.params
        return replace(
            self,
            params=self.params - in_blocks + in_blocks // tensor,
            block=self.block // tensor,
            head_dim=self.query_width // max(1, self.heads),  # 0 would mean all of hidden
            heads=max(1, self.heads // tensor) if self.heads else 0,
            kv_heads=max(1, self.kv_heads // tensor) if self.kv_heads else 0,
            ffn=self.ffn // tensor,
            expert_ffn=self.expert_ffn // tensor,
            linear_params=self.linear_params // tensor,
        )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to train a model on a number of GPUs."""

    model: Model
    nodes: int = 1
    procs_per_node: int = 1  # GPUs, and so ranks
    strategy: Strategy = Strategy.DDP
    precision: str = "bf16"  # fp32; bf16 and fp16 are autocast over fp32 weights, or DeepSpeed's
    micro_batch: int = 1  # sequences in a pass of a data-parallel rank
    accumulation: int = 1
    seq_len: int = 0  # tokens of a sequence
    grad_ckpt: bool = False
    optimizer: Optimizer = Optimizer.ADAMW
    lora: int = 0  # the rank of the adapters; 0: all weights are trained
    load_in_4bit: bool = False  # frozen weights have 4 bits (QLoRA)
    parallel: Parallel = field(default_factory=Parallel)

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.procs_per_node

    @property
    def data_parallel(self) -> int:
        """Return the number of data-parallel ranks: groups that get different samples."""
        return self.parallel.data(self.world)

    @property
    def sizes(self) -> Parallel:
        """Return the parallel sizes that the strategy decides; `replicate` copies of a shard."""
        return self.parallel.decided(self.strategy, nodes=self.nodes, world=self.world)

    @property
    def effective_batch(self) -> int:
        """Return the samples of one optimizer step."""
        return self.micro_batch * self.accumulation * self.data_parallel

    @property
    def is_half(self) -> bool:
        """Return whether the arithmetic has 16 bits."""
        return self.precision in ("bf16", "fp16")

    @property
    def number_bytes(self) -> int:
        """Return the bytes of a number in the arithmetic of the forward pass."""
        return 2 if self.is_half else 4

    @property
    def shards(self) -> int:
        """Return the number of ranks that share one copy of a sharded state."""
        if not self.strategy.stage:
            return 1
        # FSDP and ZeRO also shard over the ranks that split a sample.
        return self.sizes.shard * self.parallel.context * self.parallel.sequence

    @property
    def trained(self) -> int:
        """Return the number of trained parameters: those of the adapters, else all."""
        return self.model.adapter_params(self.lora) or self.model.params

    @property
    def of_gpu(self) -> Setup:
        """Return the setup with the part of model and sample that one GPU works on."""
        sizes = self.parallel
        if sizes.model == 1:  # each GPU works on the whole model and whole samples
            return self
        # Context parallel and Ulysses (arXiv 2309.14509) divide the tokens of a sample.
        tokens = -(-self.seq_len // (sizes.context * sizes.sequence))  # rounded up
        return replace(self, model=self.model.divided(sizes.tensor), seq_len=tokens)

    @property
    def offloads_optimizer(self) -> bool:
        """Return whether the optimizer's states are in the host's memory."""
        return self.strategy.offload > 0

    @property
    def offloads_params(self) -> bool:
        """Return whether the weights are also in the host's memory."""
        return self.strategy.offload == 3


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of a sum: its bytes, the formula with its symbols, and the source."""

    name: str
    bytes: int
    formula: str
    source: str


class Fit(str, Enum):
    """Whether something fits into a capacity, from best to worst."""

    FITS = "fits"
    TIGHT = "tight"
    NO = "no"


def term(name: str, size: float, formula: str, source: str) -> Term:
    """Return a term of a whole number of bytes."""
    return Term(name=name, bytes=int(size), formula=formula, source=source)


def total(terms: Iterable[Term]) -> int:
    """Add up the bytes of terms."""
    return sum(term.bytes for term in terms)
