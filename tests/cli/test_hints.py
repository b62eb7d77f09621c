"""A hint that is followed leads on: the same error does not come back."""

from __future__ import annotations

import re
import shlex

from clusterrun.cli.main import VERBS
from clusterrun.config.fields import Kind
from clusterrun.config.keys import BY_NAME
from tests.cli.conftest import CommandLine
from tests.cli.test_spellings import WRONG
from tests.config.test_bad_values import BAD

FILLED = {"FILE": "own.yaml", "COUNT": "2", "N": "2", "ADDRESS": "me@here", "MASTER": "2"}
JOBS = """submit --cluster slurm --strategy fsdp train.py
submit --cluster slurm --device cpu --strategy fsdp-offload train.py
submit --cluster slurm -N 2 --strategy none train.py
submit --cluster slurm --accelerate-config own.yaml --strategy zero2 train.py
submit --cluster slurm --tensor-parallel 3 --gpus-per-node 4 train.py
submit --cluster slurm --mixed-precision fp16 --device cpu train.py
submit --cluster slurm --chain 2 --on-interrupt stop train.py
submit --cluster slurm --clusters a,b train.py
submit --cluster slurm --set slurm.node=2 train.py
submit --cluster slurm --hosts a,b train.py
submit --cluster slurm train.py --lr 1 --nodes 2 --dry-run
submit --cluster slurm trian.py
submit train.py
render --cluster local --partition gpu train.py --help"""
TYPED = [
    ["submit", f"{flag}={text}", "train.py"]
    for name, text, *_ in BAD
    for flag in BY_NAME[name].flags[:1]
    if flag.startswith("--") and BY_NAME[name].kind is not Kind.FLAG
]
COMMANDS = [shlex.split(line) for line in (*(line for line, _ in WRONG), *JOBS.splitlines())]


def without(words: list[str], at: int) -> list[str]:
    """Leave out an option and its value."""
    value = words[at + 1 : at + 2] if "=" not in words[at] and words[at].startswith("-") else []
    has_value = bool(value) and not value[0].startswith("-") and value[0] != "train.py"
    return [*words[:at], *words[at + 1 + has_value :]]


def followed(words: list[str], error: str, hint: str) -> list[str] | None:
    """Return the command line that a hint proposes; None if only a person can tell."""
    line = re.search(rf"clusterrun ((?:{'|'.join(VERBS)})\b.*?)(?=;|\)|'|\Z)", hint)
    if line and "$" not in hint:
        return shlex.split(line[1])
    tokens = re.findall(r"'([^']+)'|(?<= )(--[\w-]+)", error) or [("", "")]
    token = "".join(tokens[0])
    at = next((n for n, word in enumerate(words) if token and token in word), None)
    first = re.split(r", or |; |:? \(|, e\.g\.(?! -)", hint)[0]
    options = re.findall(r"(?<!\w)(--?[a-zA-Z][\w-]*)(?:[ =]([\w:.\[\]/@,-]*[\w\]]))?", first)
    options = [(name, value) for name, value in options if token != name]
    if options and not hint.startswith(("leave", "use '", "list", "run", "read")):
        rest = words if at is None else without(words, at)
        for name, _ in options:
            rest = without(rest, rest.index(name)) if name in rest else rest
        typed = [word for pair in options for word in pair if word not in ("", "or", "for", "is")]
        return [rest[0], *(FILLED.get(word, word) for word in typed), *rest[1:]]
    if at is None:
        return None
    if hint.startswith("leave it out") and "out for" not in hint:
        return without(words, at)
    used = re.match(r"(?:use|did you mean) '([^']+)'|write ([^ ]+?)(?:[;, ]|\Z)", hint)
    example = re.search(r"(?:e\.g\. |as Slurm does: )(\S+)", hint)
    if (used is None and example is None) or re.match(r"(?:use|write) (?:one|two) ", hint):
        return None
    new = (example[1] if example else "") or "".join(used.groups("") if used else ())
    return [*words[:at], words[at].replace(token, new), *words[at + 1 :]]


def test_a_hint_that_is_followed_leads_on(here: CommandLine) -> None:
    (here.path / "own.yaml").write_text("distributed_type: MULTI_GPU\n")
    left = []
    for words in COMMANDS + TYPED:
        error, *rest = here(*words).err.splitlines()[-2:]
        hint = "".join(rest).removeprefix("  hint: ")
        new = followed(words, error, hint)
        if new is None or new == words:
            left.append((words, hint))
            continue
        verb = "render" if new[0] == "submit" else new[0]  # it must start nothing
        assert error not in here(verb, *new[1:]).err, (words, hint, new)
    assert len(left) < len(COMMANDS + TYPED) / 5, left
