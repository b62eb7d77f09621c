"""Commands on the hosts over ssh: no prompt, no new host key, the user's settings.

`run` runs one there as if it ran here: with its input, output, exit status and Ctrl-C. `why`
explains what ssh means if it does not run a command: one error, one hint.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

from clusterrun.config.hosts import parse_host
from clusterrun.errors import ClusterrunError, Exit, SchedulerUnreachableError, SubmissionError
from clusterrun.shared.files import unnamed_file

SSH_FAILED: Final = 255  # ssh's own status; any other is the command's
NOT_FOUND: Final = 127  # bash's
SETUP_FAILED: Final = 122  # ours
CONNECT_S = 10
LINK_S = 100  # a connection that is silent for longer is lost; the agents' link gives up first
_PINGS = 5
LAST_WORDS_S: Final = 5.0  # after Ctrl-C, and to print why it failed

OPTIONS = (
    *("-oBatchMode=yes", "-oStrictHostKeyChecking=yes", f"-oConnectTimeout={CONNECT_S}"),
    *(f"-oServerAliveInterval={LINK_S // _PINGS}", f"-oServerAliveCountMax={_PINGS}"),
    *("-oForwardX11=no", "-oForwardAgent=no", "-oClearAllForwardings=yes"),
)


def ssh(host: str, argv: Sequence[str], *, terminal: bool = False) -> list[str]:
    """Return the command that runs these words on a host, whatever the login shell there is."""
    line = " ".join(map(shlex.quote, argv))
    command = f"exec bash -c {shlex.quote(line)}"
    tty = "-t" if terminal else "-T"
    return ["ssh", tty, *OPTIONS, *parse_host(host).options, "--", command]


def module(python: str, name: str, *args: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the command that runs a module there, in /: no file of the user's may hide one."""
    settings = [f"{key}={value}" for key, value in (env or {}).items()]
    return ["sh", "-c", 'cd / && exec env "$@"', "sh", *settings, python, "-m", name, *args]


def silent(host: str, said: str) -> SchedulerUnreachableError:
    """Return the error for a host that ssh did not reach; `said` is what ssh printed."""
    lines = [line.strip().removeprefix("ssh: ") for line in said.splitlines() if line.strip()]
    cause = lines[-1] if lines else None
    hint = f"jobs on {host} are not affected; check the connection with: ssh {host} true"
    return SchedulerUnreachableError(f"{host} does not answer", cause=cause, hint=hint)


def run(host: str, words: Sequence[str], *, is_terminal: bool) -> int:
    """Run a command there with this process's output, and return its exit status.

    Without a terminal, the command learns of Ctrl-C by the end of its input: if ssh ended, sshd
    would only close its pipes. Raises SchedulerUnreachableError, KeyboardInterrupt.
    """
    sys.stdout.flush()
    with open(unnamed_file(), "r+b", buffering=0) as log:  # a killed process leaves no file
        argv = ssh(host, words, terminal=is_terminal)
        log_path = f"/proc/{os.getpid()}/fd/{log.fileno()}"
        argv[1:1] = ["-E", log_path, "-oLogLevel=ERROR"]  # ssh's messages, not the command's
        stdin = None if is_terminal else subprocess.PIPE
        try:
            process = subprocess.Popen(argv, stdin=stdin, start_new_session=not is_terminal)
        except OSError as error:
            raise ClusterrunError("ssh cannot be started", cause=str(error)) from error
        status = _wait(process, is_terminal)
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip()
    if status == SSH_FAILED and said:
        raise silent(host, said)
    return status if status >= 0 else 128 - status  # a signal ended ssh


