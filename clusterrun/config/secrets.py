"""Recognize secrets by their names and forms: they are passed by name and never stored.

The one table for what is refused in settings, warned of in arguments, and left out of what others
get. Every repeat is bounded: time grows with the length of a text, not faster.
"""

from __future__ import annotations

import fnmatch
import re
from binascii import a2b_base64
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise, zip_longest
from typing import Final

from clusterrun.shared.assets import read_json

REDACTED: Final = "[redacted]"
SHORTEST: Final = 12  # of all forms but those in addresses

_TABLE: Final = read_json("config/secrets.json")

_WORDS: Final = {kind: frozenset(words.split()) for kind, words in _TABLE["names"].items()}
_GLUED, _DIGITS = (tuple(_WORDS[kind]) for kind in ("glued to the end", "may be digits"))
_FOLDERS, _SETTINGS = (frozenset(_TABLE[kind].split()) for kind in ("directories", "settings"))
_WORD: Final = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"  # `dbPasswords2`: db, Passwords
_START: Final = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=\dm))"  # also after `\n` and a color
_CHANGE: Final = r"(?<=[a-z])[A-Z0-9]|(?<=[A-Z])[0-9]|(?<=[0-9])[A-Za-z]|(?<=[A-Z]{2})[a-z]"
# A name and the sign after it: of a variable, a key, an option, in any kind of quotes.
_NAME: Final = (
    r"(?<!\d{12}:)(?:\\[nrtbf]|(?:\x1b|\\u001b)\[[0-9;]{0,12}m)?(?P<dashes>--)?"
    r"(?=(?P<name>[A-Za-z_][\w.-]{0,60}))(?P=name)(?:\\{0,3}[\"'])?\]?"
    r"(?P<sign>\s{0,3}[=:]{1,2}>?\s{0,3}|(?(dashes)(?:,?\s{1,20}(?:- )?|,)(?![\"'\s]{0,2}-)|(?!)))"
)
_LETTER = r"[^\s\"',;&|\\]|\\(?![nrt\"'])"
_VALUE: Final = re.compile(
    r"[bru]{0,2}(\\{0,3}[\"'])(?P<quoted>[^\n]{1,4096}?)\1"
    rf"|\\{{0,3}}[\"']?(?P<word>(?:{_LETTER}|[,;&|](?![\s\"']|\Z|[\w.-]{{1,40}}[=:])){{1,4096}})"
)
_LINE: Final = re.compile(rf"[\"']?(?P<line>(?:{_LETTER}|[ ;&|]){{1,4096}})")
_HAS_LINE: Final = r"(?i)(?:authorization|cookie|password|passphrase)\Z"
_MOST_CHARACTERS: Final = {1: 256, 2: 65_536}  # of a value, by strength: a random one is shorter


@cache
def pattern(kind: str) -> re.Pattern[str]:
    """Return a pattern of the table; it is compiled at first use, since that takes milliseconds."""
    entry = _TABLE[kind]  # a list of regular expressions; for "files", a text of shell patterns
    patterns = map(fnmatch.translate, entry.split()) if kind == "files" else entry
    prefixes = "|".join(_TABLE["prefixes"].split())
    return re.compile("|".join(patterns).replace("{prefixes}", prefixes).replace("{start}", _START))


@lru_cache(4096)
def _strength(name: str) -> int:
    """Return 2 if any value of this name is a secret, 1 if one that looks random is, else 0.

    >>> [_strength(name) for name in ("HF_TOKEN", "wandbApiKey", "TOKEN_SALT", "MAX_TOKENS", "LR")]
    [2, 2, 1, 1, 0]
    """
    # Without the s of a plural: tokens, but not pass, status or redis.
    words = [re.sub("(?<=..[^isu])s$", "", word.lower()) for word in re.findall(_WORD, name)]
    addresses = ("url", "uri", "str", "string", "endpoint")  # DATABASE_URL may contain a password
    if _has_any("with an address", words) and words[-1] in addresses:
        return 2
    # Ignore what follows the name proper: TOKEN_VALUE, AWS_ACCESS_KEY_ID.
    while len(words) > 1 and (
        _has_any("skipped at the end", words[-1:]) or words[-2:] == ["key", "id"]
    ):
        words.pop()
    if not words or words[-1] in _WORDS["says something about it"] or name in ("PWD", "OLDPWD"):
        return 0
    if words[-1] == "key":
        is_certain = _has_any("before key", words[-2:-1])
    else:
        is_certain = _has_any("at the end", words[-1:]) or words[-1].endswith(_GLUED)
    if is_certain and not _has_any("of training", words):
        return 2
    if _has_any("anywhere", [*words, *map("_".join, pairwise(words))]):  # also two words: api_key
        return 2
    return int(_has_any("if it looks random", words))


def _has_any(kind: str, words: Sequence[str]) -> bool:
    return not _WORDS[kind].isdisjoint(words)


def is_secret(name: str, value: str) -> bool:
    """Return whether a value that is given to a name is a secret.

    >>> is_secret("EOS_TOKEN", "</s>"), is_secret("MAX_TOKENS", "4k"), is_secret("DB_PASS", "x")
    (False, False, True)
    """
    return _is_secret_by_name(name, value) or is_secret_value(f"{name} {value}")


