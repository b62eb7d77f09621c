"""Turn a configuration into a question about a training, and read what runs of it have measured."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from clusterrun.backends import interpreters
from clusterrun.backends.machine_facts import choose_cluster, interpreter_of, usable_cpus
from clusterrun.config.choices import Cluster, Device, MixedPrecision, Strategy
from clusterrun.config.settings import Resolved
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.estimates import gpus, models
from clusterrun.estimates.estimate import Question, estimate, mistake, wrong_sizes
from clusterrun.estimates.gpus import Gpu
from clusterrun.estimates.inputs import GIB, Fit, Model, Setup
from clusterrun.estimates.recommend import Choice, recommend
from clusterrun.estimates.speed import Scaling
from clusterrun.launch.facts import Interpreter
from clusterrun.launch.inputs import named_json
from clusterrun.launch.make import check_strategy, fp16_without_gpu
from clusterrun.launch.plan import Parallel
from clusterrun.launch.world_shape import World, check_sharing, check_sizes
from clusterrun.rundir import reading
from clusterrun.rundir.events import EventType, read
from clusterrun.rundir.paths import RunPaths, RunsDir
from clusterrun.shared import checkpoint_files, shell
from clusterrun.shared.amounts import parse_bytes
from clusterrun.shared.files import parse_object, read_json, write_whole
from clusterrun.shared.typed import decoded

_SHAPE: Final = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocab")
_LEAST_BYTES: Final = 1 << 30  # of memory: a bare 24 probably means GiB
_MOST_CONFIG_BYTES: Final = 1 << 24


def question_of(resolved: Resolved, *, undecided: bool = False, may_count: bool = True) -> Question:
    """Collect the facts of a training from a configuration and this machine.

    `undecided`: strategy, micro-batch and accumulation are still to be chosen. Without `may_count`,
    a model whose parameters were never counted is unknown, because counting takes seconds.
    Raises UsageError if the model's size is unknown or the question makes no sense.
    """
    spec = resolved.spec
    _refuse(spec, undecided=undecided)
    gpu, is_cpu = _gpu(spec), _is_cpu(spec)
    setup = _setup(spec, _model(resolved, may_count=may_count), gpu, undecided=undecided)
    copied = "max_steps lr base_batch lr_rule mfu step_time_s save_every keep keep_best network"
    given = {name: value for name in copied.split() if (value := getattr(spec, name))}
    within, between = spec.intra_node_bandwidth, spec.inter_node_bandwidth
    host_bytes, cpus = _memory_and_cpus(spec)
    measured = (x for x in stored_scaling(resolved) if x.is_of(setup, is_cpu=is_cpu))
    question = Question(
        **given,
        setup=setup,
        is_cpu=is_cpu,
        gpu=None if is_cpu else gpu,
        gpu_bytes=spec.gpu_mem_bytes or (gpu.memory_bytes if gpu else None),
        host_bytes=host_bytes,
        cpus_per_rank=max(1, cpus // setup.procs_per_node) if cpus else None,
        samples=_samples(spec),
        epochs=spec.epochs or (None if spec.max_steps else 1),
        wanted_batch=spec.effective_batch,
        wanted_ckpt=spec.grad_ckpt,
        prices=_prices(spec, gpu),
        limit_s=spec.time_minutes * 60 if spec.time_minutes else None,
        disk_bytes=_free_bytes(resolved),
        within_node=within * 1e9 if within else None,
        between_nodes=between * 1e9 if between else None,
        scaling=next(measured, None),
    )
    if not undecided and (wrong := wrong_sizes(setup)):
        raise UsageError(wrong, hint="choose sizes that divide the heads and the tokens")
    if not undecided and (wrong := mistake(question)):
        raise UsageError(wrong, hint="lower --micro-batch, --accumulation or --nodes")
    return question


def host_bytes_and_warnings(resolved: Resolved) -> tuple[int, tuple[str, ...]]:
    """Estimate a node's memory, and say what the training lacks; 0 and why if it is impossible."""
    try:
        answer = estimate(question_of(_submitted(resolved)))
    except UsageError as error:
        return 0, (f"no estimate was made: {error.message}",)
    needs = (answer.gpu_memory, answer.host_memory, answer.disk)
    warnings = [
        f"{what}: {need.total_bytes / GIB:,.1f} GiB estimated, "
        f"{need.capacity_bytes / GIB:,.1f} available; run clusterrun plan"
        for what, need in zip(("memory of a GPU", "memory of a node", "disk"), needs, strict=True)
        if need and need.capacity_bytes is not None and need.verdict is Fit.NO
    ]
    if answer.never_ends:
        warnings.append("the training is estimated to exceed its time limit, and it saves nothing")
    return answer.host_memory.total_bytes, tuple(warnings)


