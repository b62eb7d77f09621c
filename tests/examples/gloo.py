"""Run a script as DeepSpeed and FSDP need it on CPUs: gloo.py SCRIPT ARGS.

accelerate takes gloo for them only from code, and FSDP on a CPU not at all, so FSDP is given it
from inside. The process leaves at once when the script is done, because a thread of gloo that still
puts a collective away aborts a Python that is shutting down (torch 2.13).
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType

given = PartialState.__init__


def with_gloo(self: PartialState, cpu: bool = False, **settings: Any) -> None:
    chosen = {name: value for name, value in settings.items() if value is not None}
    given(self, cpu, **{"backend": "gloo"} | chosen)


def pretend_gpus(*_: object, **__: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = with_gloo
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        PartialState._prepare_backend = pretend_gpus
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