def _wait(process: subprocess.Popen[bytes], is_terminal: bool) -> int:
    """Return ssh's exit status; after Ctrl-C, let the command there end first."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        if process.stdin:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
        if is_terminal:  # ssh had not connected: once it has, Ctrl-C is input that it passes on
            raise
        return Exit.INTERRUPTED
    finally:
        process.kill()  # if it still runs


# Why a host cannot be used


class Refusal(Enum):
    """Why a host cannot be used."""

    CHANGED_KEY = "its host key has changed"
    UNKNOWN_KEY = "its host key is not known here"
    KEY_FILE = "ssh ignores your key because others can read its file"
    TOO_MANY_KEYS = "ssh offered too many keys"
    DENIED = "permission denied"
    UNKNOWN_HOST = "its name cannot be resolved"
    REFUSED = "nothing listens on its ssh port"
    SILENT = "it does not answer"
    NO_PYTHON = "Python was not found"
    NO_CLUSTERRUN = "clusterrun cannot start"
    SETUP = "its setup lines failed"
    ENDED = "its shell ended early"
    OTHER = "ssh failed"


# Parts of ssh's messages in lower case; the first refusal of which one matches wins. A message on
# the way (the key of a jump host) precedes what follows from it (a closed connection).
SIGNS: Final[tuple[tuple[Refusal, tuple[str, ...]], ...]] = (
    (Refusal.CHANGED_KEY, ("remote host identification has changed", "has changed and you have")),
    (Refusal.UNKNOWN_KEY, ("host key is known for", "host key verification failed")),
    (Refusal.TOO_MANY_KEYS, ("too many authentication failures",)),
    (Refusal.KEY_FILE, ("unprotected private key file",)),
    (Refusal.DENIED, ("permission denied (", "no supported authentication", "access denied")),
    (Refusal.UNKNOWN_HOST, ("could not resolve hostname", "name or service not known")),
    (Refusal.REFUSED, ("connection refused",)),
    (Refusal.SILENT, ("timed out", "no route to host", "network is unreachable", "host is down")),
)
HINTS: Final[dict[Refusal, str]] = {
    Refusal.CHANGED_KEY: (
        "ask the administrator of HOST whether its key was replaced, and compare the fingerprint; "
        "only then remove the old one with ssh-keygen -R HOST"
    ),
    Refusal.UNKNOWN_KEY: "run 'ssh HOST' once, and compare the fingerprint before you accept it",
    Refusal.KEY_FILE: "run chmod 600 on the file that ssh names",
    Refusal.TOO_MANY_KEYS: "name HOST's key in ~/.ssh/config: IdentityFile, IdentitiesOnly yes",
    Refusal.DENIED: (
        "copy your key with ssh-copy-id HOST; if it has a passphrase, load it with "
        "ssh-add: clusterrun never asks for one"
    ),
    Refusal.UNKNOWN_HOST: "check the name with: ssh HOST; define aliases in ~/.ssh/config",
    Refusal.REFUSED: "check that sshd runs on HOST; for another port, write USER@HOST:PORT",
    Refusal.SILENT: "check that HOST is up and that no firewall blocks ssh: ssh HOST",
    Refusal.NO_PYTHON: "name an interpreter that exists on all hosts with --python",
    Refusal.NO_CLUSTERRUN: "install clusterrun on HOST, or name another interpreter with --python",
    Refusal.SETUP: "run the setup lines by hand: ssh HOST",
    Refusal.ENDED: "look for exit and exec in ~/.bashrc on HOST; try: ssh HOST bash -c true",
    Refusal.OTHER: "look for the reason with: ssh -v HOST",
}
# These come from what runs on the host: ssh, or what was used instead, has reached it.
_OF_REACHED: Final = (Refusal.NO_PYTHON, Refusal.NO_CLUSTERRUN, Refusal.SETUP, Refusal.ENDED)


def nonsense(host: str) -> SubmissionError:
    """Return the error for an answer that is not of the form that clusterrun gives."""
    hint = f"check that {host} has the same version of clusterrun as this machine"
    return SubmissionError(f"{host} sent an unexpected answer", hint=hint)


def why(host: str, rc: int, stderr: str, *, first: str = "", starter: str = "") -> ClusterrunError:
    """Return the error for a process that did not start on a host, from what started it.

    `first` is the host that runs ssh, "" for this machine; `starter` is the allocation's own
    program that was run instead of ssh, "" for ssh.
    """
    refusal = refusal_of(rc, stderr)
    is_reached = refusal in _OF_REACHED
    message, hint = f"{host}: {refusal.value}", HINTS[refusal].replace("HOST", host or "HOST")
    if starter and not is_reached:
        message = f"{starter} did not start a process on {host}"
        hint = f"check that the allocation still has {host}, or pass --set starter=ssh"
    elif first and not is_reached:
        message, hint = f"{first} cannot log in to {message}", f"on {first}: {hint}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = lines[-1][:500] if lines else "no message"
    cause = "".join(letter if letter.isprintable() else " " for letter in said)
    kind = SubmissionError if is_reached else SchedulerUnreachableError
    return kind(message, hint=hint, cause=cause)


def refusal_of(rc: int, stderr: str) -> Refusal:
    """Return why a command did not run on a host.

    >>> refusal_of(255, "ssh: connect to host h port 22: Connection refused").name
    'REFUSED'
    """
    words = stderr.lower()
    if rc == SSH_FAILED:
        found = (refusal for refusal, signs in SIGNS if any(sign in words for sign in signs))
        return next(found, Refusal.OTHER)
    if rc < 0:  # it did not end, so we killed it
        return Refusal.SILENT
    if "no module named" in words or "traceback (" in words or "syntaxerror" in words:
        return Refusal.NO_CLUSTERRUN
    if rc in (NOT_FOUND, NOT_FOUND - 1):  # 126: not executable
        return Refusal.NO_PYTHON
    return Refusal.SETUP if rc == SETUP_FAILED else Refusal.ENDED
