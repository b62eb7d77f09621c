"""Read the user's own accelerate YAML and DeepSpeed JSON, without changing them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from clusterrun.config.choices import Device, Strategy
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ConfigError, UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.inputs import named_json
from clusterrun.launch.plan import Precision
from clusterrun.shared.wording import count, nearest

if TYPE_CHECKING:
    from clusterrun.launch.world_shape import World

ANY_PRECISION = frozenset((Precision.NO, Precision.FP16, Precision.BF16))

# accelerate refuses these beside a DeepSpeed JSON (DeepSpeedPlugin._deepspeed_config_checks).
_JSON_SAYS_IT = {
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_optimizer_nvme_path"),
    *("offload_param_device", "offload_param_nvme_path"),
}

_ENGINES = {"NO": "none", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}


class OwnFiles(NamedTuple):
    """The user's files: their texts, and the settings in them."""

    accelerate_text: str = ""
    deepspeed_text: str = ""
    deepspeed_name: str = ""  # as given
    strategy: Strategy | None = None
    use_cpu: bool = False
    stated_in_yaml: Precision | None = None  # None: none, or an unknown one
    allowed_by_json: frozenset[Precision] = ANY_PRECISION
    accelerate: Mapping[str, Any] = MappingProxyType({})  # the settings of the YAML
    notes: tuple[str, ...] = ()


def read_own_files(spec: JobSpec, facts: Facts) -> OwnFiles:
    """Read both files and compare them with each other and with `--strategy`.

    Raises ConfigError for a file that cannot be used, UsageError if two of them disagree.
    """
    config = _accelerate_mapping(spec, facts) if spec.accelerate_config else {}
    json_name, text = _deepspeed_file(spec, facts)
    deepspeed = _deepspeed_mapping(json_name, text) if json_name else {}
    strategy = _strategy_of_yaml(spec, config) if config else None
    if deepspeed and strategy and not strategy.is_deepspeed:
        has = f"{spec.accelerate_config} has distributed_type {config['distributed_type']}"
        hint = "write distributed_type: DEEPSPEED in the YAML, or leave out one of the two files"
        raise UsageError(f"{json_name} is for DeepSpeed, but {has}", hint=hint)
    _refuse_stated_twice(spec, json_name, config)
    if deepspeed:
        section = deepspeed["zero_optimization"]
        parts = (_mapping(section.get(f"offload_{part}")) for part in ("optimizer", "param"))
        strategy = _zero_strategy(section.get("stage", 0), [part.get("device") for part in parts])
    asked = spec.strategy
    is_other = strategy and (strategy.engine, strategy.stage) != (asked.engine, asked.stage)
    if strategy and is_other and asked is not Strategy.DDP:  # DDP may be the default, not a choice
        means = f"{json_name or spec.accelerate_config} selects {strategy.value}"
        hint = "leave out --strategy: your own file decides"
        raise UsageError(f"--strategy is {asked.value}, but {means}", hint=hint)
    return OwnFiles(
        accelerate_text=facts.accelerate_config_text if config else "",
        deepspeed_text=text if deepspeed else "",
        deepspeed_name=json_name,
        notes=_notes_on_script(spec, facts, json_name, strategy),
        strategy=strategy,
        use_cpu=config.get("use_cpu") is True,
        stated_in_yaml=_stated_precision(config),
        allowed_by_json=allowed_precisions(deepspeed),
        accelerate=config,
    )


def _refuse_stated_twice(spec: JobSpec, json_name: str, config: dict[str, Any]) -> None:
    """Refuse settings of the YAML that accelerate takes from the JSON alone. Raises UsageError."""
    both = sorted(_JSON_SAYS_IT & _mapping(config.get("deepspeed_config")).keys())
    if json_name and both:
        has = f"{spec.accelerate_config} has {', '.join(both)}"
        text = f"{has}, which accelerate refuses beside a DeepSpeed JSON"
        raise UsageError(text, hint=f"set it in {json_name} instead")


