"""Accept or explain the spellings of sbatch, torchrun, accelerate and others (`spellings.yaml`).

`normalized` accepts some; the rest get a hint.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import click

from clusterrun.errors import UsageError
from clusterrun.shared import shell

JOB_VERBS: Final = ("submit", "render", "check", "resume", "resubmit", "scaling", "plan")
CONTINUING: Final = ("resume", "resubmit")
_ACCEPTED: Final = {
    **dict.fromkeys(("nnodes", "num-nodes", "num-machines"), "nodes"),
    "deepspeed-config-file": "deepspeed-config",
    "num-cpu-threads-per-process": "threads-per-process",
    "walltime": "time",
    "dryrun": "dry-run",
}
_SIMILAR: Final = 0.8
_TORCHRUN_WORDS: Final = ("auto", "cpu", "gpu")  # for --nproc-per-node: one rank per GPU
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")
_NUMBERS: Final = {"--node-rank", "--machine-rank"}
_MODULE: Final = r"(?:--module(?:=|\Z)|-m)(.*)"
_SINGLE_DASH: Final = r"-[a-z][a-z-]{2,}\Z"


def normalized(name: str) -> str:
    """Return our name of an option, without its dashes: `gpus_per_node`, `nnodes`."""
    plain = name.replace("_", "-")
    return _ACCEPTED.get(plain, plain)


def no_option(error: click.NoSuchOption, words: Sequence[str]) -> UsageError:
    """Return the error for an option that a command does not have; `words` were typed."""
    ctx = error.ctx
    verb = (ctx.info_name or "") if ctx else ""
    flag = _dashed(error.option_name)
    at = next((n for n, word in enumerate(words) if _names(word, flag)), len(words))
    value = _value(words, at, flag)
    typed = words[at].partition("=")[0] if at < len(words) and flag.startswith("--") else flag
    known = [name for each in ctx.command.params for name in each.opts] if ctx else []
    from clusterrun.config.keys import FORMER  # only after a mistake

    if "--set" in known and flag in FORMER:
        own = itertools.takewhile(lambda word: word != "--" and not word.endswith(".py"), words)
        return UsageError(f"no option '{typed}'", hint=f"pass {shlex.join(renewed([*own])[0])}")
    hints = _hints(flag, words, at, verb, known)
    fallback = "--help-all" if verb in JOB_VERBS else "--help"
    command = ctx.command_path if ctx else "clusterrun"
    hint = next(hints, f"run '{command} {fallback}' for the options")
    hint = _filled(hint, value=value or "VALUE", verb=verb)
    return UsageError(f"no option '{typed}'", hint=hint)


def _hints(
    flag: str, words: Sequence[str], at: int, verb: str, known: Sequence[str]
) -> Iterator[str]:
    """Yield hints, the most certain first."""
    typed = words[at] if at < len(words) else flag
    if re.match(_SINGLE_DASH, typed) and f"-{typed}" in known:
        yield f"use '-{typed}'"
    if verb in JOB_VERBS and "," in _value(words, at, flag):
        yield from _entry("listed", flag)
    for section in (*_no_slurm(words, at, flag), verb, "job") if verb in JOB_VERBS else (verb,):
        yield from _entry(section, typed.partition("=")[0], flag)
    if verb in JOB_VERBS:
        for program in ("sbatch", "srun"):
            if flag in _table()[program].split():
                whole = typed if "=" in typed else _joined(words, at)
                yield f"pass it to {program}: --{program}-arg={shlex.quote(whole)}"
    near = _nearest(flag, known)
    if near:
        yield f"use '{near}'"
    yield from _behind(words, at, verb)


def renewed(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the former options among options as `--set KEY=VALUE`, and the other words.

    >>> renewed(["--switches", "1", "--no-requeue", "-N2"])
    (['--set', 'slurm.switches=1', '--set', 'slurm.requeue=false'], ['-N2'])
    """
    from clusterrun.config.fields import Kind  # only after a mistake
    from clusterrun.config.keys import FORMER

    texts: dict[str, list[str]] = {}
    others, left = list[str](), list(words)
    while left:
        name = _option_name(left[0])
        field, value = FORMER.get(name), _value(left, 0, name)
        word = left.pop(0)
        if field is None:
            others.append(word)
        elif field.kind is Kind.FLAG:
            texts[field.key] = ["false" if name.startswith("--no-") else "true"]
        else:
            left = left[1:] if value and left[:1] == [value] else left
            old = texts.get(field.key, []) if field.kind is Kind.TEXTS else []
            texts[field.key] = [*old, value or "VALUE"]
    values = {key: found[0] if len(found) == 1 else str(found) for key, found in texts.items()}
    return [word for key, text in values.items() for word in ("--set", f"{key}={text}")], others