def _is_secret_by_name(name: str, value: str) -> bool:
    """Return whether the value is a secret because of the name that it is given to."""
    strength = _strength(name)
    if not strength or not value or pattern("looked up by bash or Hydra").match(value):
        return False
    if value.isdigit() and strength > 1 and name.lower().endswith(_DIGITS):
        return len(value) > 3  # a PIN; fewer digits are a count
    if pattern("ordinary values").fullmatch(value):
        return False
    # An address is no secret, except that of a webhook.
    is_address = "hook" not in name.lower() and pattern("address").fullmatch(value)
    return _looks_random(value) or (strength > 1 and not is_address)


def _looks_random(text: str) -> bool:
    """Return whether more than a fifth of the characters are changes, as in keys, not in words."""
    return len(text) > 15 and 5 * len(re.findall(_CHANGE, text)) > len(text)


def is_secret_value(text: str) -> bool:
    """Return whether a text contains a password or a well-known form of token.

    >>> is_secret_value("http://me:pass@proxy:3128"), is_secret_value("http://proxy:3128")
    (True, False)
    """
    return text != "" and next(_secret_spans(text), None) is not None


def secret_arguments(words: Sequence[str]) -> Iterator[str]:
    """Return the names of arguments that contain secrets, without their values.

    >>> list(secret_arguments(["--api-key=x", "+wandb.api_key=x", "--pw", "x", "hf_" + 20 * "a"]))
    ['--api-key', '+wandb.api_key', '--pw', 'hf_...']
    >>> list(secret_arguments(["--lr=1", "wandb.api_key=${oc.env:KEY}", "pad_token=0"]))
    []
    """
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        if _has_secret(word, after):
            option = word.partition("=")[0]
            yield f"{option[:3]}..." if is_secret_value(option) else option


def _has_secret(word: str, after: str) -> bool:
    """Return whether an argument contains a secret, or is an option whose value `after` is one."""
    if is_secret_value(word):
        return True
    option, equals, value = word.partition("=")
    name = option.lstrip("-+~").rpartition(".")[2]
    if equals:
        return _is_secret_by_name(name, value)
    if not option.startswith("-") or after.startswith("--"):
        return False
    # A value that is a secret without its option is found as an argument of its own.
    is_secret_together = is_secret_value(f"{word} {after}") and not is_secret_value(after)
    return _is_secret_by_name(name, after) or is_secret_together


def redacted(text: str) -> str:
    """Return a text in which the values of secrets are replaced, by their names and by their forms.

    >>> redacted("HF_TOKEN=abcdef12 WANDB_API_KEY: 'x1234' lr=0.0001 http://me:pass@proxy:3128")
    "HF_TOKEN=[redacted] WANDB_API_KEY: '[redacted]' lr=0.0001 http://[redacted]proxy:3128"
    """
    kept, end = [], 0
    for start, stop in sorted(_secret_spans(text)):
        if start >= end:
            kept += [text[end:start], REDACTED]
        end = max(end, stop)  # a secret that overlaps the one before shares its replacement
    return "".join(kept) + text[end:]


def named_secrets(text: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each secret that a text gives to a name: its variable ("" if none) and its span.

    >>> list(named_secrets("export HF_TOKEN=abc")), list(named_secrets("HF_TOKEN=$(x)"))
    ([('HF_TOKEN', (16, 19))], [])
    """
    end = 0
    for match in re.finditer(_NAME, text):
        name, start = match["name"], match.end()
        if start < end or not (strength := _strength(name)):  # within a value, or an ordinary name
            continue
        # `Authorization: Bearer abc`: the value is the rest of the line.
        has_line = ":" in match["sign"] and re.search(_HAS_LINE, name)
        stop = start + _MOST_CHARACTERS[strength]
        value = (_LINE if has_line else _VALUE).match(text, start, stop)  # in its named group
        if value and _is_secret_by_name(name, value[value.lastgroup or 0]):
            end = value.end()
            is_variable = "=" in match["sign"] and not match["dashes"]  # not an option
            yield name if is_variable else "", value.span(value.lastgroup or 0)


def _secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where secrets are: those that are given to names, then those of well-known forms."""
    yield from (span for _, span in named_secrets(text))
    if len(text) < SHORTEST and "://" not in text:
        return
    for kind in ("forms", "forms if they look random"):
        for match in pattern(kind).finditer(text):
            group = match.lastgroup or 0  # a named group must look random, and not encode a text
            is_text = group == "base64" and a2b_base64(match[group]).isascii()
            if group == 0 or (_looks_random(match[group]) and not is_text):
                yield match.span(group)


def is_secret_file(name: str, read_beginning: Callable[[], str]) -> bool:
    """Return whether a file has credentials, by its name or by its beginning.

    Only settings are read: a script may contain a token, and training data may look like one.
    """
    *directories, base = name.lower().split("/")
    if not _FOLDERS.isdisjoint(directories) or pattern("files").fullmatch(base):
        return not base.endswith((".pub", ".example", ".sample", ".template"))
    stem, _, suffix = base.rpartition(".")  # of "token" and ".env" the stem is ""
    if (f".{suffix}" if stem else ".") not in _SETTINGS:  # "." in the table: no suffix
        return False
    if _strength(stem or base) > 1 and not stem.endswith("tokens"):  # a vocabulary
        return True
    text = read_beginning()
    secrets = (text[start:stop] for start, stop in _secret_spans(text))
    # A key block, a password in an address, or a token with digits: other words may be examples.
    return any(each[0] == "-" or each[-1] == "@" or re.search(r"\d", each) for each in secrets)
