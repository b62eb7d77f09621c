"""Render the exact text of every file of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from clusterrun import __version__
from clusterrun.config.environments import read_step
from clusterrun.errors import NodeExit, UsageError
from clusterrun.launch.accelerate_argv import shown_command
from clusterrun.launch.plan import Plan
from clusterrun.rendering.quoting import Quoted, sh_word
from clusterrun.rendering.templates import Renderer
from clusterrun.rundir.paths import directory_name
from clusterrun.shared.own_modules import RUN_MODULE

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


def render_bundle(
    plan: Plan,
    *,
    resolved_yaml: str,
    template_dirs: Sequence[Path] = (),
    compiled: Path | None = None,
) -> Bundle:
    """Render every file of a run; the same plan gives the same bytes.

    `template_dirs` contain templates of the site or the project, which override ours by name;
    `compiled` is a directory for compiled templates.
    Raises ConfigError for an unusable template, UsageError if the batch script is larger than
    Slurm accepts.
    """
    renderer = Renderer(template_dirs, compiled)
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
        "env.sh": renderer.render("env.sh.j2", values),
        "node.sh": renderer.render("node.sh.j2", values),
        "accelerate.yaml": _accelerate(renderer, plan),
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
    script = renderer.render("job.sbatch.j2", values)
    size = len(script.encode(errors="surrogateescape"))
    if size > MAX_SCRIPT_BYTES:
        raise UsageError(
            f"the batch script would be {size} bytes; Slurm accepts {MAX_SCRIPT_BYTES} by default",
            hint="pass long lists of arguments in a file",
        )
    return Bundle(files={"job.sbatch": script, **carried})


def _accelerate(renderer: Renderer, plan: Plan) -> str:
    if plan.accelerate_text:
        return plan.accelerate_text
    return renderer.render(plan.accelerate_config, {**plan.accelerate, "version": __version__})


def _delimiter(text: str) -> str:
    lines = set(text.split("\n"))
    delimiter = "END_OF_FILE"
    while delimiter in lines:
        delimiter += "_"
    return delimiter
