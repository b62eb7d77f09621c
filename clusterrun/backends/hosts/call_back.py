"""Start a shell where the starter passes no input on: `call_back RUN_DIR HOST STARTER...`.

The shell connects back over TCP and gets what this process reads. It finds the address and a secret
in a file of the shared run directory, which is removed as soon as it has connected.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

from clusterrun.backends.hosts import start
from clusterrun.shared import files

CALL_S = 50.0  # for the starter to start a shell, and the shell to read the file
POLL_S = 0.2
END_S = 5.0
SAY_S = 1.0  # for a shell that has connected to say the secret; a stranger may be silent
_BYTES = 1 << 16

# One connection for input and output, one for errors. Each side shows that it knows the secret.
_SCRIPT = """\
call() {{
  exec {{fd}}<>/dev/tcp/{address}/{port} && printf '%s %s\\n' {ours} "$1" >&$fd || exit 1
  IFS= read -r -t 30 answer <&$fd && [[ $answer == {theirs} ]] || exit 1
}}
call output; output=$fd
call errors
exec {command} <&$output >&$output 2>&$fd {{output}}>&- {{fd}}>&-
"""


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to a host. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _accept(
    server: socket.socket, process: subprocess.Popen[bytes], secret: str, answer: str
) -> dict[str, socket.socket]:
    """Return the connections of the shell; fewer if it does not call in time."""
    calls: dict[str, socket.socket] = {}
    until = time.monotonic() + CALL_S
    while len(calls) < 2 and time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):  # a timeout, or somebody else's connection
            call, _ = server.accept()
            call.settimeout(SAY_S)
            said, _, name = call.makefile("rb", 0).readline(200).decode("latin-1").partition(" ")
            if hmac.compare_digest(said.encode("latin-1"), secret.encode()):
                call.sendall(answer.encode() + b"\n")
                call.settimeout(None)
                calls[name.strip()] = call
            else:
                call.close()
    return calls


def _copy(call: socket.socket, sink: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        while data := call.recv(_BYTES):
            sink.write(data)
            sink.flush()


def _feed(call: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, _BYTES):
            call.sendall(data)
        call.shutdown(socket.SHUT_WR)


def main() -> int:
    """Start the shell and pass its input and output on; return the starter's exit status."""
    run_dir, host, *starter = sys.argv[1:]
    secret, answer = secrets.token_hex(16), secrets.token_hex(16)
    file = Path(run_dir) / f".call-{secrets.token_hex(8)}"
    with socket.create_server(("", 0), backlog=16) as server:
        server.settimeout(POLL_S)
        port, address = server.getsockname()[1], _address_towards(host)
        known = {"address": address, "port": port, "ours": secret, "theirs": answer}
        files.create(file, _SCRIPT.format(**known, command=shlex.join(start.READ)))
        try:
            process = subprocess.Popen(
                [*starter, "bash", str(file)], stdin=subprocess.DEVNULL, stdout=sys.stderr
            )
            calls = _accept(server, process, secret, answer)
        finally:
            file.unlink()
    try:
        if len(calls) < 2:
            if process.poll() is None:
                print(f"no connection from {host}; does it see {run_dir}?", file=sys.stderr)  # noqa: T201
            return process.poll() or 1
        threading.Thread(target=_feed, args=(calls["output"],), daemon=True).start()
        errors = threading.Thread(target=_copy, args=(calls["errors"], sys.stderr.buffer))
        errors.start()
        _copy(calls["output"], sys.stdout.buffer)
        sys.stdout.close()
        errors.join(END_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return process.poll() or 0
    finally:
        process.terminate()


if __name__ == "__main__":
    sys.exit(main())