def _option_name(word: str) -> str:
    return f"--{normalized(word[2:].partition('=')[0])}" if word.startswith("--") else word[:2]


def _no_slurm(words: Sequence[str], at: int, flag: str) -> Iterator[str]:
    is_chosen = any(word.startswith("--cluster") for word in words)
    if not is_chosen and _value(words, at, flag) not in _LOCAL and shell.find("sbatch") is None:
        yield "job_without_slurm"


def _entry(section: str, *flags: str) -> Iterator[str]:
    for names, hint in _table().get(section, {}).items():
        if any(flag in names.split() for flag in flags):
            yield hint


def _behind(words: Sequence[str], at: int, verb: str) -> Iterator[str]:
    """Yield where an argument of the script belongs."""
    if verb in CONTINUING:
        yield f"put arguments of the script after --: {_line([*words[:at], '--', *words[at:]])}"
    elif hints := [*_behind_module(words, at)]:
        yield from hints
    elif verb in ("submit", "render", "scaling") and at < len(words):
        script = next((word for word in words[at:] if word.endswith(".py")), "train.py")
        rest = " ".join(word for word in words[at : at + 2] if word != script)
        yield f"put arguments of the script after it: clusterrun {verb} {script} {rest}"


def _behind_module(words: Sequence[str], at: int) -> Iterator[str]:
    if any(word in ("-m", "--module") for word in words[:at]):
        yield f"put arguments of a module after --: {_line([*words[:at], '--', *words[at:]])}"


def _joined(words: Sequence[str], at: int) -> str:
    """Write an option and its value as one word."""
    value = _value(words, at, words[at]) if at < len(words) else ""
    return f"{words[at]}={value}" if value else words[at]


def _nearest(flag: str, known: Sequence[str]) -> str | None:
    """Return the option that was meant: a close spelling, or the only one with this beginning."""
    if not flag.startswith("--"):
        return None
    begun = [name for name in known if name.startswith(flag)]
    if len(begun) == 1 and len(flag) > 4:
        return begun[0]
    long = [name for name in known if name.startswith("--")]
    found = difflib.get_close_matches(flag, long, n=1, cutoff=_SIMILAR)
    return found[0] if found else None


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")


def _names(word: str, flag: str) -> bool:
    name = _dashed(word.partition("=")[0])
    if flag.startswith("--"):
        return name.startswith("--") and f"--{normalized(name[2:])}" == flag
    return word.startswith(flag) and not word.startswith("--")


def _value(words: Sequence[str], at: int, flag: str) -> str:
    """Return what was typed as the value of an option; "" if nothing was."""
    if at >= len(words):
        return ""
    word, following = words[at], words[at + 1] if at + 1 < len(words) else ""
    if "=" in word:
        return word.partition("=")[2]
    if not flag.startswith("--") and len(word) > len(flag) and not re.match(_SINGLE_DASH, word):
        return word[len(flag) :]
    return "" if following.startswith("-") or following.endswith(".py") else following


def _filled(hint: str, *, value: str, verb: str) -> str:
    fields = {"value": value, "gpus": value.removeprefix("gpu:"), "verb": verb}
    fields |= {str(n): part for n, part in enumerate(value.split("x"))}  # 2x4
    return re.sub(r"\{(\w+)\}", lambda found: fields.get(found[1], found[0]), hint)


