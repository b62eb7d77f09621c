"""Decide every number of a Plan from the spec and the facts, without looking anything up."""

from __future__ import annotations

import posixpath
import re
from dataclasses import replace
from functools import partial
from typing import Any

from clusterrun.config.choices import Device, Launcher, MixedPrecision, Stage, Strategy
from clusterrun.config.environments import python_of, with_absolute_path
from clusterrun.config.fields import RESERVED_NAMES, port_range
from clusterrun.config.hosts import check_distinct
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.environment import decide_environment
from clusterrun.launch.facts import Facts, Interpreter
from clusterrun.launch.inputs import check_batch_numbers, check_environments, input_notes
from clusterrun.launch.passed_on import SBATCH, SRUN, as_one_word, check_options
from clusterrun.launch.plan import Parallel, Plan, Precision
from clusterrun.launch.sbatch_header import (
    cpus_per_task,
    directives,
    on_interrupt,
    srun_options,
    survives_lost_nodes,
    warning_s,
)
from clusterrun.launch.user_files import (
    ANY_PRECISION,
    OwnFiles,
    notes_on_file,
    read_own_files,
    take_world,
)
from clusterrun.launch.world_shape import (
    World,
    check_divided_samples,
    check_gpu_options,
    decide_sizes,
    decide_world,
    template_sizes,
)
from clusterrun.shared.wording import count

LARGE_JOB_NODES = 64  # above it the ranks' logs are capped: all nodes share one file system
LARGE_JOB_LINES_PER_S = 2000  # all nodes together must not overload the disk of the logs
# Settings that a plan has under the same name.
_COPIED = (
    *("sbatch_args", "network", "rendezvous_timeout_s", "world_contract", "spare_nodes"),
    *("max_restarts", "hang_timeout_s", "preflight", "trainer_resume", "log_spool_bytes"),
)
_COPIED_OR_ZERO = ("timeout_s", "main_process_port", "time_minutes")
_OF_WORLD = ("nodes", "procs_per_node", "gpus_per_node", "device", "gpu_ids")


def make_plan(spec: JobSpec, facts: Facts) -> Plan:
    """Decide all that a job needs. Raises UsageError, or ConfigError for a file of the user."""
    sbatch, srun = as_one_word(SBATCH, spec.sbatch_args), as_one_word(SRUN, spec.srun_args)
    asked = replace(spec, sbatch_args=sbatch, srun_args=srun)
    own = read_own_files(asked, facts)
    spec = take_world(asked, own, facts)  # with the counts of the user's YAML
    if facts.cluster.scheduler.has_queue:
        check_gpu_options(spec)
    host_notes = _check_hosts(spec, facts)
    world = decide_world(spec, facts, yaml_wants_cpu=own.use_cpu)
    strategy = own.strategy or spec.strategy
    check_strategy(strategy, world, facts.interpreter)
    sizes = decide_sizes(spec, own, strategy, world)
    check_batch_numbers(spec.args, own.deepspeed_text, own.deepspeed_name, sizes.data(world.size))
    check_divided_samples(spec, sizes, facts)
    precision, cpus = _precision(spec, own, world), cpus_per_task(spec, world)
    lines = directives(spec, name=job_name(spec), world=world, cpus=cpus)
    check_options(SBATCH, sbatch, lines)
    check_options(SRUN, srun)
    check_environments(spec.setup, facts)
    srun_own = srun_options(nodes=world.nodes, cpus=cpus, outlives_nodes=survives_lost_nodes(spec))
    lines_per_s = LARGE_JOB_LINES_PER_S if world.nodes > LARGE_JOB_NODES else 0
    threads = _threads(spec, facts, world, cpus)
    in_workdir = partial(posixpath.join, facts.workdir)
    settings: dict[str, Any] = {name: getattr(spec, name) for name in _COPIED}
    settings |= {name: getattr(spec, name) or 0 for name in _COPIED_OR_ZERO}
    settings |= _host_settings(spec, facts, world.nodes)
    # On one node a copy of the environment gains nothing, so `auto` makes none there.
    if facts.cluster.scheduler.reads_sbatch and (spec.stage is not Stage.AUTO or world.nodes > 1):
        settings |= {"stage": spec.stage, "stage_dir": spec.stage_dir or ""}
    return Plan(
        name=job_name(spec),
        cluster=facts.cluster,
        **{name: getattr(world, name) for name in _OF_WORLD},
        strategy=strategy,
        parallel=sizes,
        precision=precision,
        entry=_entry(spec),
        workdir=facts.workdir,
        runs_dir=facts.runs_dir,
        python=facts.python,
        setup=tuple(with_absolute_path(line, in_workdir) for line in spec.setup),
        directives=lines,
        srun_args=(*srun_own, *srun),
        env=decide_environment(spec, facts, world, strategy, threads),
        pass_env=tuple(dict.fromkeys(spec.pass_env)),
        network_interface=spec.network_interface or "",
        **_template_settings(world, strategy, sizes, precision, own),
        deepspeed=own.deepspeed_text,
        threads_per_process=threads,
        port_range=port_range(spec.port_range),
        on_interrupt=on_interrupt(spec),
        warning_s=warning_s(spec),
        launcher=Launcher.FORGE if spec.launcher is Launcher.AUTO else spec.launcher,
        **settings,
        log_lines_per_s=spec.log_lines_per_s or lines_per_s,
        accelerate_text=own.accelerate_text,
        notes=(*host_notes, *_notes(asked, own, facts, world, cpus)),
    )


