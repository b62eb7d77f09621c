"""What Slurm is asked for: directives of the batch script, and the options of its srun."""

from __future__ import annotations

import re

from clusterrun.errors import UsageError
from clusterrun.planning.plan import Directive
from clusterrun.planning.recovery import signal_request
from clusterrun.planning.world import World, asks_for_gpus
from clusterrun.spec import GpuRequest, JobSpec

# Options of sbatch that would take the launch out of our hands, and what to use in their place.
_OWNED: dict[str, str] = {
    "array": "one job is one run: submit once for each",
    "chdir": "the ranks run in the directory that you submit from",
    "cpus-per-gpu": "use clusterrun's own --cpus-per-gpu",
    "error": "clusterrun keeps the output in the run directory",
    "export": "use --env NAME=VALUE or --pass-env NAME",
    "export-file": "use --env NAME=VALUE or --pass-env NAME",
    "help": "see 'sbatch --help'",
    "input": "the ranks read no standard input",
    "no-requeue": "use clusterrun's own --no-requeue",
    "nodes": "use -N",
    "ntasks": "use -N and --nproc-per-node: Slurm starts one task a node",
    "ntasks-per-core": "Slurm starts one task a node",
    "ntasks-per-gpu": "Slurm starts one task a node",
    "ntasks-per-node": "use --nproc-per-node: Slurm starts one task a node",
    "ntasks-per-socket": "Slurm starts one task a node",
    "output": "clusterrun keeps the output in the run directory",
    "parsable": "use 'clusterrun submit --parsable'",
    "requeue": "clusterrun asks for it unless --no-requeue is given",
    "tasks-per-node": "use --nproc-per-node: Slurm starts one task a node",
    "test-only": "use 'clusterrun submit --test-only'",
    "usage": "see 'sbatch --help'",
    "version": "see 'sbatch --version'",
    "wait": "use 'clusterrun submit --wait'",
    "wrap": "name a script",
}
_SHORT = {
    "A": "account",
    "C": "constraint",
    "D": "chdir",
    "H": "hold",
    "J": "job-name",
    "M": "clusters",
    "N": "nodes",
    "V": "version",
    "W": "wait",
    "a": "array",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "h": "help",
    "i": "input",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
# Short options without a value: getopt reads what follows one in a word as further options.
_SHORT_FLAGS = frozenset("HOQVWhksv")
# Whole names of options that are also the beginning of others.
_WHOLE = frozenset(("gpus", "mem", "time"))
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")


def directives(spec: JobSpec, *, name: str, world: World, cpus: int) -> tuple[Directive, ...]:
    """Name the `#SBATCH` lines; `cpus` is for each node's task, 0 where Slurm decides.

    Raises UsageError for requests that contradict each other.
    """
    lines = [
        Directive(name="job-name", value=name),
        Directive(name="nodes", value=str(world.nodes + spec.spare_nodes)),
        Directive(name="ntasks-per-node", value="1"),
        *_gpus(spec),
        *([Directive(name="cpus-per-task", value=str(cpus))] if cpus else []),
        *_memory(spec),
        *_times(spec),
        *_plain(spec),
        # A requeued job writes on below what its first start has written.
        Directive(name="open-mode", value="append"),
        # sbatch reads #PBS and #BSUB lines anywhere in a script, so also in the files it carries.
        Directive(name="ignore-pbs"),
    ]
    for line in lines:
        _refuse_undecodable(line)
    return tuple(lines)


def _refuse_undecodable(line: Directive) -> None:
    try:
        (line.value or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--{line.name} {line.value!r} is not text in UTF-8") from error


def _gpus(spec: JobSpec) -> list[Directive]:
    gpus = spec.gpus_per_node or 0
    if not gpus or spec.gpu_request is GpuRequest.NONE:
        if spec.gpu_type:
            raise UsageError(
                "--gpu-type says which GPUs, but none are asked for",
                hint="pass --gpus-per-node, and not --gpu-request none",
            )
        return []
    if any(map(asks_for_gpus, spec.sbatch_args)):
        raise UsageError(
            "GPUs are asked for twice: by --gpus-per-node and by --sbatch-arg",
            hint="Slurm takes one of them: with --gpu-request none yours is the one",
        )
    count = f"{spec.gpu_type}:{gpus}" if spec.gpu_type else str(gpus)
    if spec.gpu_request is GpuRequest.GRES:
        return [Directive(name="gres", value=f"gpu:{count}")]
    return [Directive(name="gpus-per-node", value=count)]


def cpus_per_task(spec: JobSpec, world: World) -> int:
    """Count the CPUs of each node's one task; 0 leaves it to Slurm and the site.

    Slurm refuses --cpus-per-gpu beside --cpus-per-task, which srun must repeat: one form is kept.
    Raises UsageError for requests that contradict each other.
    """
    if spec.cpus_per_gpu:
        if spec.cpus_per_task:
            raise UsageError("--cpus-per-task and --cpus-per-gpu exclude each other")
        if not spec.gpus_per_node:
            raise UsageError("--cpus-per-gpu needs GPUs", hint="pass --gpus-per-node")
        return spec.cpus_per_gpu * spec.gpus_per_node
    if spec.cpus_per_task:
        return spec.cpus_per_task
    says_so = any(option_name(arg).startswith("cpus-per-") for arg in spec.sbatch_args)
    if spec.gpus_per_node or spec.exclusive or says_so:
        return 0  # sites give CPUs with a GPU or a whole node; a number here would lower it
    return world.procs_per_node


def _memory(spec: JobSpec) -> list[Directive]:
    asked = {"mem": spec.mem, "mem-per-gpu": spec.mem_per_gpu, "mem-per-cpu": spec.mem_per_cpu}
    lines = [Directive(name=name, value=value) for name, value in asked.items() if value]
    if len(lines) > 1:
        given = " and ".join(f"--{line.name}" for line in lines)
        raise UsageError(f"{given} exclude each other", hint="memory is asked for in one way")
    if spec.mem_per_gpu and not spec.gpus_per_node:
        raise UsageError("--mem-per-gpu needs GPUs", hint="pass --gpus-per-node")
    return lines


def _times(spec: JobSpec) -> list[Directive]:
    if spec.time_min_minutes and spec.time_minutes and spec.time_min_minutes > spec.time_minutes:
        raise UsageError(
            f"--time-min is {spec.time_min_minutes} minutes, more than --time's {spec.time_minutes}"
        )
    asked = {"time": spec.time_minutes, "time-min": spec.time_min_minutes}
    return [Directive(name=name, value=str(value)) for name, value in asked.items() if value]


def _plain(spec: JobSpec) -> list[Directive]:
    asked: dict[str, str | bool | None] = {
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "constraint": spec.constraint,
        "nodelist": spec.nodelist,
        "exclude": spec.exclude,
        "reservation": spec.reservation,
        "dependency": spec.dependency,
        "begin": spec.begin,
        "deadline": spec.deadline,
        "switches": spec.switches,
        "clusters": spec.clusters,
        "comment": spec.comment,
        "mail-type": spec.mail_type,
        "mail-user": spec.mail_user,
        "signal": signal_request(spec),
        "exclusive": spec.exclusive,
        "hold": spec.hold,
        # Without it Slurm ends the whole job with the first node that it loses, and requeues it;
        # with it not even where the batch script was on that node.
        "no-kill": spec.spare_nodes > 0,
        # Explicit either way: sites differ in JobRequeue.
        "requeue": spec.requeue,
        "no-requeue": not spec.requeue,
    }
    return [
        Directive(name=name, value=None if value is True else value)
        for name, value in asked.items()
        if value
    ]


def option_name(arg: str) -> str:
    """Name the long option that an argument of sbatch sets.

    >>> option_name("--nice=100"), option_name("-c8"), option_name("-k")
    ('nice', 'cpus-per-task', 'k')
    """
    if arg.startswith("--"):
        return arg[2:].partition("=")[0]
    return _SHORT.get(arg[1:2], arg[1:2])


def check_sbatch_args(args: tuple[str, ...], lines: tuple[Directive, ...]) -> None:
    """Refuse options of sbatch that clusterrun sets or that break the launch.

    Raises UsageError.
    """
    ours = frozenset(line.name for line in lines)
    for arg in args:
        if not re.match(r"--?[A-Za-z]", arg):
            raise UsageError(
                f"--sbatch-arg {arg!r} is not an option of sbatch",
                hint="write it as one word: --sbatch-arg=--nice=100",
            )
        _refuse_bundled(arg)
        _refuse_owned(arg)
        _refuse_said_twice(arg, ours)
        _refuse_undecodable(Directive(name="sbatch-arg", value=arg))


def _refuse_bundled(arg: str) -> None:
    if arg[1] in _SHORT_FLAGS and len(arg) > 2:
        raise UsageError(
            f"--sbatch-arg {arg} is several options in one word",
            hint=f"write each by itself: --sbatch-arg=-{arg[1]} --sbatch-arg=-{arg[2:]}",
        )


def _refuse_owned(arg: str) -> None:
    for full, hint in _OWNED.items():
        if _may_be(arg, full):
            raise UsageError(f"--sbatch-arg {arg} is not for a job of clusterrun", hint=hint)


def _refuse_said_twice(arg: str, ours: frozenset[str]) -> None:
    clash = next((name for name in sorted(ours) if _may_be(arg, name)), "")
    if not clash and any(_may_be(arg, name) for name in _MEMORY):
        clash = next((name for name in _MEMORY if name in ours), "")
    if clash:
        raise UsageError(
            f"--sbatch-arg {arg} and clusterrun's --{clash} are one request said twice",
            hint=f"clusterrun writes --{clash}; say it in one place",
        )


def _may_be(arg: str, full: str) -> bool:
    """Say whether sbatch may read an argument as this long option.

    It takes any unambiguous beginning: --arr is --array. Which are, differs between versions.
    """
    name = option_name(arg)
    if name in _WHOLE or not arg.startswith("--"):
        return name == full
    return full.startswith(name)


def srun_options(*, nodes: int, cpus: int, outlives_nodes: bool) -> tuple[str, ...]:
    """Name the options of the one srun: a task a node, which all end together.

    Where the job is to outlive a node, the agents end the others: srun would kill all at once.
    """
    return (
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        # Slurm 22.05 to 23.02 do not hand it on from sbatch.
        *((f"--cpus-per-task={cpus}",) if cpus else ()),
        # SBATCH_EXPORT=NONE of a site would reach the step else.
        "--export=ALL",
        "--no-kill" if outlives_nodes else "--kill-on-bad-exit=1",
        # The agents leave together; a limit killed the node that was still saving.
        "--wait=0",
        "--unbuffered",
        "--input=none",
    )