def _submitted(resolved: Resolved) -> Resolved:
    """Decide where the job will run: a submission, unlike a plan, is for this cluster."""
    cluster = choose_cluster(resolved.spec.cluster)
    return resolved._replace(spec=dataclasses.replace(resolved.spec, cluster=cluster))


def fastest_choice(resolved: Resolved, *, strategy: Strategy | None = None) -> Choice:
    """Choose how to train: the fastest setup that fits, under one strategy or any.

    Raises UsageError if too little is known, ClusterrunError if nothing fits.
    """
    question = question_of(_submitted(resolved), undecided=True)
    choices = recommend(question, strategy=strategy)
    if not choices:
        text = f"no setup fits{f' under {strategy.value}' if strategy else ''} at any micro-batch"
        hint = "run clusterrun plan --recommend to see the setup that needs the least memory"
        raise ClusterrunError(text, hint=hint)
    if estimate(dataclasses.replace(question, setup=choices[0].setup)).never_ends:
        text = "the training takes longer than its time limit, and saves no checkpoints"
        hint = "set training.save_every to the number of steps between checkpoints, or raise --time"
        raise ClusterrunError(text, hint=hint)
    return choices[0]


def assumptions_of(resolved: Resolved) -> tuple[str, ...]:
    """Return notes on the card that a short name means and on a precision that it lacks."""
    spec = resolved.spec
    named = spec.gpu or spec.gpu_type
    text = gpus.assumption(named) if named and not spec.gpu_mem_bytes else ""
    is_bf16 = spec.mixed_precision is MixedPrecision.BF16 and not _is_cpu(spec)
    return tuple(filter(None, (text, gpus.bf16_note(named) if is_bf16 else "")))


def _refuse(spec: JobSpec, *, undecided: bool) -> None:
    """Refuse what can't be estimated or trained, also the user's files, which may set anything."""
    # The script's own DeepSpeed JSON decides the strategy, unless the options do.
    json_decides = not undecided and not spec.strategy.is_deepspeed and named_json(spec.args)
    if spec.accelerate_config or spec.deepspeed_config or json_decides:
        hint = "leave it out, and describe the setup with --strategy, --nodes and --gpus-per-node"
        raise UsageError("plan cannot evaluate your own accelerate or DeepSpeed file", hint=hint)
    for option, size in (("--gpu-mem", spec.gpu_mem_bytes), ("--host-mem", spec.host_mem_bytes)):
        if size is not None and size < _LEAST_BYTES:
            raise UsageError(f"{option} is only {size} bytes", hint="add a unit, as in 24GiB")
    is_cpu, procs = _is_cpu(spec), spec.nproc_per_node or spec.gpus_per_node or 1
    world = World(
        nodes=spec.nodes or 1,
        procs_per_node=procs,
        gpus_per_node=0 if is_cpu else spec.gpus_per_node or procs,
        device=Device.CPU if is_cpu else Device.CUDA,
    )
    check_sharing(world)
    if not undecided:
        check_strategy(spec.strategy, world, Interpreter())
        check_sizes(Parallel.of(spec), spec.strategy, nodes=world.nodes, world=world.size)


def _is_cpu(spec: JobSpec) -> bool:
    """Return whether the ranks run on CPUs, as `submit` decides; by default they run on GPUs."""
    return spec.device is Device.CPU or (spec.device is Device.AUTO and spec.gpus_per_node == 0)


