"""What autograd saves of a forward pass that really runs."""

from __future__ import annotations

from typing import Any

from clusterrun.estimates.activations import Arithmetic


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
        model(input_ids=torch.zeros(words, dtype=torch.long), use_cache=False)
    return sum(sizes.values())
