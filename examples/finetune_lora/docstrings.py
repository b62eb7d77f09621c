"""Prompts and answers from every Python: signatures and their docstrings."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IGNORED = -100  # a label without loss

Sample = dict[str, list[int]]


def split_samples(
    tokenizer: Any, *, train: int, held_out: int, max_length: int, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Return training and test samples, none longer than `max_length` tokens.

    Raises ValueError if this Python has too few of them.
    """
    fitting = (
        sample
        for prompt, answer in pairs()
        if len((sample := encoded(tokenizer, prompt, answer))["input_ids"]) <= max_length
    )
    samples = list(itertools.islice(fitting, train + held_out))
    if len(samples) < train + held_out:
        raise ValueError(
            f"this Python has {len(samples)} docstrings of at most {max_length} tokens, "
            f"but {train} + {held_out} are needed"
        )
    random.Random(seed).shuffle(samples)
    return samples[:train], samples[train:]


def encoded(tokenizer: Any, prompt: str, answer: str) -> Sample:
    """Return the tokens of both with an end token, and labels for the answer only."""
    asked = tokenizer.encode(prompt + "\n", add_special_tokens=False)
    said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return {"input_ids": asked + said, "labels": [IGNORED] * len(asked) + said}


def digest(samples: list[Sample]) -> str:
    """Return a checksum: Python versions differ in their docstrings."""
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()


def pairs() -> Iterator[tuple[str, str]]:
    """Yield the signature and first sentence of each standard-library function, without repeats."""
    seen = set()
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            signature = f"{node.name}({ast.unparse(node.args)})"
            sentence = first_sentence(ast.get_docstring(node) or "")
            if sentence and signature not in seen:
                seen.add(signature)
                yield signature, sentence


def source_files() -> Iterator[Path]:
    """Yield the sources of the standard library in a fixed order, without its tests."""
    library = Path(sysconfig.get_paths()["stdlib"])
    yield from sorted(library.glob("*.py"))
    for package in sorted(path.parent for path in library.glob("*/__init__.py")):
        for path in sorted(package.rglob("*.py")):
            if not any(part.startswith("test") for part in path.relative_to(library).parts):
                yield path


def first_sentence(docstring: str) -> str:
    r"""Return the first sentence on one line.

    >>> first_sentence("Read a file,\nor wait. Never fails.\n\nMore.")
    'Read a file, or wait'
    """
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")
