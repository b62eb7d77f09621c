"""Fine-tune a small causal language model with LoRA and the Trainer of transformers.

It knows nothing of nodes: the number of processes, their precision and their strategy come from
accelerate's environment, which clusterrun or `accelerate launch` sets.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
try:
    import torch
    from accelerate.state import AcceleratorState, PartialState
    from adapters import PRESETS, base_model, with_adapters
    from torch.utils.tensorboard import SummaryWriter
    from transformers import (
        ByT5Tokenizer,
        DataCollatorForSeq2Seq,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.integrations import TensorBoardCallback

    from clusterrun import runtime
    from clusterrun.hf import CheckpointCallback, resume_path
except ImportError as error:
    raise SystemExit(
        f"error: the package {error.name} is missing\n"
        "  hint: pip install '.[train,examples]' in a clone of clusterrun"
    ) from error

import docstrings
import run_config

SMALLEST = "tiny_r8"  # has no memory to save


def chosen_precision() -> tuple[str, str]:
    """Return "bf16", "fp16" or "no", and why.

    The launcher's choice wins; without one, use bf16 from compute capability 8.0 (Ampere) on.
    """
    said = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if said == "fp16" and not torch.cuda.is_available():
        raise SystemExit("error: fp16 needs a GPU: accelerate would silently train in fp32")
    if said:
        return said, "the launcher's choice"
    if not torch.cuda.is_available():
        return "no", "no GPU"
    major, minor = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return "bf16" if major >= 8 else "fp16", name


def trainer_arguments(args: argparse.Namespace, precision: str) -> TrainingArguments:
    """Return the Trainer's arguments; creating them joins the world."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    # With DeepSpeed the Trainer also compares its two switches with DeepSpeed's configuration.
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if deepspeed and precision == "bf16" and not torch.cuda.is_available():
        raise SystemExit(
            "error: the Trainer accepts bf16 under DeepSpeed only on GPUs\n"
            '  hint: without a GPU, write "bf16": {"enabled": "auto"} in the DeepSpeed JSON'
        )
    checkpointing: dict[str, Any] = {}
    if args.gradient_checkpointing:
        checkpointing = {
            "gradient_checkpointing": True,
            # The reentrant kind needs inputs with gradients; those of a frozen model have none.
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    try:
        return TrainingArguments(
            str(args.output),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulation,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            warmup_steps=args.warmup,
            max_grad_norm=args.clip,
            bf16=deepspeed and precision == "bf16",
            fp16=deepspeed and precision == "fp16",
            save_strategy="epoch",
            save_total_limit=args.keep,
            eval_strategy="epoch",
            logging_steps=args.log_every,
            report_to=[],  # a separate callback, which accepts a directory, reports to TensorBoard
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            dataloader_num_workers=loader_workers(),
            ddp_find_unused_parameters=False,
            seed=args.seed,
            **checkpointing,
        )
    except ValueError as problem:
        raise SystemExit(f"error: the Trainer refused its arguments: {problem}") from problem


def loader_workers() -> int:
    """Return the number of loader processes: up to 4 with a GPU, 0 on a CPU, which is busy."""
    if not torch.cuda.is_available():
        return 0
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(4, max(1, len(os.sched_getaffinity(0)) // ranks_here))


class Report(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Print the progress, and write the record of the run."""

    def __init__(self, record: dict[str, Any], output: Path) -> None:
        self.record = record
        self.output = output

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print the batch of a step and the steps of an epoch, which the Trainer has computed."""
        batch = self.record["batch"]
        batch |= {
            "steps_per_epoch": state.max_steps // args.num_train_epochs,
            "steps": state.max_steps,
        }
        plugin = AcceleratorState().deepspeed_plugin
        if plugin is not None:  # each "auto" has its value now
            config = dict(plugin.deepspeed_config)
            config.pop("steps_per_print", None)  # infinite, which JSON can't express
            self.record["deepspeed"] = config
        if state.is_world_process_zero:
            run_config.write(self.output, self.record)
            print(
                f"batch {batch['micro_batch']} x {batch['accumulation']} accumulation x "
                f"{batch['ranks']} ranks = {batch['effective_batch']} samples a step, "
                f"{batch['steps_per_epoch']} steps an epoch"
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print losses as they come."""
        loss, held_out = logs.get("loss"), logs.get("eval_loss")
        if held_out is not None and not math.isfinite(held_out):
            raise SystemExit(f"error: the held-out loss is {held_out}: it has diverged")
        if not state.is_world_process_zero:
            return
        if loss is not None:
            at = f"step {state.global_step}/{state.max_steps}"
            print(f"{at} loss {loss:.3f} lr {logs['learning_rate']:.1e}")
        if held_out is not None:
            print(f"epoch {state.epoch or 0:.0f} held-out loss {held_out:.3f}")


class Rate(TrainerCallback):  # type: ignore[misc]
    """Set the rate of a resumed run from its flags: the Trainer restores the checkpoint's."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Compute the rate of the next step again; it is the same if no flag changed."""
        if state.global_step == 0 or AcceleratorState().deepspeed_plugin is not None:
            return
        lr_scheduler.base_lrs = [args.learning_rate] * len(lr_scheduler.base_lrs)
        lr_scheduler.last_epoch -= 1
        lr_scheduler.step()


def run(args: argparse.Namespace) -> None:
    """Train, and leave the process group once the training is freed.

    A gloo process that exits without destroying its group can abort at exit after a good run; one
    whose model is freed after the group can hang there (torch 2.13).
    """
    finetune(args)
    gc.collect()
    PartialState().destroy_process_group()


def finetune(args: argparse.Namespace) -> None:
    """Train from the start or the newest checkpoint, and save the adapters."""
    precision, why = chosen_precision()
    settings = trainer_arguments(args, precision)
    if (started := os.environ.get("WORLD_SIZE", "1")) != str(settings.world_size):
        raise SystemExit(
            f"error: the launcher started {started} ranks, but the Trainer did not join them\n"
            "  hint: without GPUs, set ACCELERATE_USE_CPU=true"
        )
    checkpoint = resume_path(args.output)
    check_named(args.resume, checkpoint)
    settings.eval_on_start = checkpoint is None  # the loss of the untrained model
    trainer, record = prepare(args, settings, precision)
    changed = allowed_changes(args, record, checkpoint) if checkpoint else {}
    if trainer.is_world_process_zero():
        world, trained = record["world"], record["parameters"]["trained"]
        share = trained / record["parameters"]["all"]
        print(f"world {world['ranks']} ranks, {world['strategy']}, precision {precision} ({why})")
        print(f"preset {args.preset}: {trained} parameters are trained, {share:.1%} of all")
        if checkpoint:
            print(f"resumed from {checkpoint}")
        for name, (was, is_now) in changed.items():
            print(f"resuming with {name} {is_now} instead of {was} (override)")
    trainer.train(resume_from_checkpoint=checkpoint)
    finish(trainer, args.output)
    # A gloo process whose model outlives its process group can abort at exit (torch 2.13).
    accelerator = trainer.accelerator
    del trainer
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def prepare(
    args: argparse.Namespace, settings: TrainingArguments, precision: str
) -> tuple[Trainer, dict[str, Any]]:
    """Build data, model and Trainer; return it with the record of the run."""
    tokenizer = ByT5Tokenizer(extra_ids=0)  # bytes and three more tokens: needs no file
    try:
        train, held_out = docstrings.split_samples(
            tokenizer,
            train=args.samples,
            held_out=args.held_out,
            max_length=args.max_length,
            seed=args.seed,
        )
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from problem
    adapters = replace(PRESETS[args.preset], dropout=args.dropout)
    model = with_adapters(
        base_model(
            tokenizer, hidden=args.hidden, layers=args.layers, heads=args.heads, seed=args.seed
        ),
        adapters,
    )
    trainer = Trainer(
        model,
        settings,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=docstrings.IGNORED),
        processing_class=tokenizer,
        callbacks=[CheckpointCallback()],
    )
    record = run_config.describe(
        args,
        adapters,
        data={"sha256": docstrings.digest([*train, *held_out])},
        world={
            "ranks": settings.world_size,
            "strategy": strategy(trainer),
            "precision": precision,
        },
    )
    trained, everything = model.get_nb_trainable_parameters()
    record["parameters"] = {"all": everything, "trained": trained}
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Rate())
    trainer.add_callback(Report(record, args.output))
    if trainer.is_world_process_zero():
        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(args.output / "logs"))))
    return trainer, record


