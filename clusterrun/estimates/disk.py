"""Estimate what the checkpoints of a training take on disk.

Read from, and measured with, accelerate 1.15 (`save_state`), DeepSpeed 0.19.8 (`save_checkpoint`)
and peft 0.21. Sizes are those of all ranks' files together.
"""

from __future__ import annotations

from clusterrun.estimates.inputs import Setup, Term, term
from clusterrun.estimates.memory import trainable_params

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
    master = FP32 if setup.strategy.is_deepspeed else 0
    terms = (
        _per_parameter("weights", setup, _weight_bytes(setup)),
        _per_parameter("optimizer", setup, master + setup.optimizer.state_bytes),
        _others(setup),
    )
    return tuple(term for term in terms if term.bytes)


def checkpoint_bytes(setup: Setup) -> int:
    """Return the size of one checkpoint in bytes."""
    return sum(term.bytes for term in checkpoint_terms(setup))


def best_terms(setup: Setup, kept: int) -> tuple[Term, ...]:
    """Return the size of the best checkpoints, of which only fp32 weights are kept."""
    size = FP32 * kept * trainable_params(setup)
    formula = f"{kept} x {FP32} {'P_t' if setup.lora else 'P'}"
    return (term("weights of the best", size, formula, "safetensors"),) if kept else ()


def run_bytes(each: int, keep: int) -> int:
    """Return the space that a run needs: what it keeps, and one checkpoint being written."""
    return each * (keep + 1)


def _weight_bytes(setup: Setup) -> int:
    """Return the bytes of each saved parameter outside the optimizer's files."""
    if not setup.strategy.is_deepspeed:
        return FP32
    adapters = 1 if setup.lora else 0  # peft's own file of them
    return (adapters + (setup.strategy.stage < 3)) * setup.number_bytes


def _per_parameter(name: str, setup: Setup, each: int) -> Term:
    writer = "DeepSpeed save_checkpoint" if setup.strategy.is_deepspeed else "accelerate save_state"
    source = "peft and HF's Trainer" if setup.lora else writer
    formula = f"{each} {'P_t' if setup.lora else 'P'}"
    return term(name, each * trainable_params(setup), formula, source)


def _others(setup: Setup) -> Term:
    """Count the random states of each rank; scaler, scheduler and counters take 1 or 2 kB."""
    scripts = SCRIPTS_BYTES if setup.strategy.is_deepspeed else 0
    formula = "14.5 kB x ranks" + (" + 41 kB" if scripts else "")
    source = "measured: accelerate 1.15" + (", DeepSpeed 0.19.8" if scripts else "")
    size = RANDOM_BYTES * setup.world + scripts
    return term("random numbers, scaler, scheduler", size, formula, source)
