"""Which options a script may have, from the sources of its project."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from clusterrun.linting.rules import KNOWN, TRAINING
from clusterrun.linting.source import Script, text_of

_PARSERS: Final = ("absl", "argparse", "click", "docopt", "optparse", "typer")
_HARMLESS: Final = {*KNOWN, *TRAINING, *_PARSERS, "clusterrun", "huggingface_hub", "torchmetrics"}
# Parsers of other packages: they have none of our options, but the script may have any.
_LIBRARIES: Final = {"draccus", "fire", "hydra", "jsonargparse", "simple_parsing", "tyro"}
_TAKES_ANY: Final = re.compile(
    r"parse_known_\w*args|REMAINDER|nargs *= *.\.\.\.|(?:ignore_unknown|allow_extra)_\w+"
    r"|return_remaining_\w+|\.from_cli\(|\bexec\(|\brunpy\b|import_module\([^)]*\)\.\w+\("
    r"|^import fire\b[\s\S]*\*\*\w"
)
_READS_WORDS: Final = re.compile(r"(?<!len\(sys\.)\bargv\b(?!\[-?\d+\])")
# What a package that can't be read may parse arguments with, or have them from.
_RUNS_ANOTHER: Final = re.compile(
    r"(?i)\.(?:main|cli|app|run|launch)\b|\.\w*(?:arg|pars|option|flag|config|param)\w*\Z"
)
_JOINS_ANOTHER: Final = re.compile(r"\bparents *=|\bsys\.path\b")
_OF_LIBRARY: Final = re.compile(
    r"HfArgumentParser|TrlParser|\b\w+CLI\b|add_config_arguments|add_argparse_args|parse_args_into"
)


class ScriptOptions:
    """The options of a script, from the modules of its project; packages in `own` are known.

    `has_parser`: it may parse its arguments. `are_visible`: its sources name all its options.
    `takes_any`: it may take any word as an option.
    """

    def __init__(self, modules: Sequence[Script], own: Collection[str]) -> None:
        packages = {name for module in modules for name in module.packages}
        foreign = packages - {*_HARMLESS, *own, "."}
        unread = foreign - _LIBRARIES
        text = "\n".join(module.text for module in modules)
        parses = not packages.isdisjoint(_PARSERS)
        is_of_library = bool(foreign or _OF_LIBRARY.search(text))
        self.has_parser = parses or is_of_library
        self.takes_any = not modules or bool(
            _TAKES_ANY.search(text)
            or any(_uses_parser_of(unread, module) for module in modules)
            or (unread and ("fire" in packages or _JOINS_ANOTHER.search(text)))
            or (not parses and _READS_WORDS.search(text))
            or not all(_is_literal(module) for module in modules)
        )
        self.are_visible = not (is_of_library or self.takes_any)
        has_names = not self.are_visible or not packages.isdisjoint(("absl", "typer"))
        self._words = {word.replace("_", "-") for m in modules for word in _words(m, has_names)}

    def may_have(self, option: str) -> bool:
        """Return whether the sources name an option, a longer one, or a field of this name."""
        name = option.replace("_", "-")
        if not name.startswith("--"):
            return any(each.startswith(name) or each == name[1:] for each in self._words)
        return any(each.startswith((name, name[2:])) for each in self._words)


def _uses_parser_of(packages: Collection[str], script: Script) -> bool:
    """Return whether a script uses what may parse its arguments, by its name, from packages."""
    names = {script.name(node) for node in script.nodes}
    return any(n.partition(".")[0] in packages and _RUNS_ANOTHER.search(n) for n in names)


def _is_literal(script: Script) -> bool:
    """Return whether all options that a script adds to a parser are written out."""
    adders = (".add_argument", ".add_option", "click.option")
    calls = [*script.calls(*adders)]
    named = sum(script.name(node).endswith(adders) for node in script.nodes)
    return named == len(calls) and all(text_of(name) for call in calls for name in call.args)


def _words(script: Script, has_names: bool) -> Iterator[str]:
    """Yield literal options and fields of classes; with `has_names` also parameters and words."""
    for node in script.nodes:
        text = text_of(node)
        if not re.search(r"\s", text) or "docopt" in script.packages:
            yield from re.findall(r"(?<![\w-])--?\w[\w-]*", text)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        if has_names:
            yield node.arg if isinstance(node, ast.arg) else text