def strategy(trainer: Trainer) -> str:
    """Return the name of accelerate's strategy."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        return f"deepspeed zero-{plugin.zero_stage}"
    name = trainer.accelerator.distributed_type.value
    return {"NO": "one process", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp"}.get(name, name.lower())


def check_named(resume: Path | bool, checkpoint: str | None) -> None:
    """Stop if --resume names a checkpoint that is not the newest complete one."""
    if not isinstance(resume, Path):
        return
    if checkpoint is None:
        raise SystemExit(f"error: there is no complete checkpoint in {resume.parent}")
    if resume.resolve() != Path(checkpoint).resolve():
        raise SystemExit(
            f"error: the newest complete checkpoint is {checkpoint}, not {resume.name}\n"
            "  hint: pass --resume without a path, or move the newer ones away to go back"
        )


def allowed_changes(
    args: argparse.Namespace, record: dict[str, Any], checkpoint: str
) -> dict[str, tuple[Any, Any]]:
    """Return what --override changes from this checkpoint on, and add it to the record.

    Raises SystemExit if resuming is not allowed, or other settings differ.
    """
    if not args.resume:
        raise SystemExit(
            f"error: {args.output} already holds checkpoints\n"
            "  hint: pass --resume to continue from the newest, or choose another --output"
        )
    before = run_config.read(args.output)
    differing = run_config.differences(before, record) if before else {}
    refused = {name: values for name, values in differing.items() if name not in args.override}
    reason = "; ".join(f"{name} was {was} and is {now}" for name, (was, now) in refused.items())
    if args.override and record["world"]["strategy"].startswith("deepspeed"):
        reason = "DeepSpeed restores rate and schedule, which --override can't change"
    if reason or not before:
        raise SystemExit(
            f"error: can't resume from {checkpoint}: {reason or 'its run_config.json is gone'}\n"
            "  hint: use its settings or another --output; --override accepts "
            f"{', '.join(run_config.OVERRIDABLE)}"
        )
    record["overrides"] = before.get("overrides", [])
    if differing:
        record["overrides"] += [{"checkpoint": Path(checkpoint).name, "settings": differing}]
    return differing


def finish(trainer: Trainer, output: Path) -> None:
    """Save the adapters if the training is complete; if it was interrupted, print the step."""
    is_first = trainer.is_world_process_zero()
    if runtime.should_stop():
        if is_first:
            print(f"stopped at step {trainer.state.global_step}, saved")
        return
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type("FULL_STATE_DICT")  # the Trainer can't save a sharded one
    trainer.save_model(str(output / "final_model"))
    if is_first:
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        print(f"held-out loss {losses[-1]:.3f} (untrained {losses[0]:.2f})")
        print(f"adapters in {output / 'final_model'}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    positive = _at_least(1)
    planned = runtime.planned()  # by `clusterrun submit --plan`
    batch, passes = (planned.micro_batch, planned.accumulation) if planned else (8, 1)
    add = parser.add_argument
    add("--preset", "--config", choices=PRESETS, default=SMALLEST, help="the adapters")
    add("--dropout", type=float, metavar="P", help="of the adapters (default: the preset's)")
    add("--samples", type=positive, default=512, help="pairs to learn from (default 512)")
    add("--held-out", type=positive, default=64, help="pairs to test on")
    add("--max-length", type=positive, default=96, help="bytes of the longest pair")
    add("--hidden", type=positive, default=64, help="width of the model")
    add("--layers", type=positive, default=2)
    add("--heads", type=positive, default=4)
    add("--epochs", type=positive, default=3, help="epochs, each with a checkpoint (default 3)")
    add("--batch-size", type=positive, default=batch, help="samples per process and micro-batch")
    add(
        *("--accumulation", "--gradient-accumulation"),
        type=positive,
        default=passes,
        help="micro-batches per step",
    )
    add("--lr", "--learning-rate", type=float, default=5e-3, help="peak learning rate")
    add("--warmup", type=_at_least(0), default=10, help="steps of warm-up")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--seed", type=int, default=0)
    add(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        default=planned.gradient_checkpointing if planned else None,
        help="use less memory and a third more compute (default: on, except with tiny_r8)",
    )
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add(
        "--output",
        type=folder,
        metavar="DIR",
        help="directory shared by all nodes (default: that of the run, else 'out')",
    )
    add("--keep", type=_at_least(2), default=3, metavar="N", help="checkpoints to keep")
    add(
        *("--resume", "--resume-from-checkpoint"),
        nargs="?",
        type=Path,
        const=True,
        default=False,
        metavar="CHECKPOINT",
        help="resume from the newest complete checkpoint (a later attempt of a run always does); "
        "PATH must name that one",
    )
    add(
        "--override",
        type=overridable,
        default=[],
        metavar="NAMES",
        help=f"flags that a resume may change: {','.join(run_config.OVERRIDABLE)}",
    )
    args = parser.parse_args(argv)
    if args.hidden % (2 * args.heads):
        parser.error(f"--hidden {args.hidden} is not a multiple of twice --heads {args.heads}")
    preset = PRESETS[args.preset]
    args.dropout = preset.dropout if args.dropout is None else args.dropout
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout} is not a probability below 1")
    if args.gradient_checkpointing is None:
        args.gradient_checkpointing = args.preset != SMALLEST
    if not math.isfinite(args.lr) or args.lr <= 0:
        parser.error(f"--lr {args.lr} is not a learning rate")
    info = runtime.info()
    is_later = info is not None and info.attempt > 1
    named = args.resume.parent if isinstance(args.resume, Path) else None
    args.output = args.output or named or runtime.checkpoint_dir() or Path("out")
    # Checkpoints in the run's directory, and in any directory on a later attempt, are the run's;
    # only its first attempt resumes from a named checkpoint.
    args.resume = is_later or args.resume or args.output == runtime.checkpoint_dir()
    if args.override and not args.resume:
        parser.error("--override needs --resume")
    return args


def overridable(text: str) -> list[str]:
    """Parse names of flags that a resume may change, for argparse."""
    names = text.split(",")
    if unknown := sorted({*names} - {*run_config.OVERRIDABLE}):
        raise argparse.ArgumentTypeError(
            f"can't change {', '.join(unknown)}, only {', '.join(run_config.OVERRIDABLE)}"
        )
    return names


def folder(text: str) -> Path:
    """Create a directory if needed, for argparse: fail now, not at the first save."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


if __name__ == "__main__":
    run(parse_arguments())
