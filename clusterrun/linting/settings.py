"""The pitfalls of a job's settings: variables, setup lines, arguments and configuration files."""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from clusterrun.config.resolve import TIMEOUT_NAMES
from clusterrun.linting.rule import Found, Launch, rule
from clusterrun.linting.rules import (
    DDP,
    ONE_MACHINE,
    is_closed,
    is_conditional,
    unconditional_settings,
)
from clusterrun.linting.source import Script, constant, keyword, text_of

_RUNS: Final = (
    *("os.system", "subprocess.run", "subprocess.call", "subprocess.check_call"),
    *("subprocess.Popen", "subprocess.check_output"),
)
_LAUNCHERS = re.compile(
    r"\b(?:torchrun|accelerate launch|torch\.distributed\.(?:run|launch)|deepspeed .*\.py)\b"
)
_STEPS = re.compile(r"\b(?:srun|mpirun|mpiexec)\b")
_PRINTS = re.compile(r"(?:set\s+-\w*x\w*|set\s+-o\s+xtrace|printenv|env|export|declare\s+-[px]+)$")
_EXPORTS = re.compile(r"\s*(?:export|declare\s+-x)\s+(.*)")
_TRAINERS: Final = (".TrainingArguments", ".SFTConfig", ".Trainer", ".ModelCheckpoint")
_OUTPUT = re.compile(
    r"(?i)--?(?:[a-z]+[_-])*(?:out|output|save|checkpoint|ckpt)s?(?:[_-](?:dir|path|folder|root))?"
)


def exported(setup: tuple[str, ...]) -> dict[str, str]:
    """Return the literal variables that lines of bash export.

    >>> exported(("module load cuda", "export A=1 B='x y'", "export PATH=$HOME/bin:$PATH"))
    {'A': '1', 'B': 'x y'}
    """
    found = {}
    for line in setup:
        match = _EXPORTS.match(line)
        try:
            words = shlex.split(match[1], comments=True) if match else []
        except ValueError:
            continue
        pairs = (word.partition("=") for word in words)
        found.update({name: value.rstrip(";") for name, sign, value in pairs if sign})
    return {name: value for name, value in found.items() if not re.search("[$`]", value)}


def _variables(script: Script, launch: Launch) -> Iterator[tuple[str, str, Found]]:
    """Yield each variable that reaches the ranks, with its value, and where it is set."""
    for name, text in launch.inherited.items():
        if name not in launch.env and not name.endswith("_DISABLE"):  # a site's module may set it
            yield name, text, (None, f"{name}={text} in your shell")
    for name, text in {**exported(launch.setup), **launch.env}.items():
        yield name, text, (None, f"{name}={text}")
    for name, value, node in unconditional_settings(script):
        if constant(value) is not None:
            yield name, str(constant(value)), (node, f"{name}={constant(value)}")


# What starts, and with which variables


@rule(
    "starts-a-launcher",
    "clusterrun already starts the ranks: each would start the launcher once more",
    "submit the script that trains",
)
def _starts_launcher(script: Script, launch: Launch) -> Iterator[Found]:
    for line in launch.setup:
        if found := _LAUNCHERS.search(line) or _STEPS.match(line.strip()):
            yield None, f"setup runs {found[0]}"
    yield from _commands(script, _LAUNCHERS)


@rule(
    "requeues-itself",
    "clusterrun requeues the job itself, without bad nodes; a requeue by the script bypasses that",
    "remove it: see docs/recovery.md",
)
def _requeues(script: Script, launch: Launch) -> Iterator[Found]:
    yield from _commands(script, re.compile(r"\bscontrol requeue\b"))


def _commands(script: Script, wanted: re.Pattern[str]) -> Iterator[Found]:
    for call in script.calls(*_RUNS):
        words = (text_of(node) for node in ast.walk(call.args[0])) if call.args else ()
        if found := wanted.search(" ".join(filter(None, words))):
            yield call, f"the script runs {found[0]}"


