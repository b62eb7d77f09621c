"""Mutual proof that two agents belong to the same attempt, without sending the secret.

Each proof covers the address and port of the conductor's end of the connection: a relay would have
others.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterrun.rundir.attempt import read_attempt
from clusterrun.rundir.paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class Realm:
    """The attempt whose agents may connect: all can read its secret."""

    paths: RunPaths
    attempt: int

    @property
    def label(self) -> dict[str, Any]:
        """Run and attempt, which both sides send unencrypted."""
        root = self.paths.root
        return {"run": f"{root.parent.name}/{root.name}", "attempt": self.attempt}

    def is_named_in(self, message: Mapping[str, Any]) -> bool:
        """Return whether a message claims to come from this attempt."""
        return all(message.get(name) == value for name, value in self.label.items())

    def read_secret(self) -> bytes:
        """Return the attempt's secret. Call this only once the conductor has answered.

        A network file system may cache that a file did not exist. Raises OSError.
        """
        if secret := read_attempt(self.paths, self.attempt).secret:
            return secret.encode()
        raise FileNotFoundError(self.paths.attempt_record(self.attempt))


def proof(secret: bytes, *parts: str) -> str:
    """Return the HMAC of `parts`."""
    return hmac.new(secret, _bytes("\x00".join(parts)), hashlib.sha256).hexdigest()


def is_proof(given: object, secret: bytes, *parts: str) -> bool:
    """Check an HMAC in constant time; `given` may be anything."""
    right = _bytes(proof(secret, *parts))
    return isinstance(given, str) and hmac.compare_digest(_bytes(given), right)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
