"""Start the programs that a test cluster is made of."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from tests.patience import patience

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ClusterError(RuntimeError):
    """A program of the test cluster failed, or did not get ready in time."""


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` to its end; raise ClusterError with its own words when it fails."""
    try:
        done = subprocess.run(
            list(argv),
            env={**os.environ, "PATH": whole_path(), **(env or {})},
            input="" if stdin is None else stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s * patience(),
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(argv)} did not end in {timeout_s:.0f} s") from error
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise ClusterError(f"{' '.join(argv)} ended with {done.returncode}: {said}")
    return done


def whole_path() -> str:
    """Return PATH with the directories of the daemons, which a plain user's PATH may lack."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
