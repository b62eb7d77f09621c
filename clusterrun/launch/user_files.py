"""Read the user's own accelerate YAML and DeepSpeed JSON, without changing them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from clusterrun.config.choices import Strategy
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ConfigError, UsageError
from clusterrun.launch.facts import Facts
from clusterrun.launch.plan import Precision
from clusterrun.launch.script_args import named_json

ANY_PRECISION = frozenset((Precision.NO, Precision.FP16, Precision.BF16))

# accelerate refuses these beside a DeepSpeed JSON (DeepSpeedPlugin._deepspeed_config_checks).
_JSON_SAYS_IT = frozenset(
    (
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
        "zero3_save_16bit_model",
    )
)

_ENGINES = {"NO": "none", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}


class OwnFiles(NamedTuple):
    """The user's files: their texts with Unix line endings, and the settings in them.

    `accelerate` is the YAML's mapping; `deepspeed_name` is the JSON's name as given. `stated` is
    the YAML's precision, None if it has none or an unknown one; `allowed` are the precisions that
    the JSON permits.
    """

    accelerate_text: str = ""
    deepspeed_text: str = ""
    deepspeed_name: str = ""
    strategy: Strategy | None = None
    use_cpu: bool = False
    stated: Precision | None = None
    allowed: frozenset[Precision] = ANY_PRECISION
    accelerate: Mapping[str, Any] = MappingProxyType({})
    notes: tuple[str, ...] = ()


def read_own_files(spec: JobSpec, facts: Facts) -> OwnFiles:
    """Read both files and compare them with each other and with `--strategy`.

    Raises ConfigError for a file that cannot be used, UsageError if two of them disagree.
    """
    config = _accelerate_mapping(spec, facts) if spec.accelerate_config else {}
    name, text = _deepspeed_file(spec, facts)
    zero = _deepspeed_mapping(name, text) if name else {}
    strategy = _strategy_of_yaml(spec, config) if config else None
    if zero:
        _refuse_two_voices(spec, name, config, strategy)
        strategy = _zero_strategy(zero["zero_optimization"])
    _refuse_other_family(spec, name, strategy)
    return OwnFiles(
        accelerate_text=_unix_text(facts.accelerate_config_text) if config else "",
        deepspeed_text=_unix_text(text) if zero else "",
        deepspeed_name=name,
        notes=_adopted(spec, facts, name, strategy),
        strategy=strategy,
        use_cpu=config.get("use_cpu") is True,
        stated=_stated_precision(config),
        allowed=allowed_precisions(zero),
        accelerate=config,
    )


def _deepspeed_file(spec: JobSpec, facts: Facts) -> tuple[str, str]:
    """Return the DeepSpeed JSON's name and text: that of the launch, else that of the script."""
    named, adopted = spec.deepspeed_config or "", facts.script_deepspeed_text
    if not adopted:
        return named, facts.deepspeed_config_text
    own = named_json(spec.args) or ""
    if named and json.loads(adopted) != _deepspeed_mapping(named, facts.deepspeed_config_text):
        raise UsageError(
            f"two DeepSpeed configurations: {named} (launch) and {own} (script's arguments)",
            hint="drop --deepspeed-config to use the script's own file",
        )
    return named or own, adopted


def _adopted(spec: JobSpec, facts: Facts, name: str, strategy: Strategy | None) -> tuple[str, ...]:
    own = named_json(spec.args)
    if spec.deepspeed_config or own is None:
        return ()
    if not facts.script_deepspeed_text or strategy is None:
        need = "it is not plain JSON with a zero_optimization section, or is not on this machine"
        return (f"{own}, from the script's arguments, does not set the strategy: {need}",)
    return (f"{name}, from the script's arguments, sets the strategy to {strategy.value}",)


def _unix_text(text: str) -> str:
    # sbatch refuses a script with DOS line endings, and the batch script carries this text.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.endswith("\n") else text + "\n"