@rule(
    "prints-secrets",
    "it prints variables into the log, tokens included",
    "remove it",
)
def _prints(script: Script, launch: Launch) -> Iterator[Found]:
    for line in launch.setup:
        if _PRINTS.match(line.strip()):
            yield None, f"setup runs {line.strip()}"


@rule(
    "fixed-gpus",
    "all ranks of a node would use the same GPUs, and Slurm's choice is lost",
    "remove it: Slurm and the launcher choose the GPUs",
)
def _fixed_gpus(script: Script, launch: Launch) -> Iterator[Found]:
    for name, text, found in _variables(script, launch):
        if name == "CUDA_VISIBLE_DEVICES" and text and launch.has_gpus:
            yield found


@rule(
    "nccl-timeout",
    "neither torch nor NCCL reads it",
    "pass --timeout, or timeout= to init_process_group()",
)
def _nccl_timeout(script: Script, launch: Launch) -> Iterator[Found]:
    for name in TIMEOUT_NAMES:
        for variables, where in (
            (launch.inherited, "in your shell"),
            ({**exported(launch.setup), **launch.env}, "for the job"),
        ):
            if name in variables:
                yield None, f"{name} is set {where}"
        yield from ((node, f"{name} is set") for key, _, node in script.settings() if key == name)


SLOWS: Final = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "the CPU waits for each kernel",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "each collective is checked by a second one",
    ("TORCH_NCCL_NAN_CHECK", "1"): "each collective's input is searched for NaN",
    ("ACCELERATE_DEBUG_MODE", "1"): "the shapes of each collective are compared first",
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"): "each tensor is allocated by the driver",
    ("NCCL_DEBUG", "TRACE"): "each rank prints every call of NCCL",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node talk through the host",
    ("NCCL_SHM_DISABLE", "1"): "ranks of a node talk through the network",
    ("NCCL_IB_DISABLE", "1"): "nodes talk over TCP",
}


@rule(
    "slow-setting",
    "this is for debugging, and slows every step",
    "remove it for a long run",
)
def _slow(script: Script, launch: Launch) -> Iterator[Found]:
    for name, text, (node, what) in _variables(script, launch):
        if why := SLOWS.get((name, text)):
            yield node, f"{what}: {why}"
    for call in script.calls(
        "torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly"
    ):
        is_on = constant(call.args[0] if call.args else keyword(call, "mode")) is True
        if is_on and not is_conditional(script, call):
            yield call, "autograd searches each gradient for NaN"


_WATCHDOGS: Final = {
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
    ("NCCL_ASYNC_ERROR_HANDLING", "0"),
    ("TORCH_NCCL_BLOCKING_WAIT", "1"),
    ("NCCL_BLOCKING_WAIT", "1"),
    ("TORCH_NCCL_ENABLE_MONITORING", "0"),
}


@rule(
    "no-watchdog",
    "without torch's watchdog, ranks whose peers are lost wait longer, or forever",
    "remove it: by default, torch ends these ranks",
)
def _no_watchdog(script: Script, launch: Launch) -> Iterator[Found]:
    for name, text, found in _variables(script, launch):
        if (name, text) in _WATCHDOGS:
            yield found


@rule(
    "loopback-interface",
    "a node reaches only itself over the loopback interface: the ranks of several nodes never meet",
    "remove it, or name the nodes' interface with --network-interface",
)
def _loopback(script: Script, launch: Launch) -> Iterator[Found]:
    for name, text, found in _variables(script, launch) if launch.nodes > 1 else ():
        names = text.lstrip("^=").split(",")
        allows = "lo" not in names if text.startswith("^") else names[0] == "lo"
        if re.fullmatch("(?:NCCL|GLOO|TP)_SOCKET_IFNAME", name) and allows:
            yield found


# Arguments