def _entry(spec: JobSpec) -> tuple[str, ...]:
    if spec.module:
        return ("-m", spec.module, *spec.args)
    if spec.script:
        # A script named -m would read as an option of Python.
        return (f"./{spec.script}" if spec.script.startswith("-") else spec.script, *spec.args)
    hint = "name the script in the command, such as train.py (or script: in clusterrun.yaml)"
    raise UsageError("no training script given", hint=hint)


def job_name(spec: JobSpec) -> str:
    """Return the job's name: the given one, or one made from its script or module."""
    if spec.name is not None:
        return spec.name
    source = spec.module or posixpath.basename(spec.script or "").removesuffix(".py")
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "_", source)[:100]
    return f"job-{plain}" if plain in RESERVED_NAMES else plain


def check_strategy(strategy: Strategy, world: World, python: Interpreter) -> None:
    """Refuse a strategy that this world can't train with. Raises UsageError."""
    if strategy is Strategy.NONE and world.size > 1:
        text = f"strategy none runs one process, but the job has {world.size} ranks"
        same = "it trains one model on all ranks"
        hint = f"use --strategy ddp (in an accelerate YAML, distributed_type: MULTI_GPU): {same}"
        raise UsageError(text, hint=hint)
    if strategy.is_deepspeed and world.device is Device.MPS:
        text = f"DeepSpeed ({strategy.value}) does not run on Apple GPUs"
        raise UsageError(text, hint="use --strategy none, or --device cpu")
    if strategy.is_fsdp and world.device is not Device.CUDA:
        instead = "accelerate would train plain DDP or an unsharded model, without a warning"
        text = f"{strategy.value} needs GPUs: on {world.device.value}, {instead}"
        in_yaml = "in an accelerate YAML, distributed_type: DEEPSPEED or MULTI_GPU"
        other = f"or use --strategy zero2 (which also shards on a CPU) or ddp; {in_yaml}"
        raise UsageError(text, hint=("pass --gpus-per-node COUNT", other))
    torch = python.version_of("torch")
    if strategy.is_fsdp and torch is not None and torch < (2, 6):
        installed = f"{python.packages['torch']} is installed"
        text = f"{strategy.value} is FSDP2, which needs torch 2.6 or newer; {installed}"
        raise UsageError(text, hint="upgrade torch, or use --strategy zero3")


