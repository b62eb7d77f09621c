"""Count the vision towers in front of language models, module by module."""

from __future__ import annotations

from clusterrun.estimates.anatomy import Config, attention, gated, linear

# What the configs of Gemma 3 on the Hub leave to the defaults of transformers.
GEMMA3_TEXT = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
}


def patches(config: Config, *, image: int, patch: int) -> tuple[int, int]:
    """Return the number of patches of an image, and the number of values in a patch."""
    side = config.number("patch_size", patch)
    per_side = config.number("image_size", image) // side
    return per_side * per_side, config.number("num_channels", 3) * side * side


def siglip(outer: Config, vision: Config, hidden: int) -> tuple[int, ...]:
    """Return the modules of SigLIP and of Gemma 3's projection to `hidden`."""
    width, layers = vision.number("hidden_size"), vision.number("num_hidden_layers")
    ffn = vision.number("intermediate_size")
    count, inputs = patches(vision, image=224, patch=16)
    mlp = (linear(width, ffn, bias=True), linear(ffn, width, bias=True))
    block = (*4 * (linear(width, width, bias=True),), *mlp, *2 * (2 * width,))
    ends = (linear(inputs, width, bias=True), count * width, 2 * width)
    return (*layers * block, *ends, width * hidden, width)


def pixtral(outer: Config, vision: Config, hidden: int) -> tuple[int, ...]:
    """Return the modules of Pixtral and of Mistral 3's projection to `hidden`."""
    width, layers = vision.number("hidden_size"), vision.number("num_hidden_layers")
    merged = outer.number("spatial_merge_size", 2) ** 2
    _, inputs = patches(vision, image=1540, patch=14)
    block = (*attention(width, width, width), *gated(width, vision.number("intermediate_size")))
    ends = (linear(inputs, width), width, width, linear(merged * width, width))
    bias = outer.flag("multimodal_projector_bias", False)
    project = (linear(width, hidden, bias=bias), linear(hidden, hidden, bias=bias))
    return (*layers * (*block, width, width), *ends, *project)
