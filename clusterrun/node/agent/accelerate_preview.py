"""Print the environment that `accelerate launch` gives its ranks: `accelerate_preview ARGS…`.

It runs accelerate's own launcher, which starts nothing here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def main(argv: Sequence[str]) -> None:
    """Print the new and changed variables as JSON."""
    before = dict(os.environ)

    def show(*_: Any, env: Mapping[str, str] | None = None, **__: Any) -> None:
        found = os.environ if env is None else env
        new = {name: value for name, value in found.items() if before.get(name) != value}
        print(json.dumps(new))  # noqa: T201 - the answer
        sys.stdout.flush()
        os._exit(0)

    import torch.distributed.run
    from accelerate.commands import launch

    torch.distributed.run.run = show
    launch.subprocess = SimpleNamespace(Popen=show)  # only in its launcher for one process
    launch.launch_command(launch.launch_command_parser().parse_args(list(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])
