"""Mutual proof that two agents belong to the same attempt, without sending the secret.

Each proof covers the address and port of the head's end of the connection: a relay would have
others.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.node.base.causes import NodeError
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.rundir.paths import RunPaths
from clusterrun.shared.files import write_whole


@dataclass(frozen=True, kw_only=True)
class Realm:
    """The attempt whose agents may connect: all can read its secret.

    If `over` returns True, the others have gone on without those that have not joined: one that
    can't take part does not end the attempt.
    """

    paths: RunPaths
    attempt: int
    over: Callable[[], bool] | None = None

    @property
    def secret_file(self) -> Path:
        """The file of the secret."""
        return self.paths.link_secret(self.attempt)

    async def watch(self, disk: SharedDisk, pause_s: float) -> None:
        """Poll until a node reports that it can't take part. Raises NodeError with its status."""
        while True:
            if self.over is None:
                await disk.do(self._check_open)
            await asyncio.sleep(pause_s)

    def _check_open(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            code = int(self.paths.status(self.attempt).read_text(encoding="ascii"))
            text = f"another node cannot take part: it exited with status {code}"
            raise NodeError(code, text, is_told=True)

    @property
    def label(self) -> dict[str, Any]:
        """Run and attempt, which both sides send unencrypted."""
        root = self.paths.root
        return {"run": f"{root.parent.name}/{root.name}", "attempt": self.attempt}

    def is_named_in(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message claims to come from this attempt."""
        return all(message.get(name) == value for name, value in self.label.items())

    def create_secret(self) -> bytes:
        """Write the attempt's secret, which only its owner can read; keep one that is there.

        The controller of hosts writes it before they start, the head otherwise.
        """
        with contextlib.suppress(FileNotFoundError):
            if secret := self.read_secret():
                return secret
        secret = secrets.token_hex(32).encode()
        self.secret_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self.secret_file, secret)
        return secret

    def read_secret(self) -> bytes:
        """Return the attempt's secret. Call this only once the head has answered.

        A network file system may cache that a file did not exist.
        """
        return self.secret_file.read_bytes()


def proof(secret: bytes, *parts: str) -> str:
    """Return the HMAC of `parts`."""
    return hmac.new(secret, _bytes("\x00".join(parts)), hashlib.sha256).hexdigest()


def is_proof(given: object, secret: bytes, *parts: str) -> bool:
    """Check an HMAC in constant time; `given` may be anything."""
    right = _bytes(proof(secret, *parts))
    return isinstance(given, str) and hmac.compare_digest(_bytes(given), right)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