def hint_for_command(name: str, words: Sequence[str], verbs: Sequence[str]) -> str:
    """Return the hint for a command that does not exist."""
    if name.endswith(".py"):
        return f"start a job with: {_line(['submit', *words])}"
    if name.isdigit():
        return f"use 'status {name}', or 'logs {name}'"
    if _is_program(name):
        return f"start the ranks with: {translated(words, 'submit')}"
    for names, hint in _table()["commands"].items():
        if name in names.split():
            return str(hint)
    near = difflib.get_close_matches(name, verbs, n=1)
    return f"use '{near[0]}'" if near else "run 'clusterrun --help' for the commands"


def refuse_single_dash(words: Sequence[str], ctx: click.Context) -> None:
    """Refuse `-time 30`, which a parser would read as `-t ime`. Raises UsageError."""
    known = {name for each in ctx.command.params for name in each.opts}
    for at in _own_options(words, ctx.command):
        word = words[at]
        if not re.match(_SINGLE_DASH, word):
            continue
        hints = [f"use '-{word}'"] if f"-{word}" in known else [*_entry("job", word)][:1]
        if hints:
            verb = ctx.info_name or ""
            hints += _behind_module([verb, *words], at + 1)
            raise UsageError(f"no option '{word}'", hint=tuple(hints))


def _own_options(words: Sequence[str], command: click.Command) -> Iterator[int]:
    """Yield the places of a command's options, up to the script."""
    with_value = {
        name
        for each in command.params
        if isinstance(each, click.Option) and not (each.is_flag or each.count)
        for name in each.opts
    }
    is_value = False
    for at, word in enumerate(words):
        is_option = len(word) > 1 and word.startswith("-")
        if is_value:
            is_value = False
        elif word == "--" or not (is_option or command.allow_interspersed_args):
            return
        elif is_option:
            yield at
            is_value = _awaits_value(word, with_value)


def _awaits_value(word: str, with_value: Set[str]) -> bool:
    """Whether the value of an option is the next word: `--nodes`, `-N`, or `-N` after flags."""
    if word.startswith("--"):
        return f"--{normalized(word[2:])}" in with_value
    first = next((n for n, letter in enumerate(word) if f"-{letter}" in with_value), None)
    return first == len(word) - 1


def refuse_launcher_module(words: Sequence[str], ctx: click.Context) -> None:
    """Refuse a launcher as the module, `-m torch.distributed.run`. Raises UsageError."""
    for at in _own_options(words, ctx.command):
        if found := re.match(_MODULE, words[at]):
            module, *rest = [word for word in (found[1], *words[at + 1 :]) if word] or [""]
            if _is_launcher(module):
                raise _not_the_script(module, rest, ctx.info_name or "", words[:at])


def _is_launcher(module: str) -> bool:
    parts = module.split(".")  # a launcher in a package contains more modules
    begun = [".".join(parts[:n]) for n in range(2, len(parts))]
    return not {module, *begun}.isdisjoint(_table()["modules"].split())


def _not_the_script(name: str, words: Sequence[str], verb: str, own: Sequence[str]) -> UsageError:
    return UsageError(
        f"'{name}' is not the training script; clusterrun starts the ranks itself",
        hint=translated(words, verb, own),
    )


def refuse_other_program(words: Sequence[str], verb: str, own: Sequence[str] = ()) -> None:
    """Refuse a launcher, or a file that is not Python, as the script. Raises UsageError.

    `own` are the options of clusterrun before it.
    """
    first = words[0]
    if first.endswith(".py"):
        return
    name = os.path.basename(first)
    if _is_program(name) and ("/" in first or not os.path.isfile(first)):
        raise _not_the_script(name, words, verb, own)
    for endings, hint in _table()["files"].items():
        if os.path.splitext(name)[1] in endings.split():
            hint = _filled(hint, value=first, verb=verb)
            raise UsageError(f"'{first}' is not a Python script", hint=hint)


