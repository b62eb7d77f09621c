"""Render the exact text of every file of a run; every value passes through a quoting filter."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterrun import __version__
from clusterrun.config.environments import SetupStep, Tool, read_step
from clusterrun.config.hosts import parse_host
from clusterrun.config.settings import yaml_text
from clusterrun.errors import ConfigError, NodeExit
from clusterrun.launch.accelerate_argv import (
    RUN_DIR,
    entry_words,
    launch_options,
    shown_command,
    with_placeholders,
)
from clusterrun.launch.plan import Directive, Plan, Precision
from clusterrun.rundir.paths import directory_name
from clusterrun.shared.assets import template_directories
from clusterrun.shared.own_modules import RUN_MODULE

if TYPE_CHECKING:
    from jinja2 import Environment

# Any text as data: a word of bash, a directive of sbatch, a scalar of YAML


class Quoted(str):
    """A text that is safe in a rendered file."""


# Control characters would break the line (and sbatch refuses a script with carriage returns);
# lone surrogates are bytes that were not UTF-8.
_NEEDS_ESCAPES = r"[\x00-\x1f\x7f\ud800-\udfff]"
_ESCAPES = {"\n": "\\n", "\t": "\\t", "'": "\\'", "\\": "\\\\"}


def sh_word(value: object) -> Quoted:
    """Return a text as one word of bash, on one line.

    Raises ValueError for a NUL byte, which no variable or argument can contain.

    >>> print(sh_word("a b"), sh_word("plain"), sh_word(3), sh_word("it's\\ntwo"))
    'a b' plain 3 $'it\\'s\\ntwo'
    """
    text = _text(value)
    if "\x00" in text:
        raise ValueError("a NUL byte cannot be passed to a program")
    if not re.search(_NEEDS_ESCAPES, text) and "'" not in text:
        return Quoted(shlex.quote(text))
    return Quoted("$'" + "".join(map(_escape, text)) + "'")


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if not re.match(_NEEDS_ESCAPES, char):
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode(errors="surrogateescape"))


def directive_line(line: Directive) -> Quoted:
    r"""Return a directive as the rest of an `#SBATCH` line.

    Unlike a shell, sbatch reads a backslash as an escape even inside single quotes, and an
    unquoted # anywhere as a comment (sbatch 22.05, `_get_argument`).
    Raises ValueError for control characters: a directive ends with its line.

    >>> print(directive_line(Directive(name="comment", value="a\\b #1")))
    --comment='a\\b #1'
    """
    value = "" if line.value is None else "=" + sbatch_word(line.value)
    return Quoted(f"--{line.name}{value}")


def sbatch_word(value: object) -> Quoted:
    """Return one whole option, or the value of one, for an `#SBATCH` line."""
    return Quoted(shlex.quote(_line(value, "directive")).replace("\\", "\\\\"))


def yaml_scalar(value: object) -> Quoted:
    """Return a number, a boolean or a text as a scalar of YAML.

    >>> print(yaml_scalar(True), yaml_scalar("MULTI_GPU"), yaml_scalar("no"))
    true MULTI_GPU "no"
    """
    return Quoted(str(value).lower() if isinstance(value, bool | int) else yaml_text(_text(value)))


def comment_text(value: object) -> Quoted:
    """Return a text for a comment. Raises ValueError for control characters."""
    return Quoted(_line(value, "comment"))


def _line(value: object, what: str) -> str:
    text = _text(value)
    if re.search(_NEEDS_ESCAPES, text):
        raise ValueError(f"a {what} cannot contain control characters or invalid UTF-8: {text!r}")
    return text


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        text = str(value)  # raises for jinja's Undefined, and names it
        raise ValueError(f"{text!r} is neither text nor a number")
    return str(value)


FILTERS = {
    "sh": sh_word,
    "directive": directive_line,
    "sbatch": sbatch_word,
    "yaml": yaml_scalar,
    "comment": comment_text,
}


# The files


class Bundle(NamedTuple):
    """The files of a run by name, `job.sbatch` among them, in the order of rendering."""

    files: Mapping[str, str]

    @property
    def script(self) -> str:
        """The self-contained batch script that `render` prints and `submit` sends."""
        return self.files["job.sbatch"]


def render_bundle(plan: Plan, *, resolved_yaml: str, template_dirs: Sequence[Path] = ()) -> Bundle:
    """Render every file of a run; the same plan gives the same bytes.

    `template_dirs` contain templates of the site or the project, which override ours by name.
    Raises ConfigError for an unusable template.
    """
    render = partial(_render, _environment((*template_dirs, *template_directories())))
    values: dict[str, object] = {
        "plan": plan,
        "launch": Quoted(" ".join(map(sh_word, shown_command(plan, 0)))),
        "setup": [read_step(line) for line in plan.setup],
        "version": __version__,
        "run_module": RUN_MODULE,
        "unfit": int(NodeExit.NODE_UNFIT),
        "cancelled": int(NodeExit.CANCELLED),
    }
    carried = {  # by job.sbatch, which makes a run directory of them if submitted by hand
        "env.sh": render("env.sh.j2", values),
        "node.sh": render("node.sh.j2", values),
        "accelerate.yaml": plan.accelerate_text
        or render(plan.accelerate_config, {**plan.accelerate, "version": __version__}),
        **({"ds_config.json": plan.deepspeed} if plan.deepspeed else {}),
        "plan.json": plan.to_json(),
        "resolved.yaml": resolved_yaml,
    }
    # A here-document of bash ends with a newline, unless it is empty.
    carried = {
        name: f"{text}\n" if text and not text.endswith("\n") else text
        for name, text in carried.items()
    }
    files = [
        {"name": name, "delimiter": Quoted(_delimiter(text)), "text": Quoted(text)}
        for name, text in carried.items()
    ]
    values |= {"carried": files, "directory": directory_name(plan.name)}
    return Bundle(files={"job.sbatch": render("job.sbatch.j2", values), **carried})


def _delimiter(text: str) -> str:
    """Return an end for bash's here-document that is no line of the text."""
    lines = set(text.split("\n"))
    delimiter = "END_OF_FILE"
    while delimiter in lines:
        delimiter += "_"
    return delimiter