def _accelerate_mapping(spec: JobSpec, facts: Facts) -> dict[str, Any]:
    import yaml

    from clusterrun.shared.bounded_yaml import BoundedLoader

    where = spec.accelerate_config
    try:
        config = yaml.load(facts.accelerate_config_text, Loader=BoundedLoader)
    except yaml.YAMLError as error:
        raise ConfigError(
            "the accelerate configuration is not YAML", where=where, cause=_one_line(error)
        ) from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ConfigError(
            "the accelerate configuration has no distributed_type",
            where=where,
            hint="write a complete file with 'accelerate config', or pass --strategy instead",
        )
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment {config['compute_environment']!r} cannot run here",
            where=where,
            hint="write compute_environment: LOCAL_MACHINE",
        )
    for key in ("fsdp_config", "deepspeed_config"):
        if not isinstance(config.get(key) or {}, dict):
            raise ConfigError(
                f"{key} must be a section of settings, not {config[key]!r}", where=where
            )
    return config


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _strategy_of_yaml(spec: JobSpec, config: dict[str, Any]) -> Strategy:
    # YAML reads a bare NO as false.
    named = "NO" if config["distributed_type"] is False else str(config["distributed_type"])
    if named == "MULTI_CPU":
        hint = "write MULTI_GPU and pass --device cpu: accelerate starts MULTI_CPU only under MPI"
    else:
        hint = f"use a type that clusterrun launches: {', '.join(_ENGINES)}"
    if named not in _ENGINES:
        raise ConfigError(
            f"distributed_type {named} cannot be launched", where=spec.accelerate_config, hint=hint
        )
    if named == "DEEPSPEED":
        return _zero_of_yaml(config.get("deepspeed_config"))
    offloads = str((config.get("fsdp_config") or {}).get("fsdp_offload_params")).lower() == "true"
    is_fsdp = named == "FSDP"
    return Strategy.simplest(_ENGINES[named], 3 * is_fsdp, offloads=is_fsdp and offloads)


def _zero_of_yaml(config: Any) -> Strategy:
    config = config if isinstance(config, dict) else {}
    return _zero_strategy(
        {
            "stage": config.get("zero_stage"),
            "offload_optimizer": {"device": config.get("offload_optimizer_device")},
            "offload_param": {"device": config.get("offload_param_device")},
        }
    )


def _zero_strategy(zero: dict[str, Any]) -> Strategy:
    """Return the strategy nearest to a `zero_optimization` section; "auto" is stage 2."""
    stage = zero.get("stage")
    offloads = any(
        _mapping(zero.get(part)).get("device") in ("cpu", "nvme")
        for part in ("offload_optimizer", "offload_param")
    )
    if stage in (0, 1):
        return Strategy.simplest("deepspeed", 1)
    return Strategy.simplest("deepspeed", 3 if stage == 3 else 2, offloads=offloads)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _deepspeed_mapping(name: str, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            "the DeepSpeed configuration is not JSON",
            where=f"{name}:{error.lineno}:{error.colno}",
            cause=error.msg,
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise ConfigError(
            "the DeepSpeed configuration has no zero_optimization section",
            where=name,
            hint='add "zero_optimization": {"stage": 0}, which changes nothing in the training',
        )
    return config


def _refuse_two_voices(
    spec: JobSpec, name: str, config: dict[str, Any], strategy: Strategy | None
) -> None:
    if not config:
        return
    if strategy is None or not strategy.is_deepspeed:
        raise UsageError(
            f"{name} is for DeepSpeed, but {spec.accelerate_config} "
            f"has distributed_type {config['distributed_type']}",
            hint="write distributed_type: DEEPSPEED there, or drop one of the two files",
        )
    both = sorted(_JSON_SAYS_IT & _mapping(config.get("deepspeed_config")).keys())
    if both:
        raise UsageError(
            f"{spec.accelerate_config} has {', '.join(both)}: "
            "accelerate refuses that with a DeepSpeed JSON",
            hint=f"move it to {name}",
        )


def _refuse_other_family(spec: JobSpec, name: str, strategy: Strategy | None) -> None:
    # DDP may be the default, not a choice.
    if strategy is None or spec.strategy is Strategy.DDP:
        return
    if (strategy.engine, strategy.stage) == (spec.strategy.engine, spec.strategy.stage):
        return
    given = name or spec.accelerate_config
    raise UsageError(
        f"--strategy {spec.strategy.value}, but {given} means {strategy.value}",
        hint="drop --strategy: your own file decides",
    )


def _stated_precision(config: dict[str, Any]) -> Precision | None:
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
    stated = {
        precision: _mapping(config[key]).get("enabled", False)
        for key, precision in (
            ("fp16", Precision.FP16),
            ("bf16", Precision.BF16),
            ("bfloat16", Precision.BF16),
        )
        if key in config
    }
    on = frozenset(precision for precision, enabled in stated.items() if enabled is True)
    if on or not stated:
        return on or ANY_PRECISION
    if "auto" not in stated.values():
        return frozenset((Precision.NO,))
    return ANY_PRECISION - {precision for precision, enabled in stated.items() if enabled is False}
