"""The site's own verdict on a node: a command that its configuration names."""

from __future__ import annotations

import os
import re
import shlex
from typing import Final

from clusterrun.errors import ClusterrunError, shortened
from clusterrun.shared import shell
from clusterrun.shared.finding import Finding, fail, note, ok, skip

NAME: Final = "node.site"
ADVICE: Final = "tell the administrator, and leave this node out with --exclude"
LETTERS: Final = 200
OUTPUT: Final = 1 << 20  # bytes of each stream that are kept
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def site_verdict(command: str, timeout_s: float) -> Finding:
    """Run the command, without a shell; its exit status decides.

    A command that does not answer in time is killed, and skipped.
    """
    try:
        argv = shlex.split(command)
    except ValueError as error:
        return skip(NAME, f"launch.health_command cannot be read: {error}")
    program = os.path.basename(argv[0])
    if shell.find(argv[0]) is None:
        hint = "correct launch.health_command, or install it on this node"
        return note(NAME, f"{_line(argv[0])} was not found", hint)
    try:
        done = shell.run_once(argv, timeout_s, most=OUTPUT)
    except ClusterrunError as error:
        return skip(NAME, f"{program} did not start: {_line(str(error.cause))}")
    if done.rc == shell.TIMED_OUT:
        return skip(NAME, f"{program} did not answer within {timeout_s:g} s")
    if done.rc == 0:
        return ok(NAME, f"{program}: exit status 0")
    lines = map(_line, f"{done.stdout}\n{done.stderr}".splitlines())
    first = next(filter(None, lines), "no message")
    return fail(NAME, f"{program} exited with status {done.rc}: {first}", ADVICE)


def _line(text: str) -> str:
    """Return a text of the command as one line that no terminal interprets."""
    words = _COLOUR.sub("", text[: 20 * LETTERS])
    plain = "".join(letter if letter.isprintable() else " " for letter in words)
    return shortened(" ".join(plain.split()), LETTERS)