@lru_cache(maxsize=8)  # keeps compiled templates; jinja2 reads a file again if it has changed
def _environment(directories: tuple[Path, ...]) -> Environment:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A project's templates are not trusted: they must not reach Python objects.
    environment = ImmutableSandboxedEnvironment(
        loader=jinja2.FileSystemLoader([str(directory) for directory in directories]),
        undefined=jinja2.StrictUndefined,
        finalize=_only_quoted,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= FILTERS
    return environment


def _render(environment: Environment, name: str, values: Mapping[str, Any]) -> str:
    """Render one template. Raises ConfigError with its name if it can't be rendered."""
    import jinja2

    try:
        return environment.get_template(name).render(values)
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        cause, line = f"{type(error).__name__}: {error}", getattr(error, "lineno", 0)
        where = f"{getattr(error, 'filename', None) or name}:{line}" if line else None
        text = f"template {name} cannot be rendered"
        raise ConfigError(text, cause=cause, where=where) from error


def _only_quoted(value: object) -> Quoted:
    if not isinstance(value, Quoted):
        text = str(value)  # raises for jinja's Undefined, and names it
        raise TypeError(f"{text!r} passed through none of the filters {', '.join(FILTERS)}")
    return value


# The commands that start a training on several hosts by hand, one for each host

_CONFIGS = ("accelerate.yaml", "ds_config.json")
_SPECIAL = re.compile(r"[$`\"\\!']")


def by_hand(plan: Plan, bundle: Bundle) -> Iterator[str]:
    """Yield comments, and a command for each host but the spares, to be started at the same time.

    Each command needs only the project, the interpreter and a POSIX shell on its host.
    """
    yield "# Run each line in its own terminal. Nothing watches or restarts these processes."
    yield f"# Each host needs the project in {plan.workdir!r}. Nothing is copied."
    if plan.precision is Precision.HEAD:
        yield "# On GPUs without bf16, write --mixed_precision fp16."
    if plan.pass_env:
        yield f"# On each host, set {', '.join(plan.pass_env)} first, e.g. in ~/.bashrc."
    for rank, host in enumerate(plan.hosts[: plan.nodes]):
        line = shlex.quote(" && ".join(_commands(plan, bundle, rank)))
        yield f"ssh {shlex.join(parse_host(host).options)} {line}"


def _commands(plan: Plan, bundle: Bundle, rank: int) -> Iterator[str]:
    """Yield the commands for one host: environment, variables, configuration, launcher."""
    yield f"cd {_word(plan.workdir)}"
    yield from (_activation(read_step(line)) for line in plan.setup)
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if plan.network_interface else ()
    exported = dict.fromkeys(names, plan.network_interface)
    exported |= {variable.name: variable.value for variable in plan.env}
    if exported:
        words = (f"{name}={_word(value)}" for name, value in exported.items())
        yield f"export {' '.join(words)}"
    yield 'configs=$(mktemp -d) && trap "rm -r $configs" EXIT'
    for name in _CONFIGS:
        if text := bundle.files.get(name):
            lines = text.splitlines()
            if not plan.accelerate_text:  # from our template: leave out its comments
                lines = [line for line in lines if line.strip() and line.strip()[0] != "#"]
            yield f'printf "%s\\n" {" ".join(map(_word, lines))} > "$configs"/{name}'
    launcher = (plan.python, "-m", "accelerate.commands.launch")
    yield " ".join(map(_word, (*launcher, *_options(plan, rank), *entry_words(plan))))


def _options(plan: Plan, rank: int) -> tuple[str, ...]:
    """Return the options of a host, with the first host and a port instead of placeholders."""
    where = with_placeholders(plan, rank)._replace(
        address=parse_host(plan.hosts[0]).host,
        port=plan.main_process_port or plan.port_range[0],
        precision="bf16" if plan.precision is Precision.HEAD else plan.precision.value,
    )
    return launch_options(plan, where)


def _activation(step: SetupStep) -> str:
    names = shlex.join(step.names)
    if step.tool is Tool.VENV:
        return f". {names}/bin/activate"
    if step.tool is Tool.CONDA:
        return f'eval "$(conda shell.posix hook)" && conda activate {names}'
    # `eval` ends a comment in the text, which would hide the commands after it.
    return f"module load {names}" if step.tool is Tool.MODULES else f"eval {_word(step.text)}"


def _word(text: str) -> str:
    """Quote a word, but let the host expand its home and the directory of the files."""
    if text.startswith(RUN_DIR):  # a placeholder, before the name of a configuration file
        return f'"$configs"{shlex.quote(text.removeprefix(RUN_DIR))}'
    if text.startswith("~/"):
        return f"~/{shlex.quote(text[2:])}"
    quoted = shlex.quote(text)  # double quotes are easier to read inside of ssh's single ones
    return f'"{text}"' if quoted != text and not _SPECIAL.search(text) else quoted
