"""What autograd saves of a forward pass that really runs."""

from __future__ import annotations

from typing import Any

from clusterrun.estimates.memory import Arithmetic


def really_saved(
    model: Any, arithmetic: Arithmetic, words: tuple[int, int], *, checkpointed: bool
) -> int:
    """Return the bytes saved of (sequences, tokens), but weights and their casts.

    Storages are told apart by their addresses, casts by the shape of a weight: the number of
    tokens (of all sequences together, too) must be no width of the model.
    """
    import torch

    model = model.to(torch.bfloat16 if arithmetic is Arithmetic.HALF else torch.float32).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    shapes = {tuple(weight.shape) for weight in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    sizes: dict[int, int] = {}
    kept = []  # so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    autocasts = arithmetic is Arithmetic.AUTOCAST
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts),
    ):
        both = ("input_ids", "decoder_input_ids")[: 1 + model.config.is_encoder_decoder]
        model(**{name: torch.zeros(words, dtype=torch.long) for name in both}, use_cache=False)
    return sum(sizes.values())


VIEWS = {
    *("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "split"),
    *("_unsafe_view", "detach", "alias", "empty", "empty_like", "new_empty"),
}


def launches_of_a_pass(layers: int, *, lora: int) -> int:
    """Return the operations of a small Llama under autocast, forward and backward, but views."""
    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func.overloadpacket.__name__ not in VIEWS
            return func(*args, **(kwargs or {}))

    shape = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.LlamaConfig(num_hidden_layers=layers, vocab_size=128, **shape)
    model: Any = transformers.LlamaForCausalLM(config)
    if lora:
        peft = __import__("peft")
        adapters = peft.LoraConfig(r=lora, target_modules="all-linear", lora_dropout=0.05)
        model = peft.get_peft_model(model, adapters)
    words = torch.zeros((2, 16), dtype=torch.long)
    for _ in range(2):  # the second pass has gradients to add to
        with Counter() as counter, torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=words, labels=words, use_cache=False).loss.backward()
    return counter.count