def _deepspeed_file(spec: JobSpec, facts: Facts) -> tuple[str, str]:
    """Return the DeepSpeed JSON's name and text: that of the launch, else that of the script."""
    named, script_text = spec.deepspeed_config or "", facts.script_deepspeed_text
    if not script_text:
        return named, facts.deepspeed_config_text
    in_args = named_json(spec.args) or ""
    if named and json.loads(script_text) != _deepspeed_mapping(named, facts.deepspeed_config_text):
        text = f"{named} (--deepspeed-config) differs from {in_args} (in the script's arguments)"
        raise UsageError(text, hint="leave out --deepspeed-config to use the script's own file")
    return named or in_args, script_text


def _notes_on_script(
    spec: JobSpec, facts: Facts, name: str, strategy: Strategy | None
) -> tuple[str, ...]:
    """Say whether the DeepSpeed JSON in the script's arguments decides the strategy."""
    own = named_json(spec.args)
    if spec.deepspeed_config or own is None:
        return ()
    if not facts.script_deepspeed_text or strategy is None:
        need = "it is not plain JSON with a zero_optimization section, or is not on this machine"
        return (f"{own}, from the script's arguments, does not set the strategy: {need}",)
    return (f"{name}, from the script's arguments, sets the strategy to {strategy.value}",)


def yaml_error(spec: JobSpec, text: str, hint: str | tuple[str, ...] = ()) -> ConfigError:
    """Return an error in the user's accelerate YAML."""
    return ConfigError(text, where=spec.accelerate_config, hint=hint)


def _accelerate_mapping(spec: JobSpec, facts: Facts) -> dict[str, Any]:
    """Read the accelerate YAML. Raises ConfigError if it is incomplete or not for these nodes."""
    import yaml

    from clusterrun.config.document import BoundedLoader

    try:
        config = yaml.load(facts.accelerate_config_text, Loader=BoundedLoader)
    except yaml.YAMLError as error:
        text, cause = "the accelerate configuration is not valid YAML", " ".join(str(error).split())
        raise ConfigError(text, where=spec.accelerate_config, cause=cause) from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        text = "the accelerate configuration has no distributed_type"
        hint = "write a complete file with 'accelerate config', or pass --strategy instead"
        raise yaml_error(spec, text, hint)
    environment = config.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        text = f"compute_environment {environment!r} is not supported"
        raise yaml_error(spec, text, "write compute_environment: LOCAL_MACHINE")
    for key in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        if not isinstance(config.get(key) or {}, dict):
            raise yaml_error(spec, f"{key} must be a section of settings, not {config[key]!r}")
    return config


def _strategy_of_yaml(spec: JobSpec, config: dict[str, Any]) -> Strategy:
    """Return the simplest strategy that does what the YAML says. Raises ConfigError."""
    # YAML reads a bare NO as false.
    named = "NO" if config["distributed_type"] is False else str(config["distributed_type"])
    if named not in _ENGINES:
        hint = f"use a type that clusterrun launches: {', '.join(_ENGINES)}"
        if named == "MULTI_CPU":
            mpi = "accelerate starts MULTI_CPU only under MPI"
            hint = f"write MULTI_GPU and pass --device cpu: {mpi}"
        raise yaml_error(spec, f"distributed_type {named} cannot be launched", hint)
    if named == "DEEPSPEED":
        zero = _mapping(config.get("deepspeed_config"))
        devices = [zero.get(f"offload_{part}_device") for part in ("optimizer", "param")]
        return _zero_strategy(zero.get("zero_stage"), devices)
    if named == "FSDP":
        offloads = str(_mapping(config.get("fsdp_config")).get("fsdp_offload_params"))
        return Strategy.simplest("fsdp", 3, offloads=offloads.lower() == "true")
    return Strategy.simplest(_ENGINES[named], 0)


