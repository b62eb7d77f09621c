"""Train the same model on one process, a node, or many nodes, and show what that changes.

An epoch always has the same samples; more processes mean fewer steps. The learning rate is scaled
with the batch by a rule. Both are printed, and every epoch is checked: each sample must have been
seen once, by some rank.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from regression import Samples, student
from scaling import RULES, Stage, count, rate, rate_at, scaled_rate
from torch import Tensor, nn
from torch.utils.data import DataLoader
from world import join, say

try:
    from clusterrun import runtime  # checkpoints, and progress for `clusterrun status`
except ImportError:
    runtime = None  # type: ignore[assignment]  # the training is the same, without checkpoints

HELD_OUT = 1000
PROGRESS = "progress.pt"
SMALL_BATCH = 256  # the batch that the linear rule starts from in its paper
# The settings that a resumed run must share, besides the samples of a step.
FLAGS = ("samples", "lr", "base_batch", "lr_rule", "warmup", "epochs", "seed")
OVERRIDABLE = ("epochs", "lr", "lr_rule", "warmup")  # for --override


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The learning rate: from `base` up to `peak` in `warmup` steps."""

    base: float
    peak: float
    warmup: int

    def at(self, step: int) -> float:
        """Return the rate of a step, counted from 0 over all epochs."""
        return rate_at(step, base=self.base, peak=self.peak, warmup=self.warmup)