def _setup(spec: JobSpec, model: Model, gpu: Gpu | None, *, undecided: bool) -> Setup:
    """Describe the training. Raises UsageError for settings that cannot be combined."""
    procs, nodes = spec.nproc_per_node or spec.gpus_per_node or 1, spec.nodes or 1
    micro_batch, parallel = spec.micro_batch or 1, Parallel.of(spec)
    pass_samples = micro_batch * parallel.data(nodes * procs)
    copied = ("nodes", "strategy", "micro_batch", "grad_ckpt", "optimizer", "lora")
    given = {name: value for name in copied if (value := getattr(spec, name))}
    return Setup(
        **given,
        model=model,
        procs_per_node=procs,
        parallel=parallel,
        precision=_precision(spec, gpu, is_cpu=_is_cpu(spec)),
        # `undecided`: micro-batch and accumulation are chosen later, to reach the effective batch.
        accumulation=(spec.accumulation or 1) if undecided else _accumulation(spec, pass_samples),
        seq_len=spec.seq_len or (0 if model.is_text else model.positions),
        load_in_4bit=_in_4bit(spec, model),
    )


def _in_4bit(spec: JobSpec, model: Model) -> bool:
    """Return whether the base is loaded in 4 bits. Raises UsageError if that can't be trained."""
    if not spec.load_in_4bit:
        return False
    if not spec.lora:
        raise UsageError("4-bit weights can't be trained", hint="add adapters, such as --lora 16")
    if model.active_params:
        text = "bitsandbytes can't quantize experts: each block stores them in one tensor"
        raise UsageError(text, hint="leave out --load-in-4bit")
    return True


def _accumulation(spec: JobSpec, per_pass: int) -> int:
    """Return the passes of a step, of `per_pass` samples. Raises UsageError for a contradiction."""
    wanted, given = spec.effective_batch, spec.accumulation
    if wanted is None:
        return given or 1
    passes, rest = divmod(wanted, per_pass)
    if rest:
        nearest = max(1, round(wanted / per_pass)) * per_pass
        text = f"effective batch {wanted} is not a multiple of micro-batch x data-parallel ranks"
        hint = f"use {nearest}, change --micro-batch, or let --recommend choose it"
        raise UsageError(f"{text} ({per_pass})", hint=hint)
    if given not in (None, passes):
        text = f"an effective batch of {wanted} needs --accumulation {passes}, not {given}"
        raise UsageError(text, hint="leave out --effective-batch or --accumulation")
    return passes


def _precision(spec: JobSpec, gpu: Gpu | None, *, is_cpu: bool) -> str:
    """Return the precision of the passes; auto is fp32 on CPUs, and depends on the card on GPUs."""
    if is_cpu and spec.mixed_precision is MixedPrecision.FP16:
        raise fp16_without_gpu()
    if spec.mixed_precision is not MixedPrecision.AUTO:
        return "fp32" if spec.mixed_precision is MixedPrecision.NO else spec.mixed_precision.value
    if is_cpu:
        return "fp32"
    return gpus.precision_of(gpu) if gpu else "bf16"


def _gpu(spec: JobSpec) -> Gpu | None:
    """Find the card, with its memory if given; None if no card is named.

    For an unknown card, return None if its name is Slurm's or --gpu-mem gives its memory; else
    raise UsageError.
    """
    if spec.gpu is not None and spec.gpu_mem_bytes is None:
        return gpus.find(spec.gpu)
    named = spec.gpu or spec.gpu_type
    try:
        found = gpus.find(named) if named else None
    except UsageError:
        return None
    return gpus.sized(found, spec.gpu_mem_bytes) if found and spec.gpu_mem_bytes else found


# The model


def _model(resolved: Resolved, *, may_count: bool) -> Model:
    """Find the model by its numbers, its config.json or our table. Raises UsageError."""
    spec = resolved.spec
    if spec.active_params is not None and spec.params is None:
        raise UsageError("--active-params needs --params", hint="pass the total number as --params")
    if spec.model is None or spec.params is not None or spec.hidden is not None:  # numbers win
        return _by_numbers(spec)
    config = _local_config(resolved, spec.model)
    if config is not None:  # without `may_count`, only a cached count is used
        return counted(config, spec.model, resolved, may_count=may_count)
    known = models.find(spec.model)
    if known is None:
        missing = "not a known model, not a config.json and not in the Hugging Face cache"
        raise UsageError(f"'{spec.model}' is {missing}", hint=_other_models(spec.model))
    return known


