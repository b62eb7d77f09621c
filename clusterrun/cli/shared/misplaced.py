"""Options of clusterrun after the script: refused if the script certainly has none of them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from clusterrun.cli.shared.help import HEADINGS, OF_A_JOB
from clusterrun.cli.shared.spellings import normalized
from clusterrun.errors import UsageError

if TYPE_CHECKING:
    from clusterrun.linting.options import ScriptOptions

_UNMISTAKABLE: Final = (HEADINGS["slurm"], HEADINGS["submission"])
_OF_A_JOB: Final = {*OF_A_JOB, HEADINGS["submission"]}
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
    params = ctx.command.params
    options = {name: each for each in params for name in (*each.opts, *each.secondary_opts)}
    ours = {*options, *_CERTAIN, *_HELP}  # the verb may lack some of submit's
    plain = args[: args.index("--")] if "--" in args else args
    found = {at: name for at, word in enumerate(plain) if (name := _name(word)) in ours}
    script = _options_of(entry, is_module=is_module) if found else None
    moved, unsure, refused, noted = list[int](), list[int](), list[str](), list[str]()
    for at, name in found.items() if script else ():
        option, typed = options.get(name), _typed(args[at])
        heading = getattr(option, "heading", "")
        is_ours = heading in _UNMISTAKABLE or getattr(option, "name", "") in _OTHERS
        is_clear = (is_ours and (name[:2] == "--" or name in _SHORT)) or name in _CERTAIN
        if script is None or script.may_have(typed):
            continue
        is_certain = name in _CERTAIN or (script.are_visible and is_clear)
        is_certain = not script.has_parser if name in _HELP else bool(option) and is_certain
        places = [at] if getattr(option, "is_flag", True) or typed != args[at] else [at, at + 1]
        if is_certain and not script.takes_any:
            moved += places
            refused.append(typed)
        elif is_clear or name in _HELP or (script.are_visible and heading in _OF_A_JOB):
            noted.append(typed)
            unsure += places
    if refused:
        moved = sorted(moved + unsure)
        raise _refusal([ctx.command_path, *before], entry, args, moved, refused, is_module)
    where = "comes after the script and goes to it; put clusterrun's options before the script"
    return tuple(f"{name} {where}" for name in dict.fromkeys(noted))


def _name(word: str) -> str:
    """Return our name of the option that a word is: `--gpus_per_node=8`, `-N4`."""
    if word.startswith("--"):
        return f"--{normalized(_typed(word)[2:])}"
    return word[:2] if re.match(r"-(?:[A-Za-z]|N\d+)\Z", word) else ""


def _typed(word: str) -> str:
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def _refusal(
    first: list[str],
    entry: str,
    args: Sequence[str],
    moved: Sequence[int],
    refused: Sequence[str],
    is_module: bool,
) -> UsageError:
    rest = [word for at, word in enumerate(args) if at not in moved]
    after = ["--"] * bool(rest) if is_module else [entry]
    own = [args[at] for at in moved if at < len(args)]
    right = shlex.join([*first[1:], *own, *after, *rest])
    passed = shlex.join([*first[1:], *([] if is_module else [entry]), "--", *args])
    return UsageError(
        f"{' and '.join(dict.fromkeys(refused))} would go to the script, "
        f"but {entry} has no such option",
        hint=(
            f"put clusterrun's options before the script: {first[0]} {right}",
            f"to pass it to the script: {first[0]} {passed}",
        ),
    )


def _options_of(entry: str, *, is_module: bool) -> ScriptOptions:
    """Read a script and the modules of its project."""
    from clusterrun.linting.options import ScriptOptions  # rarely needed, slow to import
    from clusterrun.linting.source import Script

    path = Path(*entry.split(".")) if is_module else Path(entry)
    waiting = [path.with_suffix(".py"), path / "__main__.py"] if is_module else [path]
    search = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    roots = [path.parent, Path(), Path("src"), *map(Path, search)]
    modules: dict[Path, Script] = {}
    own = set(sys.stdlib_module_names)
    while waiting and len(modules) < _MOST_FILES:
        file = waiting.pop()
        if file in modules or not file.is_file():  # reading would use up a pipe
            continue
        try:
            modules[file] = Script(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for package in modules[file].packages - own:
            files = list(islice(_files_of(package, file.parent, roots), _MOST_FILES))
            own |= {package} if files and package != "." else set()
            waiting += files
    return ScriptOptions([*modules.values()], own)


def _files_of(package: str, directory: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of a project's package; "." is the directory of the importing module."""
    if package == ".":
        yield from directory.glob("*.py")
    for root in roots if package != "." else ():
        yield from root.glob(f"{package}.py")
        yield from root.joinpath(package).rglob("*.py")