@rule(
    "saves-on-one-machine",
    "the directory is on the node's own disk: the next attempt, or another node, does not see it",
    "save into a directory that all nodes share",
)
def _saves_on_one_machine(script: Script, launch: Launch) -> Iterator[Found]:
    if launch.nodes < 2 or launch.is_simulated:
        return
    for name, value in options(launch.args or ()):
        if _OUTPUT.fullmatch(name) and ONE_MACHINE.match(value):
            yield None, f"{name} {value} is on the node's own disk"
    for call in script.calls("torch.save", ".save_pretrained", ".save_state", ".save_checkpoint"):
        for given in call.args[:2]:
            if ONE_MACHINE.match(text_of(given)):
                yield call, f"{text_of(given)} is on the node's own disk"
    for call in script.calls(*_TRAINERS):
        for name in ("output_dir", "default_root_dir", "dirpath"):
            if ONE_MACHINE.match(place := text_of(keyword(call, name))):
                yield call, f"{place} is on the node's own disk"


def options(args: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value; "" without one.

    >>> list(options(("train", "--lr", "1e-3", "--fp16", "--out=/o")))
    [('--lr', '1e-3'), ('--fp16', ''), ('--out', '/o')]
    """
    for at, word in enumerate(args):
        if not re.match("--?[A-Za-z]", word):
            continue
        name, sign, value = word.partition("=")
        follows = args[at + 1] if at + 1 < len(args) else ""
        yield name, value if sign else "" if re.match("--?[A-Za-z]", follows) else follows


@rule(
    "emulated-bf16",
    "this GPU has no bf16 units: bf16 is emulated, slowly, or refused",
    "use fp16 with a gradient scaler, or --mixed-precision auto",
)
def _emulated_bf16(script: Script, launch: Launch) -> Iterator[Found]:
    if not launch.lacks_bf16:
        return
    for name, value in options(launch.args or ()):
        is_on = value.lower() in ("", "true", "1") and re.fullmatch("--bf16(?:_full_eval)?", name)
        if is_on or value in ("bf16", "bfloat16"):
            yield None, f"the arguments contain {name} {value}".rstrip()
    if launch.accelerate.get("mixed_precision") == "bf16":
        yield None, "mixed_precision is bf16 in your accelerate YAML"
    if section(launch.deepspeed, "bf16").get("enabled") is True:
        yield None, "bf16 is enabled in your DeepSpeed JSON"
    yield from _bf16_in_script(script)


def _bf16_in_script(script: Script) -> Iterator[Found]:
    for node in script.nodes:
        if isinstance(node, ast.Attribute) and script.name(node) == "torch.bfloat16":
            if not is_conditional(script, node):
                yield node, "torch.bfloat16 is used"
                return
        elif isinstance(node, ast.keyword) and node.arg == "bf16" and constant(node.value) is True:
            yield node.value, "bf16=True is passed"
            return


@rule(
    "other-precision",
    "the precision in the script wins over --mixed-precision",
    "drop one of them",
)
def _other_precision(script: Script, launch: Launch) -> Iterator[Found]:
    for call in script.calls("accelerate.Accelerator"):
        value = text_of(keyword(call, "mixed_precision"))
        if launch.mixed_precision and value and value != launch.mixed_precision:
            yield call, f"mixed_precision is {value}, but the launch has {launch.mixed_precision}"


@rule(
    "starts-over",
    "a restart would train from the beginning again",
    "load the newest checkpoint at the start: see docs/checkpoints.md",
)
def _starts_over(script: Script, launch: Launch) -> Iterator[Found]:
    reads_it = "get_last_checkpoint" in script.text and "overwrite_output_dir" in script.text
    if reads_it and "--overwrite_output_dir" in dict(options(launch.args or ())):
        yield None, "the arguments contain --overwrite_output_dir"
    if launch.max_restarts < 1 or _RESUMES.search(script.text):
        return
    trainers = script.calls("transformers.Trainer", "transformers.Seq2SeqTrainer")
    loops = script.calls(".backward") if is_closed(script) else ()
    for call in (*trainers, *loops):
        yield call, f"the script loads no checkpoint, and max_restarts is {launch.max_restarts}"
        return


_RESUMES = re.compile(r"(?i)\bload\(|load_|resum|restor|checkpoint|ckpt|snapshot|clusterrun")


# Configuration files


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration; {} if it has none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


@rule(
    "missing-file",
    "accelerate would not find it on the nodes, after the job has waited in the queue",
    "correct the path, which starts from the directory of the submission",
)
def _missing_file(script: Script, launch: Launch) -> Iterator[Found]:
    for path in launch.missing:
        yield None, f"your accelerate YAML names {path}, which does not exist"


@rule(
    "unknown-key",
    "accelerate refuses a YAML with a key that it does not know",
    "correct the key, or move it into its section",
)
def _unknown_key(script: Script, launch: Launch) -> Iterator[Found]:
    for key in map(str, launch.accelerate):
        if key in ACCELERATE_KEYS:
            continue
        near = difflib.get_close_matches(key, ACCELERATE_KEYS, n=1, cutoff=0.85)
        is_of_fsdp = key.startswith("fsdp_")
        if is_of_fsdp or key in _OF_DEEPSPEED:
            where = "fsdp_config" if is_of_fsdp else "deepspeed_config"
            yield None, f"your accelerate YAML has {key} outside of {where}"
        elif near:
            yield None, f"your accelerate YAML has {key}, probably {near[0]}"


ACCELERATE_KEYS: Final = frozenset(  # the last line: of older versions
    (
        *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug"),
        *("num_processes", "machine_rank", "num_machines", "gpu_ids", "main_process_ip"),
        *("main_process_port", "rdzv_backend", "same_network", "main_training_function"),
        *("enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config"),
        *("parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16"),
        *("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands"),
        *("tpu_vm", "tpu_env", "dynamo_config"),
        *("fp16", "dynamo_backend", "ipex_config", "xpu_config", "main_process_script"),
    )
)
_OF_DEEPSPEED: Final = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_init_flag"),
    *("zero3_save_16bit_model", "offload_optimizer_device", "offload_param_device"),
    *("deepspeed_config_file", "deepspeed_multinode_launcher"),
)


@rule(
    "ignored-section",
    "accelerate reads a section only if distributed_type is its own",
    "remove the section, or change distributed_type",
)
def _ignored_section(script: Script, launch: Launch) -> Iterator[Found]:
    kind = launch.accelerate.get("distributed_type") or "NO"
    for name, wanted in (("fsdp_config", "FSDP"), ("deepspeed_config", "DEEPSPEED")):
        if launch.accelerate and section(launch.accelerate, name) and kind != wanted:
            yield None, f"your accelerate YAML has {name}, but distributed_type {kind}"


@rule(
    "strategy-without-accelerate",
    "the strategy reaches a script through accelerate, which this one does not use: nothing is "
    "sharded",
    "use accelerator.prepare() instead of DistributedDataParallel, or --strategy ddp",
)
def _strategy_unused(script: Script, launch: Launch) -> Iterator[Found]:
    if not launch.is_sharded or not is_closed(script):
        return
    if re.search("(?i)fully_?shard|accelerate|deepspeed|Zero", script.text):
        return
    for call in script.calls(*DDP):
        yield call, f"the strategy is {launch.strategy}, the model is wrapped in plain DDP"
        return


_TRAINER: Final = {  # what HfTrainerDeepSpeedConfig compares
    "--per_device_train_batch_size": ("train_micro_batch_size_per_gpu",),
    "--gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "--max_grad_norm": ("gradient_clipping",),
    "--learning_rate": ("optimizer", "params", "lr"),
    "--weight_decay": ("optimizer", "params", "weight_decay"),
}


@rule(
    "deepspeed-differs",
    "the Trainer refuses a DeepSpeed configuration that differs from its arguments",
    'write "auto" into the DeepSpeed JSON',
)
def _deepspeed_differs(script: Script, launch: Launch) -> Iterator[Found]:
    if not re.search("HfArgumentParser|TrlParser", script.text):
        return
    given = dict(options(launch.args or ()))
    for name, keys in _TRAINER.items():
        config: Any = launch.deepspeed
        for key in keys:
            config = config.get(key) if isinstance(config, dict) else None
        value = _number(given.get(name, ""))
        if value is not None and type(config) in (int, float) and value != config:
            yield None, f"{name} is {given[name]}, the DeepSpeed JSON has {'.'.join(keys)} {config}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