@dataclass(kw_only=True)
class Progress:
    """The progress of an epoch: the completed steps, and their sums.

    `seen` counts how often each sample was taken; `loss` is the sum of the steps' losses. Each rank
    holds its part. After a resume, rank 0 also holds the sums of all ranks until then.
    """

    epoch: int
    steps: int
    seen: Tensor
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class Training:
    """The state that an epoch needs."""

    accelerator: Accelerator
    args: argparse.Namespace
    stage: Stage
    rates: Rates
    model: nn.Module
    optimizer: Any
    loader: Any
    store: Any  # the checkpoints; None without them

    def begin(self, epoch: int) -> Progress:
        """Return the progress of an epoch that has not started."""
        device = self.accelerator.device
        seen = torch.zeros(self.stage.samples, dtype=torch.long, device=device)
        return Progress(epoch=epoch, steps=0, seen=seen, loss=torch.zeros((), device=device))

    def finish(self, progress: Progress) -> bool:
        """Take the remaining steps of an epoch; return False if the job asked to save and exit."""
        self.loader.set_epoch(progress.epoch)  # its order is the same in every world
        done = progress.steps * self.stage.accumulation
        batches = iter(self.accelerator.skip_first_batches(self.loader, done))
        while passes := list(islice(batches, self.stage.accumulation)):
            self.step(progress, passes)
            progress.steps += 1
            if runtime is not None and self.is_told_to_leave(progress):
                return False
        return True

    def step(self, progress: Progress, passes: Sequence[Sequence[Tensor]]) -> None:
        """Learn from the passes of each rank; only the last exchanges gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates.at(self.steps_done(progress))
        for index, (inputs, targets, numbers) in enumerate(passes):
            is_last = index + 1 == len(passes)
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                loss = self.part_of_loss(progress, index, self.model(inputs), targets)
                self.accelerator.backward(loss * self.stage.ranks)  # DDP averages over the ranks
            progress.seen += torch.bincount(numbers, minlength=self.stage.samples)
            progress.loss += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def part_of_loss(
        self, progress: Progress, index: int, outputs: Tensor, targets: Tensor
    ) -> Tensor:
        """Return the share of a pass in the mean loss of its step, without repeats.

        So a step is the same, however its samples are divided among passes and ranks.
        """
        at = progress.steps * self.stage.accumulation + index
        new = self.stage.new_in_batch(at, self.accelerator.process_index)
        losses = nn.functional.mse_loss(outputs, targets, reduction="none")
        return losses[:new].sum() / self.stage.new_in_step(progress.steps)

    def steps_done(self, progress: Progress) -> int:
        """Return the number of steps taken in all epochs."""
        return progress.epoch * self.stage.steps + progress.steps

    def is_told_to_leave(self, progress: Progress) -> bool:
        """Report a step, save if the job asks for it, and return whether to exit."""
        runtime.step(self.steps_done(progress), self.args.epochs * self.stage.steps)
        if runtime.should_checkpoint():
            self.save(progress)
        return runtime.should_stop()

    def summed(self, progress: Progress) -> tuple[Tensor, Tensor]:
        """Return what all ranks have seen, and the sum of their losses."""
        seen, loss = self.accelerator.reduce((progress.seen, progress.loss), reduction="sum")
        return seen, loss

    def save(self, progress: Progress) -> None:
        """Save weights, optimizer and progress, where there is a place for it."""
        if self.store is None:
            return
        seen, loss = self.summed(progress)
        state = {"epoch": progress.epoch, "steps": progress.steps, "seen": seen, "loss": loss}

        def write(folder: Path) -> None:
            self.accelerator.save_state(str(folder))
            if self.accelerator.is_main_process:
                torch.save(state, folder / PROGRESS)

        self.store.save(self.steps_done(progress), write)

    def resume(self) -> Progress:
        """Return where the newest complete checkpoint was, or the beginning."""
        newest = self.store.resumable(overridable=OVERRIDABLE) if self.store is not None else None
        if newest is None:
            return self.begin(0)
        self.accelerator.load_state(str(newest.path))
        state = torch.load(newest.path / PROGRESS, map_location="cpu")
        progress = self.begin(state["epoch"])
        progress.steps = state["steps"]
        if self.accelerator.is_main_process:
            progress.seen += state["seen"].to(progress.seen.device)
            progress.loss += state["loss"].to(progress.loss.device)
            is_over = progress.epoch >= self.args.epochs
            say(
                f"nothing is left to do: all epochs are in {newest.path}"
                if is_over
                else f"resumed in epoch {progress.epoch + 1} after {progress.steps} of its steps"
            )
        return progress

    def report(self, progress: Progress, tests: Samples) -> None:
        """Print an epoch; stop unless it had each sample, and as many repeats as computed."""
        seen, loss = self.summed(progress)
        missing, repeated = int((seen == 0).sum()), int((seen - 1).clamp(min=0).sum())
        if missing or repeated != self.stage.repeated:
            raise SystemExit(
                f"error: no rank has seen {missing} samples of epoch {progress.epoch + 1}, and "
                f"{repeated} were repeated instead of {self.stage.repeated}"
            )
        mean = float(loss) / progress.steps
        if not math.isfinite(mean):
            raise SystemExit(
                f"error: the loss of epoch {progress.epoch + 1} is {mean}: it has diverged\n"
                "  hint: use a lower --lr, another --lr-rule or a longer --warmup"
            )
        if self.accelerator.is_main_process:
            say(
                f"epoch {progress.epoch + 1}/{self.args.epochs} steps {progress.steps} "
                f"loss {mean:.4f} held-out {held_out_loss(self, tests):.4f}; each of "
                f"{self.stage.samples} samples seen, {repeated} repeated"
            )


def held_out_loss(training: Training, tests: Samples) -> float:
    """Return the mean loss over the held-out samples; one rank is enough, as all have the model."""
    device = training.accelerator.device
    with torch.no_grad():
        outputs = training.accelerator.unwrap_model(training.model)(tests.inputs.to(device))
        return float(nn.functional.mse_loss(outputs, tests.targets.to(device)))


def settings(args: argparse.Namespace, stage: Stage) -> dict[str, Any]:
    """Return the settings that two runs of the same training must share."""
    flags = {name: getattr(args, name) for name in FLAGS}
    return {**flags, "effective_batch": stage.effective_batch}


def prepare(accelerator: Accelerator, args: argparse.Namespace, data: Samples) -> Training:
    """Build model and optimizer, and let accelerate prepare them."""
    stage = stage_of(accelerator, args)
    peak = scaled_rate(args.lr, args.base_batch, stage.effective_batch, args.lr_rule)
    warmup = round(args.warmup * args.epochs * stage.steps) if peak > args.lr else 0
    model = student()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(data, batch_size=args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return Training(
        accelerator=accelerator,
        args=args,
        stage=stage,
        rates=Rates(base=args.lr, peak=peak, warmup=warmup),
        model=model,
        optimizer=optimizer,
        loader=loader,
        store=store_of(args, stage),
    )


def stage_of(accelerator: Accelerator, args: argparse.Namespace) -> Stage:
    """Return the stage of these ranks."""
    return Stage(
        samples=args.samples,
        batch=args.batch,
        ranks=accelerator.num_processes,
        accumulation=args.accumulation,
    )


def store_of(args: argparse.Namespace, stage: Stage) -> Any:
    """Return the checkpoint store; None without a directory for it."""
    if not args.output:
        return None
    return runtime.Checkpoints(args.output, settings=settings(args, stage), override=args.override)


def announce(stage: Stage, rates: Rates, args: argparse.Namespace) -> None:
    """Print this stage's steps, repeated samples and learning rate."""
    alone = replace(stage, ranks=1)
    passes = f"{stage.accumulation} accumulation x " if stage.accumulation > 1 else ""
    say(
        f"epoch {stage.samples} samples, batch {stage.batch} x {passes}{stage.ranks} ranks = "
        f"{stage.effective_batch}: {stage.full_steps} full steps ({alone.full_steps} on one rank), "
        f"{stage.steps} run, {stage.repeated} samples repeated"
    )
    say(
        f"learning rate {args.lr:.2e} at batch {args.base_batch} -> {rates.peak:.2e} at batch "
        f"{stage.effective_batch} ({args.lr_rule}), {rates.warmup} steps of warm-up"
    )
    if stage.effective_batch < SMALL_BATCH and rates.peak > rates.base:
        say(
            f"a batch below {SMALL_BATCH} may not need that: try the old rate first "
            "(--lr-rule none), or a longer --warmup"
        )


