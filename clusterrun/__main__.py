"""The entry of the command line: `clusterrun` and `python -m clusterrun`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run one command line; Ctrl-C prints no traceback while the command line is imported."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:  # a shell's background job ignores SIGINT
        signal.signal(signal.SIGINT, _leave)
    from clusterrun.cli.main import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _leave(*_: object) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
