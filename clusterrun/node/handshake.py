"""Prove to each other that two agents belong to the same attempt, without sending the secret."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.files import write_whole
from clusterrun.node.endings import NodeError
from clusterrun.paths import RunPaths


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

    def check_open(self) -> None:
        """See whether a node has already found that it can't take part.

        Raises NodeError with the status that it left.
        """
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


def proof(secret: bytes, *parts: object) -> str:
    """Sign some values with the secret."""
    text = "\x00".join(map(str, parts))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, secret: bytes, *parts: object) -> bool:
    """Check a signature in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given, proof(secret, *parts))