def _is_program(name: str) -> bool:
    return re.sub(r"(?<=python)[0-9.]+\Z", "", name) in _table()["programs"].split()


def translated(words: Sequence[str], verb: str, own: Sequence[str] = ()) -> str:
    """Translate another launcher's command line, as far as it is clear, after our `own` options.

    >>> translated("torchrun --nnodes=2 --nproc_per_node 4 train.py --lr 1".split(), "submit")
    'clusterrun submit -N 2 --gpus-per-node 4 train.py --lr 1'
    """
    at, entry = _entry_point(words)
    options: dict[str, str] = {}
    for number, word in enumerate(words[:at]):
        name = _dashed(word.partition("=")[0])
        for hint in _entry("translated", name) if word.startswith("-") else ():
            value = _value(words[:at], number, name)
            if (value and value not in _TORCHRUN_WORDS) or "{" not in hint:
                options[hint] = _filled(hint, value=value, verb=verb)
    given = {
        _dashed(word.partition("=")[0]): _value(words[:at], number, "--")
        for number, word in enumerate(words[:at])
    }
    _divide(given, options)
    is_free = not _is_given("--cluster", own) and shell.find("sbatch") is None
    if is_free and (hosts := _hosts(given)):
        options = {"hosts": hosts, **options, "-N {value}": ""}
    added = [each for each in options.values() if each and not _is_given(each.split()[0], own)]
    parts = ("clusterrun", verb, shlex.join(own), *added, shlex.join(entry))
    return " ".join(filter(None, parts))


def _is_given(flag: str, own: Sequence[str]) -> bool:
    flags = (flag, "--nodes", "--nnodes") if flag == "-N" else (flag,)
    return any(word.startswith(flags) for word in own)


def _divide(given: Mapping[str, str], options: dict[str, str]) -> None:
    """Add the ranks per node; accelerate counts those of all machines."""
    total, nodes = (given.get(f"--num-{name}", "") for name in ("processes", "machines"))
    if total.isdigit() and (nodes or "1").isdigit() and int(nodes or 1):
        options["total"] = f"--gpus-per-node {int(total) // int(nodes or 1)}"


def _hosts(given: Mapping[str, str]) -> str:
    """Name the machines of a command line that is typed on each of them, as without Slurm."""
    if hostfile := given.get("--hostfile") or given.get("--deepspeed-hostfile"):
        return f"--cluster ssh --hostfile {hostfile}"
    names = ("--master-addr", "--main-process-ip", "--rdzv-endpoint")
    found = next((given[name] for name in names if given.get(name)), "")
    address = found.partition(":")[0] if found.count(":") == 1 else found
    counts = ("--nnodes", "--num-machines", "--num-nodes")
    number = next((given[name] for name in counts if given.get(name)), "")
    if number == "1" or address in _LOCAL or not (address or _NUMBERS & given.keys()):
        return ""
    more = range(1, min(int(number), 9)) if number.isdecimal() and number != "2" else ("",)
    return f"--cluster ssh --hosts {','.join([address or 'FIRST', *(f'OTHER{n}' for n in more)])}"


def _entry_point(words: Sequence[str]) -> tuple[int, list[str]]:
    """Return the index of the script or module, and the words from there in our spelling."""
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return at, list(words[at:])
        if word in ("-m", "--module") and at + 1 < len(words):
            if _is_launcher(words[at + 1]):  # python -m torch.distributed.run
                continue
            rest = list(words[at + 2 :])
            return at, ["-m", words[at + 1], *(["--", *rest] if rest else [])]
    return len(words), ["train.py"]


def _line(words: Sequence[str]) -> str:
    return shlex.join(["clusterrun", *words])


@functools.cache
def _table() -> Mapping[str, Any]:
    import yaml  # only needed after a mistake

    text = Path(__file__).with_name("spellings.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.safe_load(text)
    return found
