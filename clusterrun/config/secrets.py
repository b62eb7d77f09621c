"""Recognize names and values of secrets: they are passed by name and never stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

REDACTED: Final = "[redacted]"

_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS: Final = frozenset({"secret", "secrets", "passphrase", "credential"})
_SECRET_ENDINGS: Final = ("token", "secret", "password", "passwd", "apikey", "credentials")
_SECRET_KEYS: Final = frozenset({"access", "api", "secret", "private", "encryption", "signing"})
# A tokenizer's special tokens are numbers or words of its vocabulary, not secrets.
_VOCABULARY: Final = frozenset(
    {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "special", "first", "last", "max"}
)

_VALUE: Final = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/@\s:]*:[^/@\s]+@"  # user:password@ in an address
    r"|\b(?:hf_|gh[pousr]_|glpat-|sk-(?:[a-z]+[0-9]*-){0,2})[A-Za-z0-9]{20,}"
    r"|\bgithub_pat_[A-Za-z0-9_]{20,}|\bxox[abp]-[A-Za-z0-9-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_MORE_VALUES: Final = re.compile(  # that a log may contain
    r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"  # JSON web tokens
    r"|(?<=Bearer )[\w.~+/=-]{12,}"
    r"|(?s:-----BEGIN [A-Z ]*PRIVATE KEY.{0,8000}?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))"
)
_PAIRS: Final = (
    re.compile(  # a variable or a key, and its value
        r"([A-Za-z_][\w.-]{2,60})([\"']?\s{0,3}[=:]\s{0,3}[\"']?)([^\s\"',;&|]{4,})"
    ),
    re.compile(  # an option and the word after it: on a command line, in JSON, in YAML
        r"(--[A-Za-z][\w.-]{2,60})([\"']?(?:,|,?\s{1,20}(?:- )?)[\"']?)([^\s\"',-][^\s\"',]{3,})"
    ),
)
_ASSIGNMENT: Final = re.compile(r"\b([A-Za-z_][A-Za-z0-9_]*)=[\"']?[^\s\"'$`;&|]")


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name usually contains a secret.

    >>> [is_secret_name(name) for name in ("HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD")]
    [True, True, True]
    >>> [is_secret_name(name) for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PAD_TOKEN_ID")]
    [False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if len(words) > 1 and (words[-1] == "key" or _names_a_key(words)):
        return True
    if words[-1:] == ["pwd"] and words not in (["pwd"], ["oldpwd"], ["old", "pwd"]):
        return True
    if "token" in words:
        return not _VOCABULARY.intersection(words)
    return bool(_SECRET_WORDS.intersection(words)) or name.lower().endswith(_SECRET_ENDINGS)


def _names_a_key(words: list[str]) -> bool:
    """Return whether a name contains two words such as `access key` or `api key`."""
    return any(word in _SECRET_KEYS and after == "key" for word, after in pairwise(words))


def is_secret_value(text: str) -> bool:
    """Return whether a text contains a password or a well-known form of token.

    >>> is_secret_value("http://me:pass@proxy:3128"), is_secret_value("http://proxy:3128")
    (True, False)
    """
    return _VALUE.search(text) is not None


def secret_argument(word: str) -> str:
    """Return the name of an argument that contains a secret, without its value; else "".

    >>> [secret_argument(word) for word in ("--api-key=x", "+wandb.api_key=x", "hf_" + 20 * "a")]
    ['--api-key', '+wandb.api_key', 'hf_...']
    >>> [secret_argument(word) for word in ("--lr=1", "wandb.api_key=${oc.env:KEY}", "pad_token=0")]
    ['', '', '']
    """
    option, equals, value = word.partition("=")
    if value.startswith("${"):  # Hydra reads it when the script runs
        return ""
    is_named = bool(equals) or option.startswith("--")
    if is_named and is_secret_name(option.lstrip("-+~").rpartition(".")[2]):
        return option
    if not is_secret_value(word):
        return ""
    return option if is_named and not is_secret_value(option) else f"{word[:3]}..."


def secret_assignments(line: str) -> Iterator[str]:
    """Return the names of secrets whose values a line of bash assigns.

    >>> list(secret_assignments("export HF_TOKEN=abc")), list(secret_assignments("HF_TOKEN=$(x)"))
    (['HF_TOKEN'], [])
    """
    for match in _ASSIGNMENT.finditer(line):
        if is_secret_name(match[1]):
            yield match[1]


def redacted(text: str) -> str:
    """Return a text in which the values of secrets are replaced, by their names and by their forms.

    >>> redacted("HF_TOKEN=abcdef12 WANDB_API_KEY: 'x1234' lr=0.0001 http://me:pass@proxy:3128")
    "HF_TOKEN=[redacted] WANDB_API_KEY: '[redacted]' lr=0.0001 [redacted]proxy:3128"
    """
    text = _MORE_VALUES.sub(REDACTED, text)
    for pattern in _PAIRS:
        text = pattern.sub(_redacted_pair, text)
    return _VALUE.sub(REDACTED, text)


def _redacted_pair(pair: re.Match[str]) -> str:
    return pair[1] + pair[2] + (REDACTED if is_secret_name(pair[1]) else pair[3])
