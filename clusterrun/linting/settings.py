"""The pitfalls of a job's setup lines, arguments and configuration files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from clusterrun.linting.rule import Found, Launch, rule
from clusterrun.linting.rules import ARGUMENTS, ONE_MACHINE, is_closed, is_conditional
from clusterrun.linting.source import Script, keyword, text_of

_RUNS: Final = (
    *("os.system", "subprocess.run", "subprocess.call", "subprocess.check_call"),
    *("subprocess.Popen", "subprocess.check_output"),
)
_LAUNCHERS = (
    r"(?:exec |(?:srun|mpirun|mpiexec) (?:-\S+ )*)?"
    r"(torchrun|accelerate launch|python\S* -m torch\.distributed\.\w+|deepspeed)\s.*\.py\b"
)
_OUTPUT = (
    r"(?i)--?(?:(?:model|checkpoint|ckpt)s?[_-])?(?:out|output|save)s?"
    r"(?:[_-](?:dir|path|folder|root))?"
)


# Setup lines


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


# Arguments


@rule(
    "saves-on-one-machine",
    "the next attempt, or another node, does not see it",
    "save into a directory that all nodes share",
)
def _saves_on_one_machine(script: Script, launch: Launch) -> Iterator[Found]:
    is_kept = re.search(_COPIES, script.text + " ".join(launch.args))
    if launch.nodes < 2 or launch.is_simulated or is_kept:
        return
    for name, value in options(launch.args):
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
    "starts-over",
    "a restart would train from the beginning again",
    "load the newest checkpoint at the start: see docs/checkpoints.md",
)
def _starts_over(script: Script, launch: Launch) -> Iterator[Found]:
    resumes = any("resume" in name for name in dict(options(launch.args)))
    if resumes or launch.max_restarts < 1 or re.search(_RESUMES, script.text):
        return
    for call in script.calls(".backward") if is_closed(script) else ():
        yield call, f"the script loads no checkpoint, and max_restarts is {launch.max_restarts}"
        return


_RESUMES = r"(?i)\bload\(|load_|resum|restor|checkpoint|ckpt|snapshot|clusterrun"


# Configuration files


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
    for call in script.calls(*ARGUMENTS):
        path = text_of(keyword(call, "deepspeed"))
        is_read = path.endswith(".json") and not is_conditional(script, call)
        is_certain = "chdir" not in script.text and script.text.count(path) == 1
        if is_read and is_certain and launch.is_missing(path):
            yield call, f"deepspeed names {path}, which does not exist"
