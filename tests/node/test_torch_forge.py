"""The forge with the real torch and accelerate: its ranks are those of `accelerate launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from clusterrun.config.choices import Device, Launcher, MixedPrecision, Strategy
from clusterrun.node.agent.environment import of_rank, portable
from clusterrun.node.agent.launcher import launch_arguments
from clusterrun.node.base.identity import Attempt, identity
from clusterrun.node.forge.launchers import common
from clusterrun.node.forward.spool import Spool
from clusterrun.node.link.connection import LaunchParameters
from tests.gpus import on_one_gpu
from tests.node.jobs import AgentJob

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
Make = Callable[..., AgentJob]
ALL = (Strategy.DDP, Strategy.FSDP, Strategy.ZERO2, Strategy.ZERO3, Strategy.NONE)
OTHERS = (Strategy.ZERO2, Strategy.ZERO3, Strategy.NONE)  # FSDP needs GPUs
RARE = (Strategy.FSDP, Strategy.ZERO2, Strategy.NONE)  # DDP and ZeRO-3 set what these set
CASES = [
    (Device.CPU, Strategy.DDP),
    *(pytest.param(Device.CPU, strategy, marks=pytest.mark.long) for strategy in OTHERS),
    *(pytest.param(Device.CUDA, strategy, marks=pytest.mark.gpu) for strategy in ALL),
]

SHOW = """
import json, os, random, resource, signal, sys, threading
import numpy, torch
about = {
    "env": dict(os.environ),
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "flags": str(sys.flags),
    "path": sys.path,
    "main": sorted(vars(sys.modules["__main__"])),
    "file": __file__,
    "cwd": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "signals": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if "RLIMIT" in n},
    "stdin": os.readlink("/proc/self/fd/0"),
    "streams": [str(sys.stdout), sys.stdout.line_buffering, sys.stdout.write_through],
    "python threads": threading.active_count(),
    "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "seeds": [torch.initial_seed(), random.getstate()[1][1], int(numpy.random.get_state()[1][1])],
    "gc": __import__("gc").isenabled(),
    "umask": os.umask(0o22),
    "name": open("/proc/self/comm").read(),
}
print("ABOUT", json.dumps(about, default=str))
"""
# Of a process or an attempt: the names are compared, the values differ.
OWN = {
    "CLUSTERRUN_LAUNCHER_PID": "of the forge or the launcher",
    "CLUSTERRUN_STARTED": "checksums of values that differ",
    "CLUSTERRUN_STORE_PORT": "of the attempt",
    "MASTER_PORT": "of the attempt",
    "TORCHELASTIC_ERROR_FILE": "torch's launcher makes a directory of a random name",
}


def _asked(device: Device, strategy: Strategy) -> dict[str, Any]:
    """Return a small world; on GPUs each node has one rank, and all share the first GPU."""
    asked: dict[str, Any] = {"strategy": strategy}
    if strategy is Strategy.NONE:
        asked |= {"nodes": 1, "nproc_per_node": 1}
    if device is Device.CUDA:
        asked |= {"device": device, "nproc_per_node": 1, "gpus": ("0", "1")}
        asked |= {"world_contract": False}  # it refuses two ranks on one GPU
    return asked


def _started(job: AgentJob) -> AgentJob:
    if job.plan.device is Device.CUDA:
        return on_one_gpu(job)
    return job.start(in_lower_case="accelerate sets it again in capital letters")


def _lines(job: AgentJob, word: str) -> list[tuple[str, str]]:
    """Run a job; return the ranks' lines that begin with a word, and their ranks."""
    assert _started(job).wait() == [0] * job.plan.nodes, job.text() + job.errors()
    rows = [row for node in range(job.plan.nodes) for row in job.log(f"local{node}")]
    return [(rank, text) for _, rank, _, text in rows if text.startswith(f"{word} ")]


def _shown(job: AgentJob) -> dict[str, dict[str, Any]]:
    found = {rank: json.loads(text[6:]) for rank, text in _lines(job, "ABOUT")}
    assert len(found) == job.plan.world_size, job.text()
    job.assert_clean()
    return found


def _comparable(job: AgentJob, about: dict[str, Any]) -> dict[str, Any]:
    """Replace the paths of this job, and what belongs to one process."""
    about = {name: value for name, value in about.items() if name != "seeds"}
    # setuptools, which deepspeed imports, puts its own copies of packages last on the path.
    about["path"] = [path for path in about["path"] if not path.endswith("setuptools/_vendor")]
    spool = about["env"]["CLUSTERRUN_SPOOL"]
    env = {name: value for name, value in about["env"].items() if name not in OWN}
    text = json.dumps({**about, "env": env, "names": sorted(about["env"])})
    return dict(json.loads(text.replace(spool, "<spool>").replace(str(job.tmp.parent), "<job>")))


@pytest.mark.parametrize(("device", "strategy"), CASES)
def test_a_forked_rank_is_what_accelerate_launch_starts(
    torch_job: Make, device: Device, strategy: Strategy
) -> None:
    asked = _asked(device, strategy) | {"world_contract": False}
    jobs = {
        launcher: torch_job(SHOW, "--x", "a b", launcher=launcher, **asked)
        for launcher in (Launcher.ACCELERATE, Launcher.FORGE, Launcher.DIRECT)
    }
    shown = {launcher: _shown(job) for launcher, job in jobs.items()}
    assert "not as forks" not in jobs[Launcher.FORGE].text()
    for launcher in (Launcher.FORGE, Launcher.DIRECT):
        seeds = [tuple(about["seeds"]) for about in shown[launcher].values()]
        assert all(len(set(of_one)) == len(seeds) for of_one in zip(*seeds, strict=True)), seeds
        for rank, about in shown[launcher].items():
            expected = _comparable(jobs[Launcher.ACCELERATE], shown[Launcher.ACCELERATE][rank])
            found = _comparable(jobs[launcher], about)
            if strategy is Strategy.NONE:  # accelerate's launcher for one process makes no session
                expected["session"] = True
            assert found == expected, f"rank {rank} by {launcher.value}"


