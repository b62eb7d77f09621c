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

FILLED = {"FILE": "own.yaml", "COUNT": "2", "ADDRESS": "me@here"}
TYPED = [(BY_NAME[name], text) for name, text, *_ in BAD if BY_NAME[name].kind is not Kind.FLAG]
COMMANDS = [shlex.split(line) for line, _ in WRONG] + [
    ["submit", f"{field.flags[0]}={text}", "train.py"]
    for field, text in TYPED
    if field.flags and field.flags[0].startswith("--")
]


def without(words: list[str], at: int) -> list[str]:
    """Leave out an option and its value."""
    value = words[at + 1 : at + 2] if "=" not in words[at] and words[at].startswith("-") else []
    has_value = bool(value) and not value[0].startswith("-") and value[0] != "train.py"
    return [*words[:at], *words[at + 1 + has_value :]]


def followed(words: list[str], error: str, hint: str) -> list[str] | None:
    """Return the command line that a hint proposes; None if only a person can tell."""
    if line := re.search(rf"clusterrun ((?:{'|'.join(VERBS)})\b[^$]*?)(?=;|\)|'|\Z)", hint):
        return shlex.split(line[1])
    token = "".join((re.findall(r"'([^']+)'|(?<= )(--[\w-]+)", error) or [("", "")])[0])
    at = next((n for n, word in enumerate(words) if token and token in word), None)
    first = re.split(r", or |; |:? \(|, e\.g\.(?! -)", hint)[0]
    options = re.findall(r"(?<!\w)(--?[a-zA-Z][\w-]*)(?:[ =]([\w:.\[\]/@,-]*[\w\]]))?", first)
    options = [pair for pair in options if pair[0] != token]
    if options and not hint.startswith(("leave", "use '", "list", "run", "read")):
        rest = words if at is None else without(words, at)
        for name in (name for name, _ in options if name in rest):
            rest = without(rest, rest.index(name))
        typed = [word for pair in options for word in pair if word not in ("", "or", "for", "is")]
        return [rest[0], *(FILLED.get(word, word) for word in typed), *rest[1:]]
    if at is None or hint.startswith("leave it out"):
        return None if at is None else without(words, at)
    used = re.match(r"(?:use|did you mean) '([^']+)'|write ([^ ]+?)(?:[;, ]|\Z)", hint)
    example = re.search(r"(?:e\.g\. |as Slurm does: )(\S+)", hint)
    new = example[1] if example else "".join(used.groups("")) if used else token
    return [*words[:at], words[at].replace(token, new), *words[at + 1 :]]


def test_a_hint_that_is_followed_leads_on(here: CommandLine) -> None:
    (here.path / "own.yaml").write_text("distributed_type: MULTI_GPU\n")
    left = []
    for words in COMMANDS:
        error, *rest = here(*words).err.splitlines()[-2:]
        new = followed(words, error, "".join(rest).removeprefix("  hint: "))
        if new is None or new == words:
            left.append((words, rest))
            continue
        verb = "render" if new[0] == "submit" else new[0]  # it must start nothing
        assert error not in here(verb, *new[1:]).err, (words, rest, new)
    assert len(left) < len(COMMANDS) / 5, left
