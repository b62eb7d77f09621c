"""Choose the directives of the batch script, and the options of its srun."""

from __future__ import annotations

import re
from typing import Final

from clusterrun.config.choices import GpuRequest, OnInterrupt
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.passed_on import sets_cpus
from clusterrun.launch.plan import Directive
from clusterrun.launch.world_shape import World

# Options of sbatch that have a field of the same name in JobSpec.
_AS_NAMED: Final = (
    *("partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation"),
    *("dependency", "begin", "deadline", "switches", "clusters", "comment"),
    *("mail-type", "mail-user"),
)


def directives(spec: JobSpec, *, name: str, world: World, cpus: int) -> tuple[Directive, ...]:
    """Return the `#SBATCH` lines; `cpus` is for each node's task, 0 if Slurm decides.

    Raises UsageError for requests that contradict each other.
    """
    asked: dict[str, str | int | None] = {
        "job-name": name,
        "nodes": world.nodes + spec.spare_nodes,
        "ntasks-per-node": 1,
        **_gpus(spec),
        "cpus-per-task": cpus,
        "mem": spec.mem,
        "mem-per-gpu": spec.mem_per_gpu if spec.gpus_per_node else None,
        "mem-per-cpu": spec.mem_per_cpu,
        "time": spec.time_minutes,
        "time-min": spec.time_min_minutes,
        **{name: getattr(spec, name.replace("-", "_")) for name in _AS_NAMED},
        "signal": signal_request(spec),
        "exclusive": spec.exclusive,
        "hold": spec.hold,
        # Without it Slurm ends and requeues the whole job when it loses the first node; with it,
        # it does not, even if the batch script ran on that node.
        "no-kill": spec.spare_nodes > 0,
        # Explicit either way: sites differ in JobRequeue.
        "requeue": spec.requeue,
        "no-requeue": not spec.requeue,
        # A requeued job appends to the output of its first start.
        "open-mode": "append",
        # sbatch reads #PBS and #BSUB lines anywhere in a script, also in the files it carries.
        "ignore-pbs": True,
    }
    return tuple(
        Directive(name=name, value=None if value is True else str(value))
        for name, value in asked.items()
        if value
    )


def _gpus(spec: JobSpec) -> dict[str, str]:
    """Return the directive for GPUs in the form of the site; {} if none are asked for."""
    gpus = spec.gpus_per_node or 0
    if not gpus or spec.gpu_request is GpuRequest.NONE:
        if spec.gpu_type:
            text = "slurm.gpu_type names a GPU type, but no GPUs are requested"
            hint = "pass --gpus-per-node COUNT, without --set slurm.gpu_request=none"
            raise UsageError(text, hint=hint)
        return {}
    count = f"{spec.gpu_type}:{gpus}" if spec.gpu_type else str(gpus)
    is_gres = spec.gpu_request is GpuRequest.GRES
    return {"gres": f"gpu:{count}"} if is_gres else {"gpus-per-node": count}


def cpus_per_task(spec: JobSpec, world: World) -> int:
    """Return the CPUs of each node's task; with 0, Slurm and the site decide.

    slurm.cpus_per_gpu becomes CPUs per task: srun must repeat --cpus-per-task (`srun_options`),
    beside which Slurm refuses --cpus-per-gpu. Raises UsageError if both are given.
    """
    if spec.cpus_per_task and spec.cpus_per_gpu:
        text = "--cpus-per-task and slurm.cpus_per_gpu cannot be combined"
        raise UsageError(text, hint="keep one of them")
    if spec.cpus_per_task:
        return spec.cpus_per_task
    if spec.cpus_per_gpu and spec.gpus_per_node:
        return spec.cpus_per_gpu * spec.gpus_per_node
    if spec.gpus_per_node or spec.exclusive or any(map(sets_cpus, spec.sbatch_args)):
        return 0  # sites assign CPUs with a GPU or a whole node; a number here would lower that
    return world.procs_per_node


KEEP_OTHERS, END_OTHERS = "--no-kill", "--kill-on-bad-exit=1"  # if a task of a step fails


def srun_options(*, nodes: int, cpus: int, outlives_nodes: bool) -> tuple[str, ...]:
    """Return the options of each attempt's srun: one task per node.

    If the job outlives lost nodes, the agents end the other tasks: srun would kill all of them.
    """
    return (
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        # Slurm 22.05 to 23.02 do not pass it on from sbatch.
        *((f"--cpus-per-task={cpus}",) if cpus else ()),
        # Otherwise a site's SBATCH_EXPORT=NONE would reach the step.
        "--export=ALL",
        KEEP_OTHERS if outlives_nodes else END_OTHERS,
        # The agents exit together; a limit would kill a node that is still saving.
        "--wait=0",
        "--unbuffered",
        "--input=none",
    )


LEAST_WARNING_S, MOST_WARNING_S = 30, 300
UNKNOWN_LIMIT_WARNING_S = 120
_DEFAULT_SIGNAL_S = 60  # sbatch's default, if slurm.signal names no time
_SIGNAL = r"(?i)(?:[BR]+:)?(?:(?:SIG)?USR[12]|10|12)(?:@(\d+))?\Z"


def on_interrupt(spec: JobSpec) -> OnInterrupt:
    """Choose how the run continues. Raises UsageError if Slurm must not requeue."""
    if spec.on_interrupt is OnInterrupt.REQUEUE and not spec.requeue:
        text = "--on-interrupt requeue and --set slurm.requeue=false contradict each other"
        raise UsageError(text, hint="use --on-interrupt successor: another job continues the run")
    if spec.on_interrupt is not None:
        return spec.on_interrupt
    return OnInterrupt.REQUEUE if spec.requeue else OnInterrupt.STOP


def warning_s(spec: JobSpec) -> int:
    """Return how many seconds before the time limit the ranks are asked to save.

    A tenth of the limit, within bounds, or as slurm.signal says; Slurm may signal a minute earlier.
    """
    if spec.signal:
        match = re.match(_SIGNAL, spec.signal)  # None: `signal_request` refuses it
        return int(match[1] or _DEFAULT_SIGNAL_S) if match else _DEFAULT_SIGNAL_S
    if not spec.time_minutes:
        return UNKNOWN_LIMIT_WARNING_S
    return min(MOST_WARNING_S, max(LEAST_WARNING_S, spec.time_minutes * 60 // 10))


def signal_request(spec: JobSpec) -> str:
    """Return sbatch's --signal: it warns the batch script alone, which passes it to the head node.

    Without B:, Slurm would also signal ranks that do not expect it. Raises UsageError for a signal
    that would end the job without a save, as TERM does.
    """
    if spec.signal and not re.match(_SIGNAL, spec.signal):
        text = f"slurm.signal {spec.signal} is neither USR1 nor USR2, which ask the ranks to save"
        raise UsageError(text, hint="write it as B:USR2@300, for 300 s before the time limit")
    flags, _, signal = (spec.signal or f"B:USR2@{warning_s(spec)}").rpartition(":")
    return f"{flags}:{signal}" if "B" in flags.upper() else f"B{flags}:{signal}"


def survives_lost_nodes(spec: JobSpec) -> bool:
    """Return whether the job outlives a lost node, to relaunch or to arrange a successor."""
    if (spec.nodes or 1) + spec.spare_nodes == 1:
        return False
    return spec.max_restarts != 0 or on_interrupt(spec) is not OnInterrupt.STOP
