"""Join the world, add up the ranks, take one step, and write down when: `probe.py DIR [--hold S]`.

The same script for all contenders. `DIR/<rank>.json` has epoch seconds: `process`, the start of
the process (in hundredths); `script`, its first line; `imported`; `collective`, the end of the
first all-reduce; `step`, the end of the first optimizer step. With `--hold` the rank then waits
until DIR/end exists, at most S seconds.
"""

from __future__ import annotations

import time

began = time.time()

import json  # noqa: E402 - the time of the first line
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from accelerate import Accelerator, InitProcessGroupKwargs  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402

is_zero = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
if is_zero:
    import deepspeed  # noqa: F401 - a training under ZeRO needs it

imported = time.time()
PREFIXES = ("ACCELERATE_", "FSDP_", "DS_")


def main() -> None:
    directory = Path(sys.argv[1])
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    rank, world = accelerator.process_index, accelerator.num_processes
    total = torch.tensor([float(rank)])
    torch.distributed.all_reduce(total)
    assert int(total.item()) == world * (world - 1) // 2
    collective = time.time()
    step(accelerator)
    times = {
        "process": process_start(),
        "script": began,
        "imported": imported,
        "collective": collective,
        "step": time.time(),
    }
    if rank == 0:
        given = {n: v for n, v in os.environ.items() if n.startswith(PREFIXES)}
        whole(directory / "environ.json", given)
    whole(directory / f"{rank}.json", {**times, "world": world, "pid": os.getpid()})
    if "--hold" in sys.argv:
        hold(directory, float(sys.argv[sys.argv.index("--hold") + 1]))
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def step(accelerator: Accelerator) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_zero:
        config = AcceleratorState().deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = 1
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 8)).sum())
    optimizer.step()


def process_start() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def hold(directory: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not (directory / "end").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def whole(path: Path, data: Mapping[str, object]) -> None:
    path.with_suffix(".tmp").write_text(json.dumps(data))
    path.with_suffix(".tmp").rename(path)


main()