LOSSES = """
import tempfile
import torch
from accelerate import Accelerator
from clusterrun.rank.emit import rank

tempfile.tempdir = "/tmp"  # of the loader's socket, whose path must be short
accelerator = Accelerator()
torch.manual_seed(rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4, num_workers=1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    loss = model(batch.to(next(model.parameters()).dtype)).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", float(loss).hex(), flush=True)
"""


@pytest.mark.parametrize(("device", "strategy"), CASES)
def test_a_forked_rank_trains_bit_for_bit_as_one_of_accelerate_launch(
    torch_job: Make, device: Device, strategy: Strategy
) -> None:
    asked = _asked(device, strategy)
    launchers = (Launcher.FORGE, Launcher.ACCELERATE)
    jobs = [torch_job(LOSSES, launcher=launcher, **asked) for launcher in launchers]
    forked, launched = (_lines(job, "loss") for job in jobs)
    assert len(forked) == 16
    assert sorted(forked) == sorted(launched)
    assert "not as forks" not in jobs[0].text()


CAPTURE = """
import json, os, sys
import accelerate
from clusterrun.node.forge import launchers

for words in json.load(sys.stdin):
    reader, writer = os.pipe()
    if not os.fork():
        def answer(ranks):
            os.write(writer, json.dumps(ranks).encode())
            os._exit(0)
        launchers.capture(words, dict(os.environ), answer)
    os.close(writer)
    print(open(reader).read(), flush=True)
    os.wait()
"""


@pytest.mark.parametrize(
    "strategy",
    [
        *(Strategy.DDP, Strategy.ZERO3),
        *(pytest.param(strategy, marks=pytest.mark.long) for strategy in RARE),
    ],
)
def test_each_node_fills_in_what_accelerate_launch_would_set_there(
    torch_job: Make, monkeypatch: pytest.MonkeyPatch, strategy: Strategy
) -> None:
    size = 1 if strategy is Strategy.NONE else 2
    job = torch_job(
        SHOW,
        strategy=strategy,
        device=Device.CUDA,
        nodes=size,
        nproc_per_node=size,
        gpus=("0", "1", "2", "3"),
        mixed_precision=MixedPrecision.BF16,
    )
    monkeypatch.chdir(job.paths.root)
    monkeypatch.setenv("PET_RDZV_ID", "L1-1")
    monkeypatch.setenv("in_lower_case", "secret")
    nodes = [_attempt(job, node) for node in range(size)]
    met = LaunchParameters(address="10.0.0.1", port=20001, interface="", precision="bf16")
    asked = replace(met, address="127.0.0.1", port=1)
    log = ("--log_dir", str(job.tmp))
    words = [(*log, *launch_arguments(node, met)) for node in nodes]
    words.append((*log, *launch_arguments(nodes[0], asked)))
    shown = subprocess.run(
        [sys.executable, "-c", CAPTURE],
        input=json.dumps(words),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = [line for line in shown.stdout.splitlines() if line.startswith("[{")]
    *expected, template = map(json.loads, answers)
    variables = portable(common(template), os.environ, job.paths.root, str(job.paths.root))
    assert "secret" not in variables.values()
    spool = Spool(root=job.tmp)
    for node, ranks in zip(nodes, expected, strict=True):
        for local, theirs in enumerate(ranks):
            ours = of_rank(node, replace(met, variables=variables), os.environ, spool, local)
            if theirs.pop("TORCHELASTIC_ERROR_FILE", None):
                error_file = str(spool.launcher_dir / f"{local}.json")
                assert ours.pop("TORCHELASTIC_ERROR_FILE") == error_file
            assert ours == theirs, (strategy, node.who.node_rank, local)


def _attempt(job: AgentJob, node: int) -> Attempt:
    who = identity({"CLUSTERRUN_LOCAL_NODE_RANK": str(node)}, job.plan.nodes)
    return Attempt(plan=job.plan, paths=job.paths, number=1, who=who)


HOLDS = """
import json, os, pynvml, torch
from accelerate import Accelerator

def text(pid, name):
    return open(f"/proc/{pid}/{name}", errors="replace").read()

def open_devices(pid):
    files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return sorted({file for file in files if file.startswith("/dev/nvidia")})

accelerator = Accelerator()
kept = torch.ones(64, 1 << 20, device=accelerator.device)
accelerator.reduce(kept.sum())
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
holders = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
mine = [pid for pid in holders if os.environ["CLUSTERRUN_RUN_DIR"] in text(pid, "environ")]
forge = os.getppid()
print("HOLDS", json.dumps([os.getpid(), mine, text(forge, "cmdline"), open_devices(forge)]))
accelerator.wait_for_everyone()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.FSDP, Strategy.ZERO2])
def test_only_ranks_hold_memory_of_a_gpu(torch_job: Make, strategy: Strategy) -> None:
    job = torch_job(HOLDS, launcher=Launcher.FORGE, **_asked(Device.CUDA, strategy))
    rows = [json.loads(text[6:]) for _, text in _lines(job, "HOLDS")]
    ranks, holders, parents, devices = zip(*rows, strict=True)
    assert all("clusterrun: forge of" in parent for parent in parents), job.text()
    assert sorted(ranks) == sorted(holders[0]) == sorted(holders[1])
    assert devices == ([], [])
