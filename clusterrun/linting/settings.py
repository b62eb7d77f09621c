"""The pitfalls of a job's settings: variables, setup lines, arguments and configuration files."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from clusterrun.config.resolve import TIMEOUT_NAMES
from clusterrun.linting.rule import Found, Launch, rule
from clusterrun.linting.rules import (
    ARGUMENTS,
    DDP,
    ONE_MACHINE,
    ignores_strategy,
    is_closed,
    is_conditional,
    unconditional_settings,
)
from clusterrun.linting.source import Script, constant, keyword, text_of

_RUNS: Final = (
    *("os.system", "subprocess.run", "subprocess.call", "subprocess.check_call"),
    *("subprocess.Popen", "subprocess.check_output"),
)
_LAUNCHERS = (
    r"(?:exec |(?:srun|mpirun|mpiexec) (?:-\S+ )*)?"
    r"(torchrun|accelerate launch|python\S* -m torch\.distributed\.\w+|deepspeed)\s.*\.py\b"
)
_PRINTS = r"(?:printenv|env|export|declare\s+-[px]+)$"
_TRACES = r"set\s+(?:-\w*x\w*|-o\s+xtrace)$"
_SECRETS = r"(?i)token|key|secret|passw|^\s*(?:source|\.)\s"
_EXPORTS = r"\s*(?:export|declare\s+-x)\s+(.*)"
_OUTPUT = (
    r"(?i)--?(?:(?:model|checkpoint|ckpt)s?[_-])?(?:out|output|save)s?"
    r"(?:[_-](?:dir|path|folder|root))?"
)


def exported(setup: tuple[str, ...]) -> dict[str, str]:
    """Return the literal variables that lines of bash export.

    >>> exported(("module load cuda", "export A=1 B='x y'", "export PATH=$HOME/bin:$PATH"))
    {'A': '1', 'B': 'x y'}
    """
    found = {}
    for line in setup:
        match = re.match(_EXPORTS, line)
        try:
            words = shlex.split(match[1], comments=True) if match else []
        except ValueError:
            continue
        pairs = (word.partition("=") for word in words)
        found.update({name: value.rstrip(";") for name, sign, value in pairs if sign})
    return {name: value for name, value in found.items() if not re.search("[$`]", value)}


def _variables(script: Script, launch: Launch) -> Iterator[tuple[str, str, Found]]:
    """Yield each variable that reaches the ranks, with its value, and where it is set."""
    lines = "\n".join(launch.setup)
    for name, text in launch.inherited.items():
        if name not in launch.env and name not in lines:
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
        if found := re.match(_LAUNCHERS, line.strip()):
            yield None, f"setup runs {found[1]}"
    for call in script.calls(*_RUNS):
        words = (text_of(node) for node in ast.walk(call.args[0])) if call.args else ()
        found = re.match(_LAUNCHERS, " ".join(filter(None, words)))
        if found and not is_conditional(script, call):
            yield call, f"the script runs {found[1]}"


@rule(
    "prints-secrets",
    "everybody who can read the log sees the tokens among the variables",
    "remove it",
)
def _prints(script: Script, launch: Launch) -> Iterator[Found]:
    for at, line in enumerate(launch.setup):
        has_secrets = any(re.search(_SECRETS, later) for later in launch.setup[at + 1 :])
        if re.match(_PRINTS, line.strip()) or (has_secrets and re.match(_TRACES, line.strip())):
            yield None, f"setup runs {line.strip()}"


@rule(
    "fixed-gpus",
    "the ranks of a node would share GPUs, or find none",
    "remove it: Slurm and the launcher choose the GPUs",
)
def _fixed_gpus(script: Script, launch: Launch) -> Iterator[Found]:
    for name, text, found in _variables(script, launch):
        is_chosen = name == "CUDA_VISIBLE_DEVICES" and text not in ("", "-1") and launch.has_gpus
        if is_chosen and text.count(",") + 1 < launch.ranks_per_node:
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
            if name in variables and name not in script.text:  # a script may read it
                yield None, f"{name} is set {where}"
        yield from ((node, f"{name} is set") for key, _, node in script.settings() if key == name)


SLOWS: Final = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "the CPU waits for each kernel",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "each collective is checked by a second one",
    ("TORCH_NCCL_NAN_CHECK", "1"): "each collective's input is searched for NaN",
    ("ACCELERATE_DEBUG_MODE", "1"): "the shapes of each collective are compared first",
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"): "each tensor is allocated by the driver",
}


@rule(
    "slow-setting",
    "this is for debugging, and slows every step",
    "remove it for a long run",
)
def _slow(script: Script, launch: Launch) -> Iterator[Found]:
    for name, text, (node, what) in _variables(script, launch):
        is_read = launch.has_gpus or not re.search("CUDA|NCCL", name)
        if is_read and (why := SLOWS.get((name, text))):
            yield node, f"{what}: {why}"
    for call in script.calls(
        "torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly"
    ):
        is_on = constant(call.args[0] if call.args else keyword(call, "mode")) is True
        if is_on and not is_conditional(script, call):
            yield call, "autograd searches each gradient for NaN"


@rule(
    "no-watchdog",
    "torch's watchdog would not end ranks whose peers are lost",
    "remove it: by default, torch ends them at the timeout",
)
def _no_watchdog(script: Script, launch: Launch) -> Iterator[Found]:
    found = [each for each in _variables(script, launch) if launch.has_gpus]
    raises = any(name.endswith("NCCL_BLOCKING_WAIT") and text == "1" for name, text, _ in found)
    for name, text, at in found:
        if name.endswith("NCCL_ASYNC_ERROR_HANDLING") and text == "0" and not raises:
            yield at


@rule(
    "loopback-interface",
    "a node reaches only itself over the loopback interface: the ranks of several nodes never meet",
    "remove it, or name the nodes' interface with --network-interface",
)
def _loopback(script: Script, launch: Launch) -> Iterator[Found]:
    is_several = launch.nodes > 1 and not launch.is_simulated
    for name, text, found in _variables(script, launch) if is_several else ():
        is_left = (
            name == "NCCL_SOCKET_IFNAME" and text[:1] == "^" and not re.search(r"\blo\b", text)
        )
        is_named = re.fullmatch("(?:NCCL|GLOO|TP)_SOCKET_IFNAME", name) and text in ("lo", "=lo")
        if is_named or is_left:  # "^docker0" leaves lo, which is the first
            yield found


# Arguments


@rule(
    "saves-on-one-machine",
    "the next attempt, or another node, does not see it",
    "save into a directory that all nodes share",
)
def _saves_on_one_machine(script: Script, launch: Launch) -> Iterator[Found]:
    is_kept = re.search(_COPIES, script.text + " ".join(launch.args or ()))
    if launch.nodes < 2 or launch.is_simulated or is_kept:
        return
    for name, value in options(launch.args or ()):
        if re.fullmatch(_OUTPUT, name) and re.match(ONE_MACHINE, value):
            yield None, f"{name} {value} is on the node's own disk"
    for call in script.calls("torch.save", ".save_pretrained", ".save_state", ".save_checkpoint"):
        for path in map(text_of, call.args[:2]):
            if re.match(ONE_MACHINE, path) and script.text.count(path) == 1:  # it is not used again
                yield call, f"{path} is on the node's own disk"
    for call in script.calls(".TrainingArguments", ".SFTConfig", ".Trainer", ".ModelCheckpoint"):
        for name in ("output_dir", "default_root_dir", "dirpath"):
            if re.match(ONE_MACHINE, place := text_of(keyword(call, name))):
                yield call, f"{place} is on the node's own disk"


_COPIES = (
    r"(?i)shutil|upload|push_to_hub|fsspec|boto|rsync|gsutil|s3|log_artifact|\bcp\b"
    r"|save_strategy\W+no\b"
)


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
    "the GPU has no bf16 units: bf16 is emulated, slowly, or refused",
    "use fp16; a training loop of your own also needs torch.amp.GradScaler",
)
def _emulated_bf16(script: Script, launch: Launch) -> Iterator[Found]:
    for node, what in _uses_of_bf16(script, launch) if launch.gpu_without_bf16 else ():
        yield node, f"{what}, and the job's GPU is a {launch.gpu_without_bf16}"


def _uses_of_bf16(script: Script, launch: Launch) -> Iterator[Found]:
    for name, value in options(launch.args or ()):
        is_on = value.lower() in ("", "true", "1") and re.fullmatch("--bf16(?:_full_eval)?", name)
        if is_on or (re.search("(?i)type|precision|amp", name) and value in ("bf16", "bfloat16")):
            yield None, f"the arguments contain {name} {value}".rstrip()
    if launch.accelerate.get("mixed_precision") == "bf16":
        yield None, "mixed_precision is bf16 in your accelerate YAML"
    if section(launch.deepspeed, "bf16").get("enabled") is True:
        yield None, "bf16 is enabled in your DeepSpeed JSON"
    yield from _bf16_in_script(script)


def _bf16_in_script(script: Script) -> Iterator[Found]:
    for call in script.nodes if "bf16_supported" not in script.text else ():
        if not isinstance(call, ast.Call) or is_conditional(script, call):
            continue
        given = (*call.args, *(word.value for word in call.keywords))
        if any(script.name(each) == "torch.bfloat16" for each in given):
            yield call, "torch.bfloat16 is used"
            return
        for name, values in _BF16.items():
            if (value := constant(keyword(call, name))) in values:
                yield call, f"{name}={value!r} is passed"
                return


_BF16: Final = {
    "bf16": (True,),
    "mixed_precision": ("bf16",),
    "precision": ("bf16-mixed", "bf16-true", "bf16"),
}


@rule(
    "starts-over",
    "a restart would train from the beginning again",
    "load the newest checkpoint at the start: see docs/checkpoints.md",
)
def _starts_over(script: Script, launch: Launch) -> Iterator[Found]:
    resumes = any("resume" in name for name in dict(options(launch.args or ())))
    if resumes or launch.max_restarts < 1 or re.search(_RESUMES, script.text):
        return
    for call in script.calls(".backward") if is_closed(script) else ():
        yield call, f"the script loads no checkpoint, and max_restarts is {launch.max_restarts}"
        return


_RESUMES = r"(?i)\bload\(|load_|resum|restor|checkpoint|ckpt|snapshot|clusterrun"


# Configuration files


def section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration; {} if it has none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


@rule(
    "missing-file",
    "the ranks would not find it, after the job has waited in the queue",
    "correct the path, which starts from the directory of the submission",
)
def _missing_file(script: Script, launch: Launch) -> Iterator[Found]:
    for path in launch.missing:
        if path.rpartition("/")[2] in "\n".join((script.text, *launch.setup)):
            continue  # it may be written first
        yield None, f"your accelerate YAML names {path}, which does not exist"
    for call, path in _own_deepspeed(script):
        is_certain = "chdir" not in script.text and script.text.count(path) == 1
        if is_certain and launch.read(path) is None:
            yield call, f"deepspeed names {path}, which does not exist"


def _own_deepspeed(script: Script) -> Iterator[tuple[ast.Call, str]]:
    """Yield the Trainer's arguments that name a DeepSpeed JSON, and its path."""
    for call in script.calls(*ARGUMENTS):
        path = text_of(keyword(call, "deepspeed"))
        if path.endswith(".json") and not is_conditional(script, call):
            yield call, path