def _precision(spec: JobSpec, own: OwnFiles, world: World) -> Precision:
    """Decide the precision. Raises UsageError if a DeepSpeed JSON or a CPU can't have it."""
    precision = _wanted_precision(spec, own, world)
    if own.deepspeed_text and precision in ANY_PRECISION - own.allowed_by_json:
        says = " or ".join(sorted(repr(allowed.value) for allowed in own.allowed_by_json))
        text = f"mixed precision is {precision.value!r}, but {own.deepspeed_name} allows {says}"
        raise UsageError(text, hint='set "enabled": "auto" in this file, or drop the other setting')
    stated = own.stated_in_yaml if precision is Precision.FILE else precision
    if stated is Precision.FP16 and world.device is Device.CPU:
        raise fp16_without_gpu()
    return precision


def fp16_without_gpu() -> UsageError:
    """Return the error about fp16 on a CPU."""
    text = "fp16 needs a GPU: on a CPU, accelerate trains in fp32 without a warning"
    return UsageError(text, hint="use --mixed-precision bf16 or no")


def _wanted_precision(spec: JobSpec, own: OwnFiles, world: World) -> Precision:
    """Return the precision of the option, the user's file, or the device, in this order."""
    if spec.mixed_precision is not MixedPrecision.AUTO:
        return Precision(spec.mixed_precision.value)
    if own.accelerate_text and not own.deepspeed_text:
        # FILE: the YAML decides, even if it states no precision. A bare `no` is false in YAML,
        # which accelerate rejects unless a flag gives the precision.
        return Precision.NO if own.stated_in_yaml is Precision.NO else Precision.FILE
    if own.accelerate_text:
        # Beside a DeepSpeed JSON accelerate accepts a precision as a flag, not in its file.
        return own.stated_in_yaml or Precision.FILE
    if world.device is not Device.CUDA:
        simplest_first = (Precision.NO, Precision.BF16, Precision.FP16)
        return next(each for each in simplest_first if each in own.allowed_by_json)
    if own.allowed_by_json == ANY_PRECISION:
        return Precision.HEAD  # the head node chooses bf16 or fp16 for all
    mixed = own.allowed_by_json - {Precision.NO}  # the JSON allows NO unless it enables another
    # If it enables both, and so allows only these two, `_precision` refuses NO.
    return next(iter(mixed)) if len(mixed) == 1 else Precision.NO


