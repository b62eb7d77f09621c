"""Render the exact text of every file of a run; every value passes through a quoting filter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clusterrun import __version__
from clusterrun.config.environments import read_step
from clusterrun.errors import ConfigError, NodeExit, UsageError
from clusterrun.launch.accelerate_argv import shown_command
from clusterrun.launch.plan import Plan
from clusterrun.rendering.quoting import FILTERS, Quoted, sh_word
from clusterrun.rundir.paths import directory_name
from clusterrun.shared.assets import template_directories
from clusterrun.shared.own_modules import RUN_MODULE

if TYPE_CHECKING:
    from jinja2 import Environment

# Slurm's own limit on a batch script (SchedulerParameters=max_script_size, 4 MiB by default).
MAX_SCRIPT_BYTES = 4 * 1024 * 1024


class Bundle(NamedTuple):
    """The files of a run by name, `job.sbatch` among them, in the order of rendering."""

    files: Mapping[str, str]

    @property
    def script(self) -> str:
        """The self-contained batch script that `render` prints and `submit` sends."""
        return self.files["job.sbatch"]


class Carried(NamedTuple):
    """One file that the batch script carries in a here-document."""

    name: str
    delimiter: Quoted
    text: Quoted


def render_bundle(plan: Plan, *, resolved_yaml: str, template_dirs: Sequence[Path] = ()) -> Bundle:
    """Render every file of a run; the same plan gives the same bytes.

    `template_dirs` contain templates of the site or the project, which override ours by name.
    Raises ConfigError for an unusable template, UsageError if the batch script is larger than
    Slurm accepts.
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
    carried = {
        "env.sh": render("env.sh.j2", values),
        "node.sh": render("node.sh.j2", values),
        "accelerate.yaml": plan.accelerate_text
        or render(plan.accelerate_config, {**plan.accelerate, "version": __version__}),
        **({"ds_config.json": plan.deepspeed} if plan.deepspeed else {}),
        "plan.json": plan.to_json(),
        "resolved.yaml": resolved_yaml,
    }
    carried = {
        name: text if text.endswith("\n") or not text else f"{text}\n"
        for name, text in carried.items()
    }
    files = [
        Carried(name=name, delimiter=Quoted(_delimiter(text)), text=Quoted(text))
        for name, text in carried.items()
    ]
    values |= {"carried": files, "directory": directory_name(plan.name)}
    script = render("job.sbatch.j2", values)
    size = len(script.encode(errors="surrogateescape"))
    if size > MAX_SCRIPT_BYTES:
        raise UsageError(
            f"the batch script would be {size} bytes; Slurm accepts {MAX_SCRIPT_BYTES} by default",
            hint="pass long lists of arguments in a file",
        )
    return Bundle(files={"job.sbatch": script, **carried})


def _delimiter(text: str) -> str:
    lines = set(text.split("\n"))
    delimiter = "END_OF_FILE"
    while delimiter in lines:
        delimiter += "_"
    return delimiter


@lru_cache(maxsize=8)  # with what it has compiled; a file that changed is read anew
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
    """Render one template.

    Raises ConfigError with its name if it is missing, broken, or prints a value that
    passed through no quoting filter.
    """
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
        text = str(value)  # of an undefined one raises an error that names it
        raise TypeError(f"{text!r} passed through none of the filters {', '.join(FILTERS)}")
    return value