@rule(
    "strategy-without-accelerate",
    "the strategy reaches a script through accelerate, which this one does not use: nothing is "
    "sharded",
    "use accelerator.prepare() instead of DistributedDataParallel, or --strategy ddp",
)
def _strategy_unused(script: Script, launch: Launch) -> Iterator[Found]:
    if not launch.is_sharded or not ignores_strategy(script):
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
    for call, path in _own_deepspeed(script):
        given = {f"--{each.arg}": str(constant(each.value)) for each in call.keywords}
        for what in _differences(given, launch.read(path) or {}):
            yield call, what.removeprefix("--")
    if "Train" in script.text and re.search("HfArgumentParser|TrlParser", script.text):
        for what in _differences(dict(options(launch.args or ())), launch.deepspeed):
            yield None, what


def _differences(given: Mapping[str, str], deepspeed: Mapping[str, Any]) -> Iterator[str]:
    for name, keys in _TRAINER.items():
        config: Any = deepspeed
        for key in keys:
            config = config.get(key) if isinstance(config, dict) else None
        value = _number(given.get(name, ""))
        if value is not None and type(config) in (int, float) and value != config:
            yield f"{name} is {given[name]}, the DeepSpeed JSON has {'.'.join(keys)} {config}"
    for name, other in (("fp16", "bf16"), ("bf16", "fp16")):
        if (
            given.get(f"--{name}") in ("", "true", "True")
            and section(deepspeed, other).get("enabled") is True
        ):
            yield f"{name} is on, the DeepSpeed JSON enables {other}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
