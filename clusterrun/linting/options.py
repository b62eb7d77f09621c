"""Which options a script may have, from the sources of its project."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from clusterrun.linting.rules import TRAINING, foreign_packages
from clusterrun.linting.source import Script, constant, text_of

_PARSERS: Final = ("absl", "argparse", "click", "docopt", "getopt", "optparse", "typer")
_HARMLESS: Final = (*TRAINING, *_PARSERS, "clusterrun", "huggingface_hub", "torchmetrics", ".")
_TAKES_ANY: Final = re.compile(
    r"parse_known_\w*args|REMAINDER|(?:ignore_unknown|allow_extra|return_remaining)_\w+"
    r"|\.from_cli\(|\bexec\("
)
_OF_LIBRARY: Final = re.compile(
    r"HfArgumentParser|TrlParser|\b\w+CLI\b|add_config_arguments|add_argparse_args|parse_args_into"
)


class ScriptOptions:
    """The options of a script, from the modules of its project, or from none.

    `has_parser`: it may parse its arguments. `are_visible`: its sources name all its options.
    `takes_any`: it may take any word as an option. Packages in `harmless` have no parser.
    """

    def __init__(self, modules: Sequence[Script], harmless: Collection[str]) -> None:
        foreign = [foreign_packages(each, also=(*_HARMLESS, *harmless)) for each in modules]
        packages = frozenset[str]().union(*(module.packages for module in modules))
        text = "\n".join(module.text for module in modules)
        parses = not packages.isdisjoint(_PARSERS)
        is_of_library = any(foreign) or bool(_OF_LIBRARY.search(text))
        self.has_parser = parses or is_of_library
        self.takes_any = (
            not modules
            or bool(_TAKES_ANY.search(text))
            or any(map(_hands_over, modules, foreign))
            or (not parses and any(map(_reads_words, modules)))
        )
        is_read = not (is_of_library or self.takes_any)
        self.are_visible = is_read and not any(map(_computes_names, modules))
        has_names = not self.are_visible or not packages.isdisjoint(("absl", "typer"))
        self._words = {
            word.replace("_", "-")
            for module in modules
            for word in (*_words(module), *(_names(module) if has_names else ()))
        }

    def may_have(self, option: str) -> bool:
        """Return whether the sources name an option, a longer one, or a field of this name."""
        name = option.replace("_", "-")
        if not name.startswith("--"):
            return any(each.startswith(name) or each == name[1:] for each in self._words)
        return any(each.startswith((name, name[2:])) for each in self._words)


def _words(script: Script) -> Iterator[str]:
    """Yield literal options, and the fields of classes: a dataclass may become a parser."""
    for node in script.nodes:
        text = text_of(node)
        if not re.search(r"\s", text) or "docopt" in script.packages:
            yield from re.findall(r"(?<![\w-])--?\w[\w-]*", text)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _names(script: Script) -> Iterator[str]:
    """Yield parameters and literal words, which some parsers make options of."""
    for node in script.nodes:
        yield node.arg if isinstance(node, ast.arg) else text_of(node)


def _computes_names(script: Script) -> bool:
    """Return whether a parser gets options whose names are not literals."""
    calls = script.calls(".add_argument", ".add_option")
    return any(not all(text_of(each) for each in call.args) for call in calls)


def _reads_words(script: Script) -> bool:
    """Return whether a script uses more of `sys.argv` than its length and single words."""
    for node in script.nodes:
        if isinstance(node, ast.expr) and script.name(node) == "sys.argv":
            user = next(script.around(node), None)
            is_word = isinstance(user, ast.Subscript) and isinstance(constant(user.slice), int)
            is_length = isinstance(user, ast.Call) and script.name(user.func) == "len"
            if not (is_word or is_length):
                return True
    return False


def _hands_over(script: Script, foreign: Collection[str]) -> bool:
    """Return whether a script calls something like `main()` of a package elsewhere."""
    return any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and not (node.value.args or node.value.keywords)
        and script.name(node.value.func).partition(".")[0] in foreign
        for node in script.nodes
    )
