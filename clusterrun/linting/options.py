"""Which options a script may have, from the sources of its project."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from clusterrun.linting.rules import TRAINING, is_closed
from clusterrun.linting.source import Script, text_of

_PARSERS: Final = ("absl", "argparse", "click", "docopt", "getopt", "optparse", "typer")
_HARMLESS: Final = (*TRAINING, *_PARSERS, "clusterrun", "huggingface_hub", "torchmetrics", ".")
_TAKES_ANY: Final = re.compile(
    r"parse_known_\w*args|REMAINDER|(?:ignore_unknown|allow_extra|return_remaining)_\w+"
    r"|\.from_cli\(|\bexec\("
)
_READS_WORDS: Final = re.compile(r"(?<!len\(sys\.)\bargv\b(?!\[-?\d+\])")
_RUNS_ANOTHER: Final = re.compile(r"from [\w.]+ import [^\n]*\b(?:main|cli|app)\b")
_OF_LIBRARY: Final = re.compile(
    r"HfArgumentParser|TrlParser|\b\w+CLI\b|add_config_arguments|add_argparse_args|parse_args_into"
)


class ScriptOptions:
    """The options of a script, from the modules of its project; packages in `own` are known.

    `has_parser`: it may parse its arguments. `are_visible`: its sources name all its options.
    `takes_any`: it may take any word as an option.
    """

    def __init__(self, modules: Sequence[Script], own: Collection[str]) -> None:
        is_foreign = not all(is_closed(each, also=(*_HARMLESS, *own)) for each in modules)
        packages = {name for module in modules for name in module.packages}
        text = "\n".join(module.text for module in modules)
        parses = not packages.isdisjoint(_PARSERS)
        is_of_library = is_foreign or bool(_OF_LIBRARY.search(text))
        self.has_parser = parses or is_of_library
        self.takes_any = not modules or bool(
            _TAKES_ANY.search(text)
            or (is_foreign and _RUNS_ANOTHER.search(text))
            or (not parses and _READS_WORDS.search(text))
        )
        calls = [call for each in modules for call in each.calls(".add_argument", ".add_option")]
        is_literal = all(text_of(name) for call in calls for name in call.args)
        self.are_visible = is_literal and not (is_of_library or self.takes_any)
        has_names = not self.are_visible or not packages.isdisjoint(("absl", "typer"))
        self._words = {word.replace("_", "-") for m in modules for word in _words(m, has_names)}

    def may_have(self, option: str) -> bool:
        """Return whether the sources name an option, a longer one, or a field of this name."""
        name = option.replace("_", "-")
        if not name.startswith("--"):
            return any(each.startswith(name) or each == name[1:] for each in self._words)
        return any(each.startswith((name, name[2:])) for each in self._words)


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
