"""The commands that start a training on several hosts by hand, one for each host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from clusterrun.config.environments import SetupStep, Tool, read_step
from clusterrun.config.hosts import parse_host
from clusterrun.launch.accelerate_argv import NodeLaunch, entry_words, launch_options
from clusterrun.launch.plan import Plan, Precision
from clusterrun.rendering.bundle import Bundle

_CONFIGS = ("accelerate.yaml", "ds_config.json")
_SPECIAL = re.compile(r"[$`\"\\!']")
_PLACE = "<configs>"  # the directory that a command makes on its host


def by_hand(plan: Plan, bundle: Bundle) -> Iterator[str]:
    """Yield a command for each host, without spares; start all of them at the same time.

    Each is complete: it needs the project, the interpreter and a POSIX shell on its host.
    """
    yield "# Run each line in a terminal of its own. Nothing watches or restarts these processes."
    yield f"# Each host needs the project in {plan.workdir!r}. Nothing is copied."
    if plan.precision is Precision.HEAD:
        yield "# On GPUs without bf16, write --mixed_precision fp16."
    if plan.pass_env:
        yield f"# On each host, set {', '.join(plan.pass_env)} first, e.g. in ~/.bashrc."
    for rank, host in enumerate(plan.hosts[: plan.nodes]):
        line = shlex.quote(" && ".join(_steps(plan, bundle, rank)))
        yield f"ssh {shlex.join(parse_host(host).options)} {line}"


def _steps(plan: Plan, bundle: Bundle, rank: int) -> Iterator[str]:
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
            if not plan.accelerate_text:  # a comment of ours would not be seen
                lines = [x for x in lines if x.strip() and not x.strip().startswith("#")]
            yield f'printf "%s\\n" {" ".join(map(_word, lines))} > "$configs"/{name}'
    launcher = (plan.python, "-m", "accelerate.commands.launch")
    yield " ".join(map(_word, (*launcher, *_options(plan, rank), *entry_words(plan))))


def _options(plan: Plan, rank: int) -> tuple[str, ...]:
    where = NodeLaunch(
        config_file=f"{_PLACE}/{_CONFIGS[0]}",
        deepspeed_file=f"{_PLACE}/{_CONFIGS[1]}" if plan.deepspeed else "",
        machine_rank=rank,
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
    # `eval`, so that a comment ends with its line.
    return f"module load {names}" if step.tool is Tool.MODULES else f"eval {_word(step.text)}"


def _word(text: str) -> str:
    """Quote a word, but let the host expand its home and the directory of the files."""
    if text.startswith(_PLACE):
        return f'"$configs"{shlex.quote(text.removeprefix(_PLACE))}'
    if text.startswith("~/"):
        return f"~/{shlex.quote(text[2:])}"
    quoted = shlex.quote(text)  # double quotes are easier to read inside of ssh's single ones
    return f'"{text}"' if quoted != text and not _SPECIAL.search(text) else quoted
