"""The presets of LoRA, and a small model with random weights to adapt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The adapters of one kind of run; their output is scaled by `alpha / rank`."""

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...]


PRESETS = {
    # for a CPU and a model of this example's size
    "tiny_r8": Preset(rank=8, alpha=16, dropout=0.05, targets=ALL_LINEAR),
    # QLoRA (Dettmers et al., 2023), models up to 13 billion parameters
    "paper_r64": Preset(rank=64, alpha=16, dropout=0.1, targets=ALL_LINEAR),
    # the published speech adapter of Phi-4-multimodal
    "pretrained_r320": Preset(rank=320, alpha=640, dropout=0.01, targets=ALL_LINEAR),
}


def base_model(tokenizer: Any, *, hidden: int, layers: int, heads: int, seed: int) -> Any:
    """Return a Llama with random weights, the same on every rank."""
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            # The head is random and stays frozen: its rows must be large enough for the adapters
            # to distinguish the tokens.
            initializer_range=0.2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def with_adapters(model: Any, preset: Preset) -> Any:
    """Freeze the model and add the adapters of a preset; only these are trained."""
    return get_peft_model(
        model,
        LoraConfig(
            r=preset.rank,
            lora_alpha=preset.alpha,
            lora_dropout=preset.dropout,
            target_modules=list(preset.targets),
            task_type="CAUSAL_LM",
        ),
    )
