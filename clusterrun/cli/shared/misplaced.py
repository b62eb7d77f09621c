"""Options of clusterrun after the script: refused if the script certainly has none of them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from clusterrun.cli.shared.help import HEADINGS
from clusterrun.cli.shared.spellings import normalized
from clusterrun.errors import UsageError

if TYPE_CHECKING:
    from clusterrun.linting.options import ScriptOptions

_UNMISTAKABLE: Final = (HEADINGS["slurm"], HEADINGS["submission"])
_OTHERS: Final = ("cluster", "nproc_per_node")
_SHORT: Final = ("-N", "-p", "-A", "-t")
_HELP: Final = ("-h", "--help")
# No library's parser has these.
_CERTAIN: Final = (
    *("--nodes", "--gpus-per-node", "--nproc-per-node", "--partition", "--dry-run", "--follow"),
    "-N",
)
_MOST_FILES: Final = 300


def refuse_misplaced(
    ctx: click.Context, before: Sequence[str], entry: str, args: Sequence[str], *, is_module: bool
) -> tuple[str, ...]:
    """Refuse our options among a script's arguments; return notes on those that it may have.

    `before` are the words typed before the script. Raises UsageError.
    """
    options = {name: o for o in ctx.command.params for name in (*o.opts, *o.secondary_opts)}
    ours = {*options, *_CERTAIN, *_HELP}  # the verb may lack some of submit's
    plain = args[: args.index("--")] if "--" in args else args
    found = {at: name for at, word in enumerate(plain) if (name := _name(word)) in ours}
    if not found:
        return ()
    script = _options_of(entry, is_module=is_module)
    refused: dict[int, click.Parameter | None] = {}
    noted: list[str] = []
    for at, name in found.items():
        option = options.get(name)
        if script.may_have(typed := _typed(args[at])):
            continue
        if _lacks(script, name, option):
            refused[at] = option
        elif _is_unmistakable(name, option) or (script.are_visible and _is_of_a_job(option)):
            noted.append(typed)
    if refused:
        raise _refusal(ctx.command_path, before, entry, args, refused, is_module=is_module)
    where = "comes after the script and goes to it; put clusterrun's options before the script"
    return tuple(f"{name} {where}" for name in dict.fromkeys(noted))


def _name(word: str) -> str:
    """Return our name of the option that a word is: `--gpus_per_node=8`, `-N4`."""
    if word.startswith("--"):
        return f"--{normalized(_typed(word)[2:])}"
    return word[:2] if re.match(r"-(?:[A-Za-z]|N\d+)\Z", word) else ""


def _typed(word: str) -> str:
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def _is_unmistakable(name: str, option: click.Parameter | None) -> bool:
    is_ours = getattr(option, "heading", "") in _UNMISTAKABLE
    is_ours = is_ours or getattr(option, "name", "") in _OTHERS
    is_clear = is_ours and (name.startswith("--") or name in _SHORT)
    return is_clear or name in (*_HELP, *_CERTAIN)


def _is_of_a_job(option: click.Parameter | None) -> bool:
    return getattr(option, "heading", HEADINGS["training"]) != HEADINGS["training"]


def _lacks(script: ScriptOptions, name: str, option: click.Parameter | None) -> bool:
    """Return whether a script whose sources do not name an option certainly does not have it."""
    if script.takes_any:
        return False
    if name in _HELP:
        return not script.has_parser
    is_certain = name in _CERTAIN or (script.are_visible and _is_unmistakable(name, option))
    return is_certain and option is not None


def _refusal(
    command: str,
    before: Sequence[str],
    entry: str,
    args: Sequence[str],
    refused: Mapping[int, click.Parameter | None],
    *,
    is_module: bool,
) -> UsageError:
    moved: list[int] = []
    for at, option in refused.items():
        is_flag = option is None or getattr(option, "is_flag", False)
        is_whole = is_flag or _typed(args[at]) != args[at] or at + 1 == len(args)
        moved += [at] if is_whole else [at, at + 1]
    names = " and ".join(dict.fromkeys(_typed(args[at]) for at in refused))
    rest = [word for at, word in enumerate(args) if at not in moved]
    after = ["--"] if is_module else [entry]
    right = [*before, *(args[at] for at in moved), *(after if rest or not is_module else ()), *rest]
    passed = [*before, *after, *(() if is_module else ("--",)), *args]
    return UsageError(
        f"{names} would go to the script, but {entry} has no such option",
        hint=(
            f"put clusterrun's options before the script: {command} {shlex.join(right)}",
            f"to pass it to the script: {command} {shlex.join(passed)}",
        ),
    )


# The sources


def _options_of(entry: str, *, is_module: bool) -> ScriptOptions:
    """Read a script and the modules of its project."""
    from clusterrun.linting.options import ScriptOptions  # rarely needed, slow to import
    from clusterrun.linting.source import Script

    path = Path(*entry.split(".")) if is_module else Path(entry)
    starts = [path.with_suffix(".py"), path / "__main__.py"] if is_module else [path]
    search = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    roots = [path.parent, Path(), Path("src"), *map(Path, search)]
    modules: dict[Path, Script] = {}
    own: set[str] = set()
    waiting = [file for file in starts if file.is_file()]
    while waiting and len(modules) < _MOST_FILES:
        file = waiting.pop()
        if file not in modules:
            try:
                modules[file] = Script(file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            for package in modules[file].packages - own - sys.stdlib_module_names:
                files = list(islice(_files_of(package, file.parent, roots), _MOST_FILES))
                own |= {package} if files else set()
                waiting += files
    return ScriptOptions([*modules.values()], (*own, *sys.stdlib_module_names))


def _files_of(package: str, directory: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of a project's package; "." is the directory of the importing module."""
    for root in roots if package != "." else ():
        yield from root.glob(f"{package}.py")
        yield from root.joinpath(package).rglob("*.py")
    if package == ".":
        yield from directory.glob("*.py")
