"""Quote any text as data: a word of bash, a directive of sbatch, a scalar of YAML."""

from __future__ import annotations

import json
import re
import shlex

from clusterrun.launch.plan import Directive


class Quoted(str):
    """A text that is safe in a rendered file."""


_PLAIN_SCALAR = r"[A-Za-z][A-Za-z_]*\Z"
_NOT_PLAIN = frozenset(("true", "false", "yes", "no", "on", "off", "null", "y", "n"))
# Control characters would break the line (and sbatch refuses a script with carriage returns);
# lone surrogates are bytes that were not UTF-8.
_NEEDS_ESCAPES = r"[\x00-\x1f\x7f\ud800-\udfff]"
_ESCAPES = {"\n": "\\n", "\t": "\\t", "'": "\\'", "\\": "\\\\"}


def sh_word(value: object) -> Quoted:
    """Return a text as one word of bash, on one line.

    Raises ValueError for a NUL byte, which no variable or argument can contain.

    >>> print(sh_word("a b"), sh_word("plain"), sh_word(3), sh_word("it's\\ntwo"))
    'a b' plain 3 $'it\\'s\\ntwo'
    """
    text = _text(value)
    if "\x00" in text:
        raise ValueError("a NUL byte cannot be passed to a program")
    if not re.search(_NEEDS_ESCAPES, text) and "'" not in text:
        return Quoted(shlex.quote(text))
    return Quoted("$'" + "".join(map(_escape, text)) + "'")


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    if not re.match(_NEEDS_ESCAPES, char):
        return char
    return "".join(f"\\{byte:03o}" for byte in char.encode(errors="surrogateescape"))


def directive_line(line: Directive) -> Quoted:
    r"""Return a directive as the rest of an `#SBATCH` line.

    Unlike a shell, sbatch reads a backslash as an escape even inside single quotes, and an
    unquoted # anywhere as a comment (sbatch 22.05, `_get_argument`).
    Raises ValueError for control characters: a directive ends with its line.

    >>> print(directive_line(Directive(name="comment", value="a\\b #1")))
    --comment='a\\b #1'
    """
    value = "" if line.value is None else "=" + sbatch_word(line.value)
    return Quoted(f"--{line.name}{value}")


def sbatch_word(value: object) -> Quoted:
    """Return one whole option, or the value of one, for an `#SBATCH` line."""
    text = _text(value)
    if re.search(_NEEDS_ESCAPES, text):
        raise ValueError(f"a directive cannot contain {text!r}")
    return Quoted(shlex.quote(text).replace("\\", "\\\\"))


def yaml_scalar(value: object) -> Quoted:
    """Return a number, a boolean or a text as a scalar of YAML.

    >>> print(yaml_scalar(True), yaml_scalar("MULTI_GPU"), yaml_scalar("no"))
    true MULTI_GPU "no"
    """
    if isinstance(value, bool | int):
        return Quoted(json.dumps(value))
    text = _text(value)
    if re.match(_PLAIN_SCALAR, text) and text.lower() not in _NOT_PLAIN:
        return Quoted(text)
    return Quoted(json.dumps(text, ensure_ascii=False))


def comment_text(value: object) -> Quoted:
    """Return a text for a comment. Raises ValueError for control characters."""
    text = _text(value)
    if re.search(_NEEDS_ESCAPES, text):
        raise ValueError(f"a comment cannot contain {text!r}")
    return Quoted(text)


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        text = str(value)  # of an undefined one raises an error that names it
        raise ValueError(f"{text!r} is neither text nor a number")
    return str(value)


FILTERS = {
    "sh": sh_word,
    "directive": directive_line,
    "sbatch": sbatch_word,
    "yaml": yaml_scalar,
    "comment": comment_text,
}
