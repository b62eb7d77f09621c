"""Whether a script's own argparse accepts its arguments, from the literal calls that build it."""

from __future__ import annotations

import argparse
import ast
import difflib
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from clusterrun.linting.source import (
    Script,
    constant,
    has_unknown_arguments,
    is_main_guard,
    keyword,
)

_TYPES: Final[dict[str, Any]] = {"int": int, "float": float, "str": str}
_LITERAL: Final = ("nargs", "choices", "required", "action", "dest", "const")
_ACTIONS: Final = (None, "store", "store_true", "store_false", "append", "count", "store_const")
# Methods that change a parser in ways that are not followed.
_OTHER_WAYS: Final = (
    *("add_subparsers", "set_defaults", "parse_known_args", "register", "parse_intermixed_args"),
    *("add_mutually_exclusive_group", "add_argument_class", "parse_args_into_dataclasses"),
)


class _Refused(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise SystemExit(status)


def refusal(script: Script, args: Sequence[str]) -> tuple[ast.AST, str] | None:
    """Return where, and why, the script refuses these arguments; None if it does not, or may not.

    It must build one parser from literals, in one place, and parse the command line with it.
    """
    built = _parser(script)
    if built is None:
        return None
    parser, at = built
    try:
        parser.parse_args(list(args))
    except _Refused as error:
        return at, f"{error}{_near(parser, str(error))}"
    except (SystemExit, ValueError, TypeError):  # --help; a value that its own type refuses
        return None
    return None


def _near(parser: _Parser, message: str) -> str:
    """Return a question that names the parser's option nearest to one of a message; "" for none."""
    known = [option for action in parser._actions for option in action.option_strings]
    for word in re.findall(r"(?<= )--[\w-]+", message):
        if word not in known and (near := difflib.get_close_matches(word, known, n=1)):
            return f" (did you mean {near[0]}?)"
    return ""


def _parser(script: Script) -> tuple[_Parser, ast.AST] | None:
    """Rebuild the script's parser; None if it may be another than what can be seen."""
    made = list(script.calls("argparse.ArgumentParser"))
    parsed = [call for call in script.calls(".parse_args") if not call.args and not call.keywords]
    if len(made) != 1 or len(parsed) != 1 or list(script.calls(*(f".{n}" for n in _OTHER_WAYS))):
        return None
    owner = _assigned_name(script, made[0])
    if not owner or not _is_plain(made[0]) or _escapes(script, owner):
        return None
    parser = _Parser(prog="script")
    groups = {owner, *_groups(script, owner)}
    for call in script.calls(".add_argument"):
        if not isinstance(call.func, ast.Attribute) or ast.unparse(call.func.value) not in groups:
            return None
        if not _add(parser, script, call):
            return None
    return parser, parsed[0]


def _is_plain(call: ast.Call) -> bool:
    free = {"description", "prog", "usage", "epilog", "formatter_class", "add_help"}
    return not has_unknown_arguments(call) and {w.arg for w in call.keywords} <= free


def _assigned_name(script: Script, call: ast.Call) -> str:
    parent = next(script.around(call), None)
    if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
        target = parent.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def _groups(script: Script, owner: str) -> set[str]:
    calls = script.calls(f"{owner}.add_argument_group")
    return {name for call in calls if (name := _assigned_name(script, call))}


def _escapes(script: Script, owner: str) -> bool:
    """Return whether the parser is passed, returned or bound elsewhere, so that others may add."""
    for node in script.nodes:
        is_read = isinstance(node, ast.Name) and node.id == owner and isinstance(node.ctx, ast.Load)
        if is_read and not isinstance(next(script.around(node), None), ast.Attribute):
            return True
    return False


def _add(parser: _Parser, script: Script, call: ast.Call) -> bool:
    """Add an argument to the rebuilt parser; return whether everything that decides is literal."""
    flags = [constant(each) for each in call.args]
    texts = [flag for flag in flags if isinstance(flag, str)]
    if has_unknown_arguments(call) or len(texts) != len(flags) or not texts:
        return False
    branches = (each for each in script.around(call) if isinstance(each, ast.If))
    if not all(is_main_guard(each.test) for each in branches):
        return False
    options: dict[str, Any] = {}
    for name in _LITERAL:
        if (given := keyword(call, name)) is not None:
            try:
                options[name] = ast.literal_eval(given)
            except (ValueError, TypeError, SyntaxError):
                return False
    if options.get("action") not in _ACTIONS:
        return False
    kind = keyword(call, "type")
    if kind is not None and options.get("action") in (None, "store", "append"):
        options["type"] = _TYPES.get(script.name(kind), str)
        if options["type"] is str and script.name(kind) != "str":
            options.pop("choices", None)
    try:
        parser.add_argument(*texts, **options)
    except (ValueError, TypeError, argparse.ArgumentError):
        return False
    return True