def _zero_strategy(stage: Any, devices: Sequence[Any]) -> Strategy:
    """Return the strategy nearest to a stage ("auto", None: 2) and the devices it offloads to."""
    if stage in (0, 1):
        return Strategy.simplest("deepspeed", 1)  # no strategy at stage 1 offloads; the file may
    offloads = any(device in ("cpu", "nvme") for device in devices)
    return Strategy.simplest("deepspeed", 3 if stage == 3 else 2, offloads=offloads)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _deepspeed_mapping(name: str, text: str) -> dict[str, Any]:
    """Read a DeepSpeed JSON; `name` is its file in messages. Raises ConfigError."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        message = "the DeepSpeed configuration is not valid JSON"
        where = f"{name}:{error.lineno}:{error.colno}"
        raise ConfigError(message, where=where, cause=error.msg) from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        message = "the DeepSpeed configuration has no zero_optimization section"
        hint = 'add "zero_optimization": {"stage": 0}, which does not change the training'
        raise ConfigError(message, where=name, hint=hint)
    return config


def is_for_deepspeed(text: str) -> bool:
    """Return whether a text is a DeepSpeed JSON with a `zero_optimization` section."""
    try:
        return bool(_deepspeed_mapping("", text))
    except (ConfigError, ValueError):  # ValueError: a number of thousands of digits
        return False


def _stated_precision(config: dict[str, Any]) -> Precision | None:
    """Return the precision of the YAML; None if it states none, or an unknown one."""
    stated = config.get("mixed_precision")
    if stated is False:  # a bare `no`, which accelerate rejects
        return Precision.NO
    if stated is None and config.get("fp16") is True:
        return Precision.FP16
    named = str(stated).lower()
    return next((precision for precision in ANY_PRECISION if precision.value == named), None)


def allowed_precisions(config: dict[str, Any]) -> frozenset[Precision]:
    """Return the precisions that a DeepSpeed JSON permits.

    >>> sorted(p.value for p in allowed_precisions({"bf16": {"enabled": True}}))
    ['bf16']
    >>> sorted(p.value for p in allowed_precisions({"fp16": {"enabled": "auto"},
    ...                                             "bf16": {"enabled": False}}))
    ['fp16', 'no']
    """
    keys = {"fp16": Precision.FP16, "bf16": Precision.BF16, "bfloat16": Precision.BF16}
    stated = {keys[x]: _mapping(config[x]).get("enabled", False) for x in keys if x in config}
    on = frozenset(precision for precision, enabled in stated.items() if enabled is True)
    if not stated:
        return ANY_PRECISION
    if on:  # an enabled one excludes the others
        return on
    if "auto" not in stated.values():
        return frozenset((Precision.NO,))
    return ANY_PRECISION - {precision for precision, enabled in stated.items() if enabled is False}


# Keys that the launcher's arguments replace, with the value that requests nothing else.
_REPLACED: Final = {
    "machine_rank": 0,
    "main_process_ip": None,
    "main_process_port": None,
    "rdzv_backend": "static",
    "gpu_ids": "all",
}


def take_world(spec: JobSpec, own: OwnFiles, facts: Facts) -> JobSpec:
    """Return the spec with the nodes, ranks and GPUs that only the YAML sets.

    Raises ConfigError for an impossible count and for a key that accelerate does not know.
    """
    _refuse_unknown_keys(spec, own, facts)
    machines, per_machine = _counts_in_yaml(spec, own)
    taken: dict[str, Any] = {"nodes": spec.nodes or machines}
    if per_machine and not (spec.nproc_per_node or spec.gpus_per_node):
        is_one = (spec.nodes or machines or 1) * per_machine == 1
        if own.accelerate["distributed_type"] == "MULTI_GPU" and is_one:
            hint = 'write num_processes: 2, or distributed_type: "NO" for a single rank'
            raise yaml_error(spec, "distributed_type is MULTI_GPU, but num_processes is 1", hint)
        taken["nproc_per_node"] = per_machine
    if facts.cluster.scheduler.is_this_machine and not _is_cpu(spec, own):
        # Here, the YAML's ids choose the GPUs.
        ids = own.accelerate.get("gpu_ids")
        taken["gpu_ids"] = spec.gpu_ids or (None if ids in (None, "all") else str(ids))
    elif per_machine and spec.gpus_per_node is None and not _is_cpu(spec, own):
        # Elsewhere, each rank needs a GPU from the scheduler.
        taken["gpus_per_node"] = spec.nproc_per_node or per_machine
    return dataclasses.replace(spec, **taken)


def _refuse_unknown_keys(spec: JobSpec, own: OwnFiles, facts: Facts) -> None:
    """Refuse what accelerate would refuse on the nodes; in its sections it accepts any key."""
    known = facts.accelerate_keys
    unknown = [key for key in map(str, own.accelerate) if key not in known]
    if unknown and known:  # not `known`: accelerate's keys could not be read
        near = {key: nearest(key, known) for key in unknown}
        hints = [f"write {name} for {key}" for key, name in near.items() if name]
        version = facts.interpreter.packages.get("accelerate", "")
        text = f"accelerate {version} has no key {' or '.join(map(repr, unknown))}"
        raise yaml_error(spec, text, "; ".join(hints) or "remove it, or upgrade accelerate")


def notes_on_file(asked: JobSpec, own: OwnFiles, facts: Facts, world: World) -> Iterator[str]:
    """Yield a note on the YAML's counts if others were requested, and one on its other settings.

    `asked` is the spec before `take_world`.
    """
    machines, per_machine = _counts_in_yaml(asked, own)
    others = [count(world.nodes, "node")] if machines not in (None, world.nodes) else []
    if per_machine not in (None, world.procs_per_node):
        others.append(f"{count(world.procs_per_node, 'rank')} per node")
    if others:
        there = f"num_machines {machines}"
        if per_machine is not None:
            total = own.accelerate["num_processes"]
            there = f"num_processes {total} on {count(machines or 1, 'machine')}"
        yield f"requested: {', '.join(others)}; {asked.accelerate_config} has {there}"
    # What the launcher passes anyway is not worth a note.
    harmless = {**_REPLACED, "main_process_port": asked.main_process_port}  # the value of each key
    if facts.cluster.scheduler.is_this_machine:
        del harmless["gpu_ids"]  # they choose among the GPUs of this machine
    values = {key: own.accelerate.get(key) for key in harmless}
    replaced = [f"{k} {value}" for k, value in values.items() if value not in (None, harmless[k])]
    if replaced:
        yield f"clusterrun replaces settings of {asked.accelerate_config}: {', '.join(replaced)}"


def _counts_in_yaml(spec: JobSpec, own: OwnFiles) -> tuple[int | None, int | None]:
    """Return the number of machines and the ranks of each; None if the file has none."""
    machines, total = (own.accelerate.get(key) for key in ("num_machines", "num_processes"))
    for key, value in (("num_machines", machines), ("num_processes", total)):
        if value is not None and (type(value) is not int or value < 1):  # True is also an int
            text = f"{key} must be a whole number above 0, not {value!r}"
            raise yaml_error(spec, text, f"write a number, as in {key}: 2, or leave it out")
    nodes = machines or spec.nodes or 1
    if total is not None and total % nodes:
        near = max(nodes, total - total % nodes)
        text = f"num_processes {total} can't be divided evenly among {count(nodes, 'machine')}"
        counts = "num_processes counts the ranks of all machines"
        raise yaml_error(spec, text, f"write {near} or {near + nodes}: {counts}")
    return machines, None if total is None else total // nodes


def _is_cpu(spec: JobSpec, own: OwnFiles) -> bool:
    return spec.device is Device.CPU or (spec.device is Device.AUTO and own.use_cpu)
