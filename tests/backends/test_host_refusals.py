"""What OpenSSH writes when it refuses (9.2 and others), and what users read of it."""

from __future__ import annotations

from clusterrun.backends.hosts.openssh import HINTS, Refusal, refusal_of, why
from clusterrun.errors import Exit

CHANGED = """\
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
Offending ED25519 key in /home/ann/.ssh/known_hosts:1
  remove with:
  ssh-keygen -f "/home/ann/.ssh/known_hosts" -R "gpu1"
Host key for gpu1 has changed and you have requested strict checking.
Host key verification failed.
"""
CLOSED = (
    "kex_exchange_identification: Connection closed by remote host\n"
    "Connection closed by UNKNOWN port 65535\n"
)
KEY_FILE = """\
@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for '/home/ann/.ssh/id' are too open.
Load key "/home/ann/.ssh/id": bad permissions
ann@gpu1: Permission denied (publickey).
"""
CASES = [
    (Refusal.CHANGED_KEY, 255, CHANGED),
    (
        *(Refusal.UNKNOWN_KEY, 255),
        "No ED25519 host key is known for gpu1 and you have requested strict checking.\n"
        "Host key verification failed.\n",
    ),
    (Refusal.KEY_FILE, 255, KEY_FILE),
    (Refusal.CONFIGURATION, 255, "command-line: line 0: Bad configuration option: nosuch"),
    (Refusal.CONFIGURATION, 255, "Bad owner or permissions on /home/ann/.ssh/config"),
    (
        *(Refusal.TOO_MANY_KEYS, 255),
        "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\n"
        "Disconnected from 10.0.0.1 port 22\n",
    ),
    (Refusal.DENIED, 255, "ann@gpu1: Permission denied (publickey,password)."),
    (
        *(Refusal.UNKNOWN_HOST, 255),
        "ssh: Could not resolve hostname gpu1: Name or service not known",
    ),
    (Refusal.UNKNOWN_HOST, 255, f"ssh: Could not resolve hostname jump: x\n{CLOSED}"),
    (Refusal.REFUSED, 255, "ssh: connect to host gpu1 port 22: Connection refused"),
    (Refusal.SILENT, 255, "ssh: connect to host gpu1 port 22: Connection timed out"),
    (Refusal.SILENT, 255, "ssh: connect to host gpu1 port 22: No route to host"),
    (Refusal.SILENT, 255, "Connection timed out during banner exchange"),
    (Refusal.CLOSED, 255, CLOSED),
    (Refusal.CLOSED, 255, "Timeout, server gpu1 not responding."),
    (Refusal.OTHER, 255, "something new\nthat nobody knows\n"),
    (Refusal.OTHER, 255, ""),
    (Refusal.NO_PYTHON, 127, "bash: line 1: exec: python3.12: not found"),
    (Refusal.NO_PYTHON, 127, "bash: line 1: /opt/py/bin/python: No such file or directory"),
    (Refusal.NO_PYTHON, 126, "bash: line 1: /opt/py/bin/python: Permission denied"),
    (Refusal.NO_CLUSTERRUN, 1, "/usr/bin/python3: No module named clusterrun"),
    (Refusal.NO_CLUSTERRUN, 1, "Traceback (most recent call last):\nImportError: TypeAlias"),
    (Refusal.SETUP, 122, "clusterrun: gpu1: setup line 1 failed with status 1: false"),
    (Refusal.ENDED, 0, ""),
    (Refusal.SILENT, -9, "Welcome to gpu1"),
]


def test_every_reason_is_named() -> None:
    assert {refusal for refusal, _, _ in CASES} == {*Refusal} == {*HINTS}
    for refusal, rc, stderr in CASES:
        error = why("gpu1", rc, stderr)
        assert refusal_of(rc, stderr) is refusal
        assert error.message == f"gpu1: {refusal.value}"
        assert error.exit_code is (Exit.UNREACHABLE if rc in (255, -9) else Exit.FAILED)
        assert error.hint
        assert "HOST" not in error.hint.replace("USER@", "")


def test_the_last_line_is_quoted_as_plain_text() -> None:
    assert why("gpu1", 255, "first\nlast \x1b[31mred\n\n").cause == "last  [31mred"


def test_a_refusal_between_hosts_names_both() -> None:
    error = why("gpu2", 255, "ann@gpu2: Permission denied (publickey).", first="gpu1")
    assert error.message == "gpu1 cannot log in to gpu2: permission denied"
    assert error.hint.startswith("on gpu1: copy your key with ssh-copy-id gpu2")
    assert why("gpu2", 127, "", first="gpu1").message == "gpu2: Python was not found there"