def _other_models(name: str) -> tuple[str, ...]:
    near = " or ".join(f"'{name}'" for name in models.nearest(name))
    repo = name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else "ORG/NAME"
    download = f"run 'hf download {repo} config.json', then plan --model with the path it prints"
    return (*((f"use {near}",) if near else ()), f"{download}; or pass --params")


def _local_config(resolved: Resolved, name: str) -> Mapping[str, Any] | None:
    """Read a model's config.json if this machine has it: here, or in the Hugging Face cache."""
    hub = os.path.join(os.environ.get("HF_HOME") or _caches() / "huggingface", "hub")
    cache = Path(os.environ.get("HF_HUB_CACHE") or hub) / f"models--{name.replace('/', '--')}"
    try:
        given = [place / Path(name).expanduser() for place in (resolved.cwd, resolved.project_dir)]
        local = [path for place in given for path in (place, place / "config.json")]
        cached = sorted(cache.glob("snapshots/*/config.json"), key=os.path.getmtime, reverse=True)
        found = next((path for path in (*local, *cached) if path.is_file()), None)
    except (OSError, ValueError, RuntimeError) as error:  # no such user, too long, too deep
        raise UsageError(f"cannot read the model '{name}'", cause=str(error)) from error
    if found is None:
        return None
    try:
        with open(found, encoding="utf-8") as file:
            content = json.loads(file.read(_MOST_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {found}", cause=str(error)) from error
    if not isinstance(content, dict):
        raise UsageError(f"{found} is not a JSON object", hint="pass a model's config.json")
    return content


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def _by_numbers(spec: JobSpec) -> Model:
    if not spec.names_model:
        hint = "pass --model qwen3-8b, --model path/to/config.json, or --params 8.03e9"
        raise UsageError("no model was named", hint=hint)
    shape: dict[str, Any] = {name: getattr(spec, name) or 0 for name in _SHAPE}
    params, active_params = round(spec.params or 0), round(spec.active_params or 0)
    return models.from_numbers(Model(name="", params=params, active_params=active_params, **shape))


# A model that our table lacks, counted with the transformers of the job's Python

DEADLINE_S: Final = 120.0
ANSWER_BYTES: Final = 1 << 16
BY_HAND: Final = (
    "pass --params, and --hidden --layers --heads --kv-heads --ffn --vocab if you know them"
)
SIZE_ALONE: Final = "pass only --params and --active-params: the other options describe no experts"
# Nothing is downloaded, and no GPU is touched.
ENVIRONMENT: Final = {
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    **{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "USE_TF": "0", "USE_FLAX": "0"},
}


def counted(values: Mapping[str, Any], name: str, resolved: Resolved, *, may_count: bool) -> Model:
    """Count the model of a config.json, as transformers would build it; the answer is cached.

    Without `may_count`, only a cached answer is returned. Raises UsageError if the job's Python has
    no transformers, or transformers can't build it.
    """
    python, config = _python(resolved), json.dumps(values, sort_keys=True)
    program = Path(__file__).with_name("count.py").read_text(encoding="utf-8")
    key = json.dumps([program, python, config]).encode(errors="surrogateescape")
    file = _caches() / "clusterrun" / "models" / f"{hashlib.sha256(key).hexdigest()[:24]}.json"
    cached = read_json(file)
    if cached is None and not may_count:
        hint = "run clusterrun plan, which counts them"
        raise UsageError(f"the parameters of '{name}' have not been counted yet", hint=hint)
    answer = cached or _run_count([python, "-c", program], config)
    if "missing" in answer:
        text = f"counting '{name}' needs torch and transformers in the job's Python, {python}"
        hints = (BY_HAND, "or pass --python with an interpreter that has them")
        raise UsageError(text, cause=str(answer["missing"]), hint=hints)
    try:
        model: Model = decoded(Model, {**answer, "name": name})
    except ValueError as error:
        hint = SIZE_ALONE if "experts" in config else BY_HAND
        cause = " ".join(str(answer.get("wrong", error)).split())
        text = f"cannot count the parameters of '{name}'"
        raise UsageError(text, cause=cause[:300], hint=hint) from error
    if cached is None:
        with contextlib.suppress(OSError):  # it is counted again the next time
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(file, json.dumps(answer))
    return model


def _python(resolved: Resolved) -> str:
    """Return the job's interpreter if it is here and the user chose it; else our own."""
    spec, home, found = resolved.spec, os.environ.get("HOME", ""), ""
    if interpreters.may_run(resolved):
        named = interpreter_of(spec, resolved.cwd, home=home)
        found = interpreters.path_of(named, spec, os.environ)
    return found or sys.executable


def _run_count(argv: list[str], config: str) -> dict[str, Any]:
    """Run count.py in /, where it can't import a json.py of the project; return what it printed."""
    try:
        environ = {**os.environ, **ENVIRONMENT}
        done = shell.run_once(argv, DEADLINE_S, environ, config, Path("/"), most=ANSWER_BYTES)
    except ClusterrunError as error:
        return {"wrong": error.cause}
    if done.rc == shell.TIMED_OUT:
        return {"wrong": f"no answer within {DEADLINE_S:.0f} s"}
    last_line = (done.stdout.splitlines() or [""])[-1]
    message = done.stderr.strip().rpartition("\n")[2] or "the job's Python printed no numbers"
    return parse_object(last_line) or {"wrong": message}


# Resources


def _samples(spec: JobSpec) -> int | None:
    """Return the samples of an epoch, as given or from its tokens. Raises UsageError."""
    if spec.tokens is None:
        return spec.samples
    if spec.samples is not None:
        raise UsageError("--samples and --tokens cannot be combined", hint="keep one of them")
    if spec.seq_len is None:
        raise UsageError("--tokens needs the length of a sample", hint="pass --seq-len")
    return max(1, int(spec.tokens / spec.seq_len))


def _prices(spec: JobSpec, gpu: Gpu | None) -> dict[str, float]:
    """Read each `GPU=PRICE`; the name in --gpu is the planned card."""
    prices = {}
    for text in spec.gpu_price:
        name, _, price = text.partition("=")
        card = gpu if gpu and name == spec.gpu else gpus.find(name)
        if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", price):
            hint = "write --gpu-price h100-80g=2.5"
            raise UsageError(f"--gpu-price '{text}' has no price", hint=hint)
        prices[card.name] = float(price)
    return prices


def _memory_and_cpus(spec: JobSpec) -> tuple[int | None, int | None]:
    """Return the bytes and the CPUs that the job gets on a node; None if Slurm decides."""
    gpus_of_node = 1 if spec.gpus_per_node is None else spec.gpus_per_node  # by default one
    cpus = spec.cpus_per_task or (spec.cpus_per_gpu or 0) * gpus_of_node or None
    memory = spec.host_mem_bytes
    for text, times in ((spec.mem, 1), (spec.mem_per_gpu, gpus_of_node), (spec.mem_per_cpu, cpus)):
        amount = text if text and text.strip("0") else ""  # --mem=0 is all of the node
        if memory is None and amount and times:
            # A bare number is MiB, as in Slurm.
            memory = times * (int(amount) << 20 if amount.isdecimal() else parse_bytes(amount))
    if _runs_here(spec) and memory is None:
        import psutil

        memory = psutil.virtual_memory().total // (spec.nodes or 1)  # simulated nodes share it
    if _runs_here(spec) and cpus is None:
        cpus = usable_cpus() // (spec.nodes or 1)
    return memory, cpus


def _runs_here(spec: JobSpec) -> bool:
    """Return whether the job is for this machine; a plan for GPUs is probably for another one."""
    if spec.cluster is Cluster.AUTO and (spec.gpu or spec.gpu_mem_bytes or not _is_cpu(spec)):
        return False
    return bool(choose_cluster(spec.cluster).scheduler.is_this_machine)


def _free_bytes(resolved: Resolved) -> int | None:
    """Return the space for checkpoints; None if none are saved, or the disk is not seen here."""
    spec, path = resolved.spec, resolved.cwd / resolved.spec.run_dir
    clusters = (choose_cluster(Cluster.AUTO), choose_cluster(spec.cluster))  # here, and the job's
    is_shared = all(cluster.scheduler.shares_files for cluster in clusters)
    if spec.save_every is None or not (is_shared or _runs_here(spec)):
        return None
    with contextlib.suppress(OSError):  # a directory may be another user's
        place = next(place for place in (path, *path.parents) if place.exists())  # at least /
        return shutil.disk_usage(place).free
    return None


# What runs have measured, by their events and checkpoints

SHORTEST_S = 0.5  # between two reports that are used; the last step is reported immediately


class Measured(NamedTuple):
    """The median time of a step, steps and peaks; None for what the run has not reported."""

    step_s: float | None
    steps: int | None
    gpu_bytes: int | None  # largest allocator peak of a rank
    host_bytes: int | None  # largest sum of the peaks of a node's ranks
    checkpoint_bytes: int | None
    timed: int = 0  # steps behind the median


def measure(paths: RunPaths, *, warm_up: float = 0.0) -> Measured:
    """Read what the ranks of a run reported, without the first share `warm_up` of step times."""
    spans: list[tuple[float, int]] = []  # seconds, and the steps in them
    steps: list[int] = []
    gpu: list[int] = []
    hosts: dict[tuple[str, int], int] = defaultdict(int)  # by node and attempt; a rank adds once
    newest: dict[int, tuple[float, int]] = {}  # by attempt: time and step of rank 0's last report
    files = sorted(paths.events_dir.glob("*.jsonl"))
    wanted = (EventType.STEP, EventType.PEAKS)
    for event in (event for file in files for event in read(file, wanted)):
        if event.type is EventType.PEAKS:
            hosts[event.node, event.attempt] += event.rss_bytes or 0
            gpu.append(event.cuda_allocated_bytes or 0)
        elif event.step is not None:
            last_at, last_step = newest.get(event.attempt, (event.at, event.step))  # else itself
            span_s, span_steps = event.at - last_at, event.step - last_step
            if span_s >= SHORTEST_S and span_steps > 0:  # a counter may restart in each epoch
                spans.append((span_s, span_steps))
            newest[event.attempt] = (event.at, event.step)
            steps.append(event.step)
    from statistics import median  # slow to import, and plan often measures nothing

    spans = spans[int(warm_up * len(spans)) :]
    return Measured(
        step_s=median(span_s / count for span_s, count in spans) if spans else None,
        steps=max(steps, default=None),
        gpu_bytes=max(gpu, default=0) or None,
        host_bytes=max(hosts.values(), default=0) or None,
        checkpoint_bytes=checkpoint_bytes(paths),
        timed=sum(count for _, count in spans),
    )


def checkpoint_bytes(paths: RunPaths) -> int | None:
    """Return the size of the newest complete checkpoint; None without one."""
    newest, _ = checkpoint_files.newest(paths.checkpoints_dir, contents=False)
    files = newest.path.rglob("*") if newest else ()
    with contextlib.suppress(OSError):  # it was removed in the meantime
        return sum(file.stat().st_size for file in files if file.is_file()) or None
    return None


SCHEMA: Final = "clusterrun.scaling/1"


def to_object(scaling: Scaling) -> dict[str, Any]:
    """Return a result as JSON values, each point with its gain over the first."""
    points = [{**dataclasses.asdict(x), **scaling.gain(x)._asdict()} for x in scaling.points]
    return {"schema": SCHEMA, **dataclasses.asdict(scaling), "points": points}


def store(path: Path, scaling: Scaling) -> None:
    """Write scaling.json whole, readable by its owner only. Raises ClusterrunError."""
    try:
        write_whole(path, json.dumps(to_object(scaling), indent=2) + "\n")
    except OSError as error:
        raise ClusterrunError(f"cannot write {path}", cause=str(error)) from error


def stored_scaling(resolved: Resolved) -> tuple[Scaling, ...]:
    """Return the results for a configuration's script, the newest first."""
    spec = resolved.spec
    if spec.script is None and spec.module is None:
        return ()
    runs_dir = RunsDir(root=Path(os.path.normpath(resolved.cwd / spec.run_dir)))
    paths = runs_dir.root.glob(f"*/{runs_dir.scaling('').name}")
    found = (reading.read(path, Scaling, SCHEMA) for path in paths)
    own = [x for x in found if x and x.points and x.script == script_of(resolved)]
    return tuple(sorted(own, key=lambda x: x.measured_at, reverse=True))


def script_of(resolved: Resolved) -> str:
    """Name what a configuration runs: the script's path, or `-m MODULE`."""
    spec = resolved.spec
    if spec.module is not None:
        return f"-m {spec.module}"
    return os.path.normpath(resolved.cwd / (spec.script or ""))