def _threads(spec: JobSpec, facts: Facts, world: World, cpus: int) -> int:
    """Return OMP_NUM_THREADS; 0 if the node, or Slurm, decides."""
    if spec.threads_per_process:
        return spec.threads_per_process
    if facts.cluster.scheduler.has_hosts:
        return 0  # each host knows its CPUs
    if facts.cluster.scheduler.has_queue:
        return max(1, cpus // world.procs_per_node) if cpus else 0
    return max(1, facts.local_cpus // world.size)  # all ranks are here


def _template_settings(
    world: World, strategy: Strategy, sizes: Parallel, precision: Precision, own: OwnFiles
) -> dict[str, Any]:
    """Return the fields of a plan about its accelerate template: the name and the values."""
    if own.accelerate_text:
        return {"accelerate_config": "", "accelerate": {}}
    # To accelerate, MULTI_GPU means two or more ranks in all, even with one GPU on each node.
    without_shards = "MULTI_GPU" if world.size > 1 else "NO"
    types = {"fsdp": "FSDP", "deepspeed": "DEEPSPEED"}
    is_left_open = precision in (Precision.HEAD, Precision.FILE) or bool(own.deepspeed_text)
    values = {
        "strategy": strategy.value,
        "distributed_type": types.get(strategy.engine, without_shards),
        # accelerate turns DeepSpeed with use_cpu into DDP.
        "use_cpu": world.device is Device.CPU and not strategy.is_deepspeed,
        "num_machines": world.nodes,
        "num_processes": world.size,
        "procs_per_node": world.procs_per_node,
        "parallelism": template_sizes(sizes, strategy),
        "is_tensor_parallel": sizes.tensor > 1,
        "mixed_precision": "" if is_left_open else precision.value,
    }
    stem = "deepspeed-config" if own.deepspeed_text else strategy.value
    return {"accelerate_config": f"{stem}.yaml.j2", "accelerate": values}


def _notes(spec: JobSpec, own: OwnFiles, facts: Facts, world: World, cpus: int) -> tuple[str, ...]:
    """Return notes for the user, such as on idle GPUs and on settings without effect."""
    notes = [*notes_on_file(spec, own, facts, world), *own.notes]
    scheduler = facts.cluster.scheduler
    is_local, is_slurm = scheduler.is_this_machine, scheduler.reads_sbatch
    is_cpu_chosen = spec.device is not Device.AUTO or own.use_cpu or scheduler.has_hosts
    if world.device is Device.CPU and not is_cpu_chosen:
        lack = "no GPU here" if is_local and not facts.local_gpus else "no GPU requested"
        notes.append(f"{lack}: {count(world.procs_per_node, 'CPU rank')} per node over gloo")
    if world.device is Device.CUDA and world.procs_per_node < world.gpus_per_node:
        idle = world.gpus_per_node - world.procs_per_node
        notes.append(f"{idle} of the {world.gpus_per_node} GPUs of each node stay idle")
    where = "on this machine" if is_local else "without Slurm"
    of_slurm = {
        "--sbatch-arg": spec.sbatch_args,
        "--srun-arg": spec.srun_args,
        "launch.stage": spec.stage is Stage.TAR,
        "launch.stage_dir": spec.stage_dir,
        "slurm.spare_nodes": is_local and spec.spare_nodes,
    }
    given = (name for name, value in of_slurm.items() if value and not is_slurm)
    notes += [f"{name} has no effect {where}" for name in given]
    of_gpus = {"slurm.cpus_per_gpu": spec.cpus_per_gpu, "slurm.mem_per_gpu": spec.mem_per_gpu}
    if is_slurm and not world.gpus_per_node:
        notes += [f"{name} has no effect without GPUs" for name, value in of_gpus.items() if value]
    if is_slurm and world.gpus_per_node and not cpus and not spec.exclusive:
        default = "without a site default, Slurm gives one per node (--cpus-per-task)"
        notes.append(f"no CPUs requested: {default}")
    if not spec.python and python_of(spec.setup) and not facts.interpreter.is_known:
        activated = f"the nodes run {facts.python} from the environment that setup activates"
        needs = "clusterrun must be installed in it (--python names another interpreter)"
        notes.append(f"{activated}; {needs}")
    return (*notes, *input_notes(spec, facts))


def _check_hosts(spec: JobSpec, facts: Facts) -> tuple[str, ...]:
    """Refuse unusable hosts; return notes on settings without effect. Raises UsageError."""
    if not facts.cluster.scheduler.has_hosts:
        place = facts.cluster.scheduler.title
        given = "--hostfile" if spec.hostfile else ""
        given = "--hosts" if spec.hosts else given
        if given and not spec.cluster.scheduler.is_this_machine:  # local was not asked for
            text = f"{given} is given, but the job would run on {place}"
            raise UsageError(text, hint="pass --cluster ssh or allocation, or leave out the hosts")
        return (f"{given} has no effect on {place}",) if given else ()
    check_distinct(facts.hosts)
    listed, spares = len(facts.hosts.hosts), spec.spare_nodes
    if (spec.nodes or 1) + spares > listed:
        wanted = f"{count(spec.nodes or 1, 'node')} and {count(spares, 'spare node')} requested"
        text = f"{wanted}, but {facts.hosts.source} lists {count(listed, 'host')}"
        raise UsageError(text, hint="list more hosts, or lower --nodes or slurm.spare_nodes")
    unused = listed - (spec.nodes or listed - spares) - spares
    left = ", ".join(facts.hosts.hosts[listed - unused :])
    return (f"not used: {left} (--nodes {spec.nodes})",) if unused else ()


def _host_settings(spec: JobSpec, facts: Facts, nodes: int) -> dict[str, Any]:
    """Return the fields of a plan about its hosts; none for a job elsewhere."""
    if not facts.cluster.scheduler.has_hosts:
        return {}
    return {
        "hosts": facts.hosts.hosts[: nodes + spec.spare_nodes],
        "wait_for_hosts_s": spec.wait_for_hosts_s,
        "hosts_dir": spec.hosts_dir,
        "starter": facts.starter.value,
    }
