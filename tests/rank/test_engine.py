"""The engine: what trains is compared with what the launch and the script ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ports import free_port
from tests.rank.place import JOIN, REAL, World

MEET = """
import os
import torch
import torch.distributed as dist

meeting = f"file://{os.getcwd()}/meeting"
dist.init_process_group("gloo", meeting, rank=int(os.environ["RANK"]), world_size=2)
model = torch.nn.Linear(4, 4)
"""
SHARD = {
    "fully_shard": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
""",
    "FSDP": """
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
""",
}
# One parameter over a mesh of both ranks, or of each rank alone, as tensor parallel of size 1 has.
SPREAD = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))[{dim!r}]
weight = distribute_tensor(model.weight.data, mesh, [Shard(0)])
model.weight = torch.nn.Parameter(weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model.weight.to_local().sum().backward()
    model.weight.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    optimizer.step()
print("stepped")
"""
REPLICATE = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
"""
# As many do before they make a scheduler.
IDLE_STEP = """
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""
TRAIN = """
from torch.optim.optimizer import _global_optimizer_pre_hooks
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hooks = len(_global_optimizer_pre_hooks)
model(torch.randn(2, 4)).sum().backward()
optimizer.step()
print("stepped", hooks)
"""
ALONE = "import torch\nmodel = torch.nn.Linear(4, 4)" + TRAIN
IMPORTED = "import sys\nsys.modules['accelerate'] = type(sys)('accelerate')  # by the forge\n"
ACCELERATE = """
import os
from accelerate import Accelerator, FullyShardedDataParallelPlugin
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT={port!r})
Accelerator({given})
print("accelerates")
"""


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_script_that_trains_nothing_is_told_that_it_went_without_its_engine(
    world: World,
) -> None:
    for engine in ("deepspeed", "fsdp"):
        assert world.run(JOIN, CLUSTERRUN_ENGINE=engine) == 0
        assert world.events("rank_exit", 1)[-1]["code"] == 0
    said = "clusterrun: the launch requested FSDP, but the script ended without it\n"
    assert world.err().endswith(said)
    for quiet in ({"CLUSTERRUN_ENGINE": engine} for engine in ("ddp", "none", "", "another")):
        assert world.run(JOIN, **quiet) == 0
    assert world.run(JOIN, **{"CLUSTERRUN_ENGINE": "fsdp", "CLUSTERRUN_WORLD_CONTRACT": "0"}) == 0
    assert world.err().count("ended without it") == 2  # of the first two runs


@pytest.mark.torch
@pytest.mark.parametrize("engine", ["deepspeed", pytest.param("fsdp", marks=pytest.mark.long)])
def test_a_whole_model_in_each_rank_ends_at_its_first_step(world: World, engine: str) -> None:
    assert world.run(IMPORTED + ALONE, CLUSTERRUN_ENGINE=engine, **REAL) == 120
    assert "but a whole model in each rank would train instead" in world.err()
    assert "stepped" not in world.out()
    word = world.events("rank_exit", 1)[-1]
    assert "or use --strategy ddp" in word["message"]
    assert "launch.world_contract=false" in word["message"]


@pytest.mark.torch
@pytest.mark.long
def test_the_check_of_a_step_can_be_switched_off_and_ddp_has_none(world: World) -> None:
    off = {"CLUSTERRUN_ENGINE": "fsdp", "CLUSTERRUN_WORLD_CONTRACT": "0"}
    assert world.run(ALONE, **off, **REAL) == 0
    assert world.out() == "stepped 0\n"
    assert world.both(MEET + REPLICATE + TRAIN, CLUSTERRUN_ENGINE="ddp") == [0, 0]
    assert world.out() == "stepped 0\n" * 2


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "launch"),
    [("fully_shard", "fsdp"), pytest.param("FSDP", "ddp", marks=pytest.mark.long)],
)
def test_a_model_may_always_be_sharded(world: World, kind: str, launch: str) -> None:
    script = MEET + IDLE_STEP + SHARD[kind] + TRAIN
    assert world.both(script, CLUSTERRUN_ENGINE=launch) == [0, 0]
    assert world.out() == "stepped 0\n"  # the step costs nothing
    assert [event["engine"] for event in world.events("engine")] == ["fsdp"]
    assert world.events("engine", 1) == []


@pytest.mark.torch
def test_plain_ddp_under_a_launch_of_fsdp_ends_at_its_first_step(world: World) -> None:
    assert world.both(MEET + REPLICATE + TRAIN, CLUSTERRUN_ENGINE="fsdp") == [120, 120]
    assert "the launch requested FSDP, but plain DDP would train instead" in world.err()
    assert "stepped" not in world.out()
    assert [event["engine"] for event in world.events("engine")] == ["ddp"]


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize(("dim", "ends"), [("dp", [0, 0]), ("tp", [120, 120])])
def test_parameters_spread_over_all_ranks_are_sharded_and_over_fewer_are_not(
    world: World, dim: str, ends: list[int]
) -> None:
    assert world.both(MEET + SPREAD.format(dim=dim), CLUSTERRUN_ENGINE="fsdp") == ends
    engines = [event["engine"] for event in world.events("engine")]
    assert engines == (["fsdp"] if dim == "dp" else [])


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("own", [True, False])
def test_accelerate_that_leaves_fsdp_out_on_a_cpu_is_caught(world: World, own: bool) -> None:
    given = "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)" if own else ""
    engine = "ddp" if own else "fsdp"
    script = ACCELERATE.format(port=str(free_port()), given=given)
    ended = world.both(script, CLUSTERRUN_ENGINE=engine, ACCELERATE_USE_CPU="true")
    assert set(ended) <= {120, 1}, world.err(0)  # one may meet the other's end first
    assert "accelerates" not in world.out(0) + world.out(1)
    said = world.err(ended.index(120))
    who = "the script itself" if own else "the launch"
    assert f"{who} requested FSDP, but plain DDP would train instead" in said
    assert "cause: accelerate shards with FSDP on GPUs only" in said
    assert "hint: use --strategy zero2, which also shards on a CPU" in said