def train(accelerator: Accelerator, args: argparse.Namespace) -> None:
    """Train the remaining epochs, and count the samples of each."""
    set_seed(args.seed)
    data, tests = Samples(args.samples, args.seed), Samples(HELD_OUT, args.seed + 1)
    join(accelerator, vars(args) | {"the data": data.fingerprint()})
    training = prepare(accelerator, args, data)
    if accelerator.is_main_process:
        announce(training.stage, training.rates, args)
    progress = training.resume()
    while progress.epoch < args.epochs:
        if not training.finish(progress):
            if accelerator.is_main_process:
                say(f"stopped in epoch {progress.epoch + 1} after {progress.steps} of its steps")
            return
        training.report(progress, tests)
        progress = training.begin(progress.epoch + 1)
        training.save(progress)


def run(args: argparse.Namespace) -> None:
    """Train, and leave the process group once the training is freed."""
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed)
    accelerator = Accelerator(
        dataloader_config=order, gradient_accumulation_steps=args.accumulation
    )
    args.accumulation = accelerator.gradient_accumulation_steps  # the launcher may decide it
    accelerator.gradient_accumulation_steps = 1  # Training.step divides the loss itself
    train(accelerator, args)
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags, checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--samples", type=count, default=29500, help="samples per epoch (default 29500)")
    planned = runtime.planned() if runtime else None  # by `clusterrun submit --plan`
    batch, passes = (planned.micro_batch, planned.accumulation) if planned else (4, 1)
    add("--batch", type=count, default=batch, help="samples per rank and pass (default 4)")
    add("--accumulation", type=count, default=passes, help="passes per step (default 1)")
    add("--epochs", type=count, default=1)
    add("--lr", type=rate, default=1e-3, help="learning rate that works at --base-batch")
    add("--base-batch", type=count, default=4, help="batch for which --lr works (default 4)")
    add("--lr-rule", choices=RULES, default="linear", help="how the rate scales with the batch")
    add("--warmup", type=float, default=0.1, help="share of the steps in which a scaled rate rises")
    add("--seed", type=int, default=0)
    add("--output", type=folder, metavar="DIR", help="checkpoint directory, also to resume from")
    add(
        "--override",
        type=lambda text: text.replace("-", "_").split(","),
        default=[],
        metavar="NAMES",
        help=f"settings that may differ from the checkpoint: {', '.join(OVERRIDABLE)}",
    )
    args = parser.parse_args(argv)
    if not 0 <= args.warmup <= 1:
        parser.error(f"--warmup {args.warmup} is not a share of the steps")
    if args.output and runtime is None:
        parser.error("checkpoints need clusterrun: pip install clusterrun")
    if not args.output and runtime is not None:
        args.output = runtime.checkpoint_dir()  # of the run; None outside one
    return args


def folder(text: str) -> Path:
    """Create a directory if needed, for argparse: fail now, not at the first save."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


if __name__ == "__main__":
    run(parse_arguments())
