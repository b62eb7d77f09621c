"""Prove to each other that two agents belong to the same attempt, without sending the secret.

The proofs name the address and port of the head's end of the connection, as each side sees it: who
passes the messages on to the head has another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.node.agent.shared_disk import SharedDisk
from clusterrun.node.recovery.causes import NodeError
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import write_whole


@dataclass(frozen=True, kw_only=True)
class Realm:
    """The attempt whose agents may talk: they can all read the secret in its directory."""

    run: str
    attempt: int
    secret_file: Path
    verdict: Path

    @classmethod
    def of(cls, paths: RunPaths, attempt: int) -> Realm:
        """Name the realm of one attempt of a run."""
        run = f"{paths.root.parent.name}/{paths.root.name}"
        secret_file, verdict = paths.link_secret(attempt), paths.verdict(attempt)
        return cls(run=run, attempt=attempt, secret_file=secret_file, verdict=verdict)

    async def watch(self, disk: SharedDisk, pause_s: float) -> None:
        """Look again and again whether a node has found that it can't take part.

        Raises NodeError with the status that it left.
        """
        while True:
            await disk.do(self._check_open)
            await asyncio.sleep(pause_s)

    def _check_open(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            code = int(self.verdict.read_text(encoding="ascii"))
            text = f"another node cannot take part: it left with status {code}"
            raise NodeError(code, text, is_told=True)

    @property
    def label(self) -> dict[str, Any]:
        """What both sides say openly."""
        return {"run": self.run, "attempt": self.attempt}

    def is_named_in(self, message: Mapping[str, Any]) -> bool:
        """Say whether a message claims to come from this attempt."""
        return message.get("run") == self.run and message.get("attempt") == self.attempt

    def create_secret(self) -> bytes:
        """Make the attempt's secret, readable by its owner only; the head's task."""
        secret = secrets.token_hex(32).encode()
        self.secret_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self.secret_file, secret)
        return secret

    def read_secret(self) -> bytes:
        """Read the attempt's secret.

        Only once the head has answered: a file system may remember for a while that a file which
        was asked for too early does not exist.
        """
        return self.secret_file.read_bytes()


def nonce() -> str:
    """Return text that was never said before."""
    return secrets.token_hex(16)


def nonce_in(message: Mapping[str, Any]) -> str:
    """Read the other side's nonce; empty if a stranger sent something else."""
    given = message.get("nonce")
    return given if isinstance(given, str) else ""


def proof(secret: bytes, *parts: str) -> str:
    """Sign some texts with the secret."""
    return hmac.new(secret, _bytes("\x00".join(parts)), hashlib.sha256).hexdigest()


def is_proof(given: object, secret: bytes, *parts: str) -> bool:
    """Check a signature in constant time, whatever a stranger gave."""
    right = _bytes(proof(secret, *parts))
    return isinstance(given, str) and hmac.compare_digest(_bytes(given), right)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
