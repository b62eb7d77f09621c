"""Accept or explain the spellings of sbatch, torchrun, accelerate and others (`spellings.yaml`).

`normalized` accepts some; the rest get a hint. Options of clusterrun after the script are refused
if the script certainly has none of them.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from clusterrun.cli.shared.help import HEADINGS, OF_A_JOB
from clusterrun.errors import UsageError
from clusterrun.shared import shell
from clusterrun.shared.wording import nearest

if TYPE_CHECKING:
    from clusterrun.linting.source import ScriptOptions

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
_MACHINE_NUMBERS: Final = {"--node-rank", "--machine-rank"}  # of a machine among several
_MODULE: Final = r"(?:--module(?:=|\Z)|-m)(.*)"


def normalized(name: str) -> str:
    """Return our name of an option, without its dashes: `gpus_per_node`, `nnodes`."""
    plain = name.replace("_", "-")
    return _ACCEPTED.get(plain, plain)


def no_option(error: click.NoSuchOption, words: Sequence[str]) -> UsageError:
    """Return the error for an option that a command does not have; `words` were typed."""
    ctx = error.ctx
    verb = (ctx.info_name or "") if ctx else ""
    flag = error.option_name.replace("_", "-")  # `typed`, below, keeps the user's spelling
    # `word[:2]`: in -c8, the value follows the option without a space.
    indexes = (n for n, word in enumerate(words) if flag in (_name(word), word[:2]))
    at = next(indexes, len(words))  # not found: -z typed as -vz
    value = _value(words, at, flag)
    typed = words[at].partition("=")[0] if at < len(words) and flag.startswith("--") else flag
    known = [name for each in ctx.command.params for name in each.opts] if ctx else []
    inner = ctx.command.list_commands(ctx) if ctx and isinstance(ctx.command, click.Group) else []
    if command := next((word for word in words[at:] if word in inner), ""):
        behind = words.index(command, at)
        moved = [*words[:at], command, *words[at:behind], *words[behind + 1 :]]
        line = shlex.join(["clusterrun", *moved])
        return UsageError(f"no option '{typed}'", hint=f"put options after the command: {line}")
    if "--set" in known and (setting := _setting(flag, value)):
        return UsageError(f"no option '{typed}'", hint=f"pass --set {shlex.quote(setting)}")
    fallback = "--help-all" if verb in JOB_VERBS else "--help"
    command = ctx.command_path if ctx else "clusterrun"
    hint = next(_hints(flag, words, at, verb, known), f"run '{command} {fallback}' for the options")
    return UsageError(f"no option '{typed}'", hint=_filled(hint, value or "VALUE", verb))


def _setting(flag: str, value: str) -> str:
    """Return `KEY=VALUE` for an option that is only a setting, "" for any other."""
    from clusterrun.config.fields import Kind  # only after a mistake
    from clusterrun.config.spec import FIELDS
    from clusterrun.launch.passed_on import SHORT

    name = SHORT.get(flag[1:], flag[2:])  # of `-x`, sbatch's long name
    setting = name.removeprefix("no-").replace("-", "_")
    without_option = (x for x in FIELDS if not x.flags and x.group != "job")  # not SCRIPT, ARGS
    field = next((x for x in without_option if setting in (x.name, x.key.rpartition(".")[2])), None)
    if field is None:
        return ""
    if field.kind is Kind.FLAG:
        value = "false" if name.startswith("no-") else "true"
    return f"{field.key}={value or 'VALUE'}"


def _hints(
    flag: str, words: Sequence[str], at: int, verb: str, known: Sequence[str]
) -> Iterator[str]:
    """Yield hints for an unknown option, typed at index `at`, the most certain first."""
    typed = (words[at] if at < len(words) else flag).partition("=")[0]  # may have underscores
    is_for_job = verb in JOB_VERBS
    if f"-{typed}" in known:  # with one dash instead of two
        yield f"use '-{typed}'"
    if is_for_job and "," in _value(words, at, flag):  # several values
        yield from _entry("listed", flag)
    for section in (verb, "job") if is_for_job else (verb,):
        yield from _entry(section, typed, flag)
    for program in ("sbatch", "srun") if is_for_job else ():
        if flag in _table()[program].split():
            whole = "=".join(filter(None, (typed, _value(words, at, flag))))
            yield f"pass it to {program}: --{program}-arg={shlex.quote(whole)}"
    if flag.startswith("--"):  # three letters or more that begin one name, or nearly a name
        longer = [name for name in known if name.startswith(flag) and len(flag) > len("--xy")]
        names = [name for name in known if name.startswith("--")]
        similar = difflib.get_close_matches(flag, names, n=1, cutoff=_SIMILAR)
        yield from (f"use '{name}'" for name in (longer if len(longer) == 1 else similar))
    if verb in CONTINUING or {"-m", "--module"} & {*words[:at]}:
        line = shlex.join(["clusterrun", *words[:at], "--", *words[at:]])
        yield f"put arguments of the script after --: {line}"
    elif verb in ("submit", "render", "scaling") and at < len(words):
        script = next((word for word in words[at:] if word.endswith(".py")), "train.py")
        rest = " ".join(word for word in words[at : at + 2] if word != script)
        yield f"put arguments of the script after it: clusterrun {verb} {script} {rest}"


def _entry(section: str, *flags: str) -> Iterator[str]:
    """Yield the hints for options or words in a section of the table."""
    for names, hint in _table().get(section, {}).items():
        if not {*flags}.isdisjoint(names.split()):
            yield hint


def _value(words: Sequence[str], at: int, flag: str = "--") -> str:
    """Return the value of the option at an index: of --name=x, --name x, or -nx; "" for none."""
    word, following = (*words[at : at + 2], "", "")[:2]  # "" stands for a word that is not there
    if "=" in word:
        return word.partition("=")[2]
    if not flag.startswith("--") and len(word) > len(flag):  # -nx; the default is any long one
        return word[len(flag) :]
    return "" if following.startswith("-") or following.endswith(".py") else following


def _filled(hint: str, value: str, verb: str = "") -> str:
    """Fill in the fields of a hint; other words in braces stay."""
    fields = {"value": value, "gpus": value.removeprefix("gpu:"), "verb": verb}
    return re.sub(r"\{(\w+)\}", lambda found: fields.get(found[1], found[0]), hint)


def hint_for_command(name: str, words: Sequence[str], verbs: Sequence[str]) -> str:
    """Return the hint for a command that does not exist."""
    if name.endswith(".py"):
        return f"start a job with: {shlex.join(['clusterrun', 'submit', *words])}"
    if name.isdigit():
        return f"use 'status {name}', or 'logs {name}'"
    if _is_program(name):
        return f"start the ranks with: {translated(words, 'submit')}"
    near = nearest(name, verbs)
    guess = f"use '{near}'" if near else "run 'clusterrun --help' for the commands"
    return next(_entry("commands", name), guess)


def refuse_launcher_module(words: Sequence[str], ctx: click.Context) -> None:
    """Refuse a launcher as the module, `-m torch.distributed.run`. Raises UsageError."""
    for at, word in enumerate(words):
        if found := re.match(_MODULE, word):
            # The module follows -m in the same word, or is the next word.
            module, *rest = [each for each in (found[1], *words[at + 1 :]) if each] or [""]
            before = words[:at]
            if "--" in before or any(x.endswith(".py") or _is_program(x) for x in before):
                return  # the word belongs to that program
            if word == "-mem":  # it means --mem, not the module `em`
                raise UsageError("no option '-mem'", hint="use '--mem'")
            if _is_launcher(module):
                raise _not_the_script(module, rest, ctx.info_name or "", before)


def _is_launcher(module: str) -> bool:
    parts = module.split(".")  # a launcher in a package contains more modules
    begun = [".".join(parts[:n]) for n in range(2, len(parts))]
    return not {module, *begun}.isdisjoint(_table()["modules"].split())


def _not_the_script(name: str, words: Sequence[str], verb: str, own: Sequence[str]) -> UsageError:
    text = f"'{name}' is not the training script; clusterrun starts the ranks itself"
    return UsageError(text, hint=translated(words, verb, own))


def refuse_other_program(words: Sequence[str], verb: str, own: Sequence[str] = ()) -> None:
    """Refuse a launcher, or a file that is not Python, as the script; `own` options precede it."""
    first = words[0]
    if first.endswith(".py"):
        return
    name = os.path.basename(first)
    if _is_program(name) and ("/" in first or not os.path.isfile(first)):  # else a script here
        raise _not_the_script(name, words, verb, own)
    for hint in _entry("files", os.path.splitext(name)[1]):
        raise UsageError(f"'{first}' is not a Python script", hint=_filled(hint, first, verb))


def _is_program(name: str) -> bool:
    return re.sub(r"(?<=python)[0-9.]+\Z", "", name) in _table()["programs"].split()


def translated(words: Sequence[str], verb: str, own: Sequence[str] = ()) -> str:
    """Translate another launcher's command line, as far as it is clear, after our `own` options.

    >>> translated("torchrun --nnodes=2 --nproc_per_node 4 train.py --lr 1".split(), "submit")
    'clusterrun submit -N 2 --gpus-per-node 4 train.py --lr 1'
    """
    at, entry = _entry_point(words)
    given = {
        word.partition("=")[0].replace("_", "-"): _value(words[:at], index)
        for index, word in enumerate(words[:at])
        if word.startswith("-")
    }
    options: dict[str, str] = {}  # by hint ("-N {value}"): of equal ones, the last option counts
    for name, value in given.items():
        for hint in _entry("translated", name):
            needs_value = "{" in hint
            if not needs_value or (value and value not in _TORCHRUN_WORDS):  # auto: no number
                options[hint] = _filled(hint, value)
    total, nodes = given.get("--num-processes", ""), given.get("--num-machines") or "1"
    if total.isdigit() and nodes.isdigit() and int(nodes):  # the processes of all machines
        options["total"] = f"--gpus-per-node {int(total) // int(nodes)}"
    has_cluster = any(word.startswith("--cluster") for word in own)
    # Without Slurm here, the job gets the machines that the launcher's options name.
    if not has_cluster and shell.find("sbatch") is None and (hosts := _hosts(given)):
        options.pop("-N {value}", None)  # the hosts are the nodes
        options = {"hosts": hosts, **options}
    parts = ("clusterrun", verb, shlex.join(own), *options.values(), shlex.join(entry))
    return " ".join(filter(None, parts))


def _hosts(given: Mapping[str, str]) -> str:
    """Return options that name all machines of a launcher that is typed on each of them, or ""."""
    if hostfile := given.get("--hostfile") or given.get("--deepspeed-hostfile"):
        return f"--cluster ssh --hostfile {hostfile}"
    names = ("--master-addr", "--main-process-ip", "--rdzv-endpoint")
    endpoint = next((given[name] for name in names if given.get(name)), "")
    has_port = endpoint.count(":") == 1  # an IPv6 address has more colons
    address = endpoint.partition(":")[0] if has_port else endpoint
    counts = ("--nnodes", "--num-machines", "--num-nodes")
    number = next((given[name] for name in counts if given.get(name)), "")
    is_alone = number == "1" or address in _LOCAL
    has_others = bool(address or _MACHINE_NUMBERS & given.keys())
    if is_alone or not has_others:
        return ""
    others = ["OTHER"]  # for the user to replace
    if number.isdecimal() and number != "2":
        others = [f"OTHER{index}" for index in range(1, min(int(number), 9))]  # 8 at most
    return f"--cluster ssh --hosts {','.join([address or 'FIRST', *others])}"


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


@functools.cache
def _table() -> Mapping[str, Any]:
    import yaml  # only needed after a mistake

    text = Path(__file__).with_name("spellings.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.safe_load(text)
    return found


# Options of clusterrun after the script

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
    """Refuse our options after `entry`, a script or module; return notes on those it may have."""
    params = ctx.command.params
    options = {name: each for each in params for name in (*each.opts, *each.secondary_opts)}
    ours = {*options, *_CERTAIN, *_HELP}  # the verb may lack some of submit's
    plain = args[: args.index("--")] if "--" in args else args
    names = {at: name for at, word in enumerate(plain) if (name := _name(word)) in ours}
    if not names:
        return ()
    script = _options_of(entry, is_module=is_module)
    refused, noted = dict[int, str](), dict[int, str]()  # index in `args`: option as typed
    for at, name in names.items():
        typed = _typed(args[at])
        if script.may_have(typed):
            continue
        if _is_refused(name, options.get(name), script):
            refused[at] = typed
        elif _is_noted(name, options.get(name), script):
            noted[at] = typed
    if not refused:
        where = "comes after the script and goes to it; put clusterrun's options before the script"
        return tuple(f"{name} {where}" for name in dict.fromkeys(noted.values()))
    moved = set[int]()
    for at, typed in (*refused.items(), *noted.items()):
        is_flag = getattr(options.get(names[at]), "is_flag", True)
        has_value_in_word = typed != args[at]
        moved |= {at} if is_flag or has_value_in_word else {at, at + 1}
    what = " and ".join(dict.fromkeys(refused.values()))
    raise _refusal([ctx.command_path, *before], entry, args, sorted(moved), what, is_module)


def _is_refused(name: str, option: click.Parameter | None, script: ScriptOptions) -> bool:
    """Return whether the script certainly does not have an option that is certainly ours."""
    if script.takes_any:  # any word may be one of its options
        return False
    if name in _HELP:
        return not script.has_parser  # what parses arguments has --help
    is_certain = name in _CERTAIN or (script.are_visible and _is_distinctive(name, option))
    return option is not None and is_certain  # visible: its sources name all its options


def _is_noted(name: str, option: click.Parameter | None, script: ScriptOptions) -> bool:
    """Return whether an option that the script may have is probably ours."""
    is_of_job = getattr(option, "heading", "") in _OF_A_JOB
    return name in _HELP or _is_distinctive(name, option) or (script.are_visible and is_of_job)


def _is_distinctive(name: str, option: click.Parameter | None) -> bool:
    """Return whether a training script is unlikely to have an option of this name."""
    is_unmistakable = getattr(option, "heading", "") in _UNMISTAKABLE
    is_ours = is_unmistakable or getattr(option, "name", "") in _OTHERS
    return name in _CERTAIN or (is_ours and (name.startswith("--") or name in _SHORT))


def _name(word: str) -> str:
    """Return our name of the option that a word is: `--gpus_per_node=8`, `-N4`."""
    if word.startswith("--"):
        return f"--{normalized(_typed(word)[2:])}"
    return word[:2] if re.match(r"-(?:[A-Za-z]|N\d+)\Z", word) else ""


def _typed(word: str) -> str:
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def _refusal(
    start: list[str], entry: str, args: Sequence[str], moved: list[int], what: str, is_module: bool
) -> UsageError:
    """Return the error, with the two command lines that may be meant; `moved` indexes `args`."""
    command, *before = start  # what was typed before `entry`
    rest = [word for at, word in enumerate(args) if at not in moved]
    own = [args[at] for at in moved if at < len(args)]
    script = [] if is_module else [entry]  # the option -m, in `before`, names a module
    dashes = ["--"] if is_module and rest else []
    right = shlex.join([*before, *own, *script, *dashes, *rest])
    passed = shlex.join([*before, *script, "--", *args])
    text = f"{what} would go to the script, but {entry} has no such option"
    hint = f"put clusterrun's options before the script: {command} {right}"
    return UsageError(text, hint=(hint, f"to pass it to the script: {command} {passed}"))


def _options_of(entry: str, *, is_module: bool) -> ScriptOptions:
    """Read a script and the modules of its project."""
    from clusterrun.linting.source import Script, ScriptOptions  # rarely needed, slow to import

    path = Path(*entry.split(".")) if is_module else Path(entry)
    waiting = [path.with_suffix(".py"), path / "__main__.py"] if is_module else [path]
    search = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    roots = [path.parent, Path(), Path("src"), *map(Path, search)]
    modules: dict[Path, Script] = {}
    known = set(sys.stdlib_module_names)  # packages that need not be read, or were listed
    while waiting and len(modules) < _MOST_FILES:
        file = waiting.pop()
        if file in modules or not file.is_file():  # reading would use up a pipe
            continue
        try:
            modules[file] = Script(file.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for package in modules[file].packages - known:
            files = list(islice(_files_of(package, file.parent, roots), _MOST_FILES))
            if files and package != ".":  # "." means another directory in each module
                known.add(package)
            waiting += files
    return ScriptOptions([*modules.values()], known)


def _files_of(package: str, directory: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files of a project's package; "." is the directory of the importing module."""
    if package == ".":
        yield from directory.glob("*.py")
        return
    for root in roots:
        yield from root.glob(f"{package}.py")
        yield from root.joinpath(package).rglob("*.py")
