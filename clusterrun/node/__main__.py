"""`python -m clusterrun.node agent RUN_DIR ATTEMPT`: what node.sh becomes.

`python -m clusterrun.node conclude RUN_DIR ATTEMPT STATUS` says on stdout what the batch script
does after an attempt: a word of `outcome.Next`, the state of a job that ends here, and the nodes to
leave out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE = (
    "usage: python -m clusterrun.node agent RUN_DIR ATTEMPT\n"
    "       python -m clusterrun.node conclude RUN_DIR ATTEMPT STATUS"
)


def main(argv: Sequence[str]) -> int:
    """Do what the batch script asks for on a node."""
    if len(argv) == 3 and argv[0] == "agent" and argv[2].isdigit():
        from clusterrun.node.agent_process import run_agent

        return run_agent(Path(argv[1]), int(argv[2]))
    if len(argv) == 4 and argv[0] == "conclude" and argv[2].isdigit() and argv[3].isdigit():
        return _conclude(Path(argv[1]), int(argv[2]), int(argv[3]))
    print(USAGE, file=sys.stderr)  # noqa: T201 - the batch script's log
    return 2


def _conclude(run_dir: Path, number: int, code: int) -> int:
    from clusterrun.node.conclude import conclude
    from clusterrun.node.stderr import say_on_stderr

    try:
        decision = conclude(run_dir, number, code, os.environ)
    except (OSError, ValueError) as error:
        say_on_stderr(f"cannot conclude attempt {number} of {run_dir}: {error}")
        return 1
    say_on_stderr(f"attempt {number}: {decision.next.value}: {decision.why}")
    exclude = ",".join(decision.exclude)
    print(decision.next.value, decision.state.value, exclude)  # noqa: T201 - for the batch script
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
