"""The flags of train_captions.py, including those of LLaVA's scripts."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from clusterrun import runtime

OVERRIDABLE = ("lr", "warmup")  # for --override


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags; in a run of clusterrun, checkpoints default to the run's directory."""
    parser = argparse.ArgumentParser(description="Train a small model to caption images.")
    planned = runtime.planned()  # by `clusterrun submit --plan`
    batch, passes = (planned.micro_batch, planned.accumulation) if planned else (32, 1)
    add = parser.add_argument
    add("--max-steps", type=count, default=200, help="optimizer steps (default 200)")
    add(
        *("--batch-size", "--per-device-train-batch-size"),
        type=count,
        default=batch,
        help="pairs per rank and pass (default 32)",
    )
    add(
        *("--accumulation", "--gradient-accumulation-steps"),
        type=count,
        default=passes,
        help="passes per step (default 1)",
    )
    add(
        "--gradient-checkpointing",
        **SWITCH,
        default=bool(planned and planned.gradient_checkpointing),
        help="use less memory and a third more compute",
    )
    add("--bf16", **SWITCH, help="bf16 weights; otherwise the launcher decides")
    add(
        *("--workers", "--dataloader-num-workers"),
        type=whole,
        default=0,
        help="loader processes per rank (default 0: the rank itself loads)",
    )
    add(
        "--model-max-length",
        type=int,
        metavar="N",
        help="most patches and words; the rest is truncated",
    )
    add(
        "--data-path",
        type=existing,
        metavar="FILE",
        help="captions as in LLaVA's JSON (default: drawn)",
    )
    add("--image-folder", type=existing, metavar="DIR", help="images of --data-path")
    add("--lazy-preprocess", **SWITCH, default=True, help="images are always read lazily")
    add(
        "--pretrain-mm-mlp-adapter",
        type=existing,
        metavar="FILE",
        help="weights of the projector, which are then frozen",
    )
    add("--save-adapter", type=written, metavar="FILE", help="write the projector at the end")
    add("--deepspeed", metavar="FILE", help="DeepSpeed JSON; clusterrun reads it from here")
    add("--width", type=count, default=64, help="width of the decoder, a multiple of 8")
    add("--layers", type=count, default=2, help="blocks of the encoder and of the decoder")
    add("--lr", type=float, default=2e-3, help="learning rate after the warm-up")
    add("--warmup", type=count, default=20, help="steps in which the rate rises")
    add("--held-out", type=count, default=128, help="images to caption at the end")
    add("--seed", type=int, default=0)
    add("--log-every", type=count, default=10, metavar="STEPS")
    add(
        *("--save-every", "--save-steps"),
        type=count,
        metavar="STEPS",
        help="steps between checkpoints; the last is always saved",
    )
    add("--keep", type=count, default=2, metavar="N", help="checkpoints to keep")
    add(
        "--output",
        type=folder,
        default=runtime.checkpoint_dir(),
        metavar="DIR",
        help="checkpoint directory, shared by all nodes (default: that of the run)",
    )
    add(
        "--override",
        type=lambda text: text.replace("-", "_").split(","),
        default=[],
        metavar="NAMES",
        help=f"settings that may differ from the checkpoint: {', '.join(OVERRIDABLE)}",
    )
    args = parser.parse_args([with_dashes(word) for word in argv or sys.argv[1:]])
    check(parser, args)
    return args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse flags that are invalid, alone or together."""
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr} is not a learning rate")
    if args.width % 8:
        parser.error(f"--width {args.width} is not a multiple of 8")
    if args.save_every and not args.output:
        parser.error("--save-every needs --output DIR")
    if bool(args.data_path) != bool(args.image_folder):
        parser.error("--data-path and --image-folder need each other")
    if args.model_max_length is not None and args.model_max_length <= 16:
        parser.error(f"--model-max-length {args.model_max_length}: an image alone takes 16 places")
    if not args.lazy_preprocess:
        parser.error("--lazy-preprocess False: images are always read when they are needed")


def with_dashes(word: str) -> str:
    """Return `--max_steps` as `--max-steps`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def folder(text: str) -> Path:
    """Create a directory if needed, for argparse: fail now, not at the first save."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


def written(text: str) -> Path:
    """Parse the path of a file that is written at the end: fail now, not then."""
    path = Path(text)
    folder(str(path.parent))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory")
    return path


def existing(text: str) -> Path:
    """Parse a path that must exist."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return path


def count(number: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(number)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def whole(number: str) -> int:
    """Parse a whole number of at least 0."""
    return count(number) if number.strip() != "0" else 0


def truth(text: str) -> bool:
    """Parse True or False."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False")
    return text.lower() == "true"


# `--bf16`, or `--bf16 True` as in Hugging Face's scripts
SWITCH = {"type": truth, "nargs": "?", "const": True}
