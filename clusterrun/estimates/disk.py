"""What the checkpoints of a training take on disk, by what their writers really put into files.

Read from, and measured with, accelerate 1.15 (`save_state`), DeepSpeed 0.19.8 (`save_checkpoint`)
and peft 0.21. Sizes are those of all ranks' files together.
"""

from __future__ import annotations

from clusterrun.config.spec import Strategy
from clusterrun.estimates.inputs import Setup, Term
from clusterrun.estimates.memory import trainable_params

FP32 = 4
RANDOM_BYTES = 14_500  # random_states_<rank>.pkl: Python's, NumPy's and torch's generators
SCRIPTS_BYTES = 41_000  # zero_to_fp32.py and zero_to_torch.py, which DeepSpeed copies beside


def checkpoint_terms(setup: Setup) -> tuple[Term, ...]:
    """Return what one checkpoint takes, by groups of files; a group without bytes is left out.

    DDP and FSDP keep fp32 weights and states whatever the precision, FSDP one copy in shards also
    where it replicates them; its writer adds some 2 kB for each tensor and rank, which is not told
    here. Under ZeRO the fp32 weights are with the optimizer's states; stages 1 and 2 write the
    weights once more as they compute with them, stage 3 does not, also where
    `zero3_save_16bit_model` is set: that is for `save_model`. HF's Trainer calls it, so under
    DeepSpeed its checkpoints hold one more copy than is told here.

    With LoRA, what peft and HF's Trainer write: adapters, and no frozen weight. accelerate's
    `save_state` would write the frozen ones, too.
    """
    terms = (_weights(setup), _optimizer(setup), _others(setup))
    return tuple(term for term in terms if term.bytes)


def run_bytes(checkpoint_bytes: int, keep: int) -> int:
    """Return the room that a run needs: what it keeps, and one checkpoint while it is written."""
    return checkpoint_bytes * (keep + 1)


def _weights(setup: Setup) -> Term:
    return _per_parameter("weights", setup, _weight_bytes(setup))


def _weight_bytes(setup: Setup) -> int:
    """Return the bytes of each saved parameter outside the optimizer's files."""
    if not setup.strategy.is_deepspeed:
        return FP32
    is_stage_3 = setup.strategy in (Strategy.ZERO3, Strategy.ZERO3_OFFLOAD)
    copies = (0 if is_stage_3 else 1) + (1 if setup.lora else 0)  # peft's own file of the adapters
    return copies * setup.number_bytes


def _optimizer(setup: Setup) -> Term:
    weights = FP32 if setup.strategy.is_deepspeed else 0
    return _per_parameter("optimizer", setup, weights + setup.optimizer.state_bytes)


def _per_parameter(name: str, setup: Setup, each: int) -> Term:
    writer = "DeepSpeed save_checkpoint" if setup.strategy.is_deepspeed else "accelerate save_state"
    return Term(
        name=name,
        bytes=each * trainable_params(setup),
        formula=f"{each} {'P_t' if setup.lora else 'P'}",
        source="peft and HF's Trainer" if setup.lora else writer,
    )


def _others(setup: Setup) -> Term:
    """Count each rank's random numbers; scaler, scheduler and counters are a kilobyte or two."""
    scripts = SCRIPTS_BYTES if setup.strategy.is_deepspeed else 0
    return Term(
        name="random numbers, scaler, scheduler",
        bytes=RANDOM_BYTES * setup.world + scripts,
        formula="14.5 kB x ranks" + (" + 41 kB" if scripts else ""),
        source="measured: accelerate 1.15" + (", DeepSpeed 0.19.8" if scripts else ""),
    )
