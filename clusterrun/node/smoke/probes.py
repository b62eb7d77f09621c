"""The processes of a node that compute with torch, one for each device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from clusterrun.config.choices import Device
from clusterrun.launch.plan import Plan

COMPUTE_S: Final = 40.0  # torch may be imported from a busy file system
REDUCE_S: Final = 15.0
END_S: Final = 1.0


class Probes:
    """Start the processes, and read what they computed."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._directory = directory  # modules in the working directory may shadow ours
        gpus = plan.procs_per_node if plan.device is Device.CUDA else 0
        self._devices = [f"cuda:{n}" for n in range(gpus)] or ["cpu"]
        self._processes: list[Process] = []
        self._computed: asyncio.Future[list[Mapping[str, Any]]]

    def __len__(self) -> int:
        return len(self._devices)

    async def start(self) -> None:
        """Start all processes; they import torch and compute."""
        argv = (sys.executable, "-m", "clusterrun.health.probe")
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        self._processes = [
            await asyncio.create_subprocess_exec(
                *argv,
                device,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                env=env,
                cwd=self._directory,
            )
            for device in self._devices
        ]
        answers = (_answer(process, COMPUTE_S) for process in self._processes)
        self._computed = asyncio.gather(*answers)

    async def end(self) -> None:
        """End all processes."""
        if self._processes:
            self._computed.cancel()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            with contextlib.suppress(asyncio.TimeoutError):  # it may be stuck in the driver
                await asyncio.wait_for(process.wait(), END_S)

    async def computed(self) -> dict[str, Mapping[str, Any]]:
        """Return each device's rate, or its error."""
        return dict(zip(self._devices, await self._computed, strict=True))

    async def reduce(self, group: Mapping[str, Any], ranks: Sequence[int]) -> Mapping[str, Any]:
        """Take part in an all-reduce as `ranks`; return the slowest time, or the first error."""
        await self._computed
        for process, rank in zip(self._processes, ranks, strict=True):
            if process.stdin is not None:
                process.stdin.write(json.dumps({**group, "rank": rank}).encode() + b"\n")
        answers = await asyncio.gather(*(_answer(process, REDUCE_S) for process in self._processes))
        errors = [answer["error"] for answer in answers if "error" in answer]
        times = [answer["seconds"] for answer in answers if "seconds" in answer]
        return {"reduce_error": str(errors[0])} if errors else {"reduced_s": max(times)}


async def _answer(process: Process, within_s: float) -> Mapping[str, Any]:
    """Read a line of a process; an error if it is late, has died or printed something else."""
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), within_s)
        if not line:
            return {"error": f"the process ended with status {await process.wait()}"}
        answer = json.loads(line)
    except asyncio.TimeoutError:
        return {"error": f"no answer within {within_s:.0f} s"}
    except ValueError:
        return {"error": f"unexpected output: {line[:80]!r}"}
    return answer if isinstance(answer, dict) else {"error": "unexpected output"}
