"""The world contract, with stand-ins for torch and accelerate: what is checked, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterrun.node.forward.spool import Spool
from tests.patience import patience
from tests.ports import free_port
from tests.rank.place import JOIN, ONE, REAL, ROOT, STUB, World

STATE = """
from accelerate.state import PartialState
state = PartialState()
print('given', state.given, 'size', state.num_processes, 'local', state.local_rank)
"""


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_rank_that_joins_its_world_ends_well_and_takes_its_group_down(world: World) -> None:
    own = "import atexit, sys\natexit.register(print, 'mine')"
    assert world.run(f"{own}\n{JOIN}\nsys.exit(0)") == 0
    init = "init backend=gloo timeout=None"
    assert world.out().splitlines() == [init, "joined", "mine", "destroyed"]
    assert world.err() == ""
    assert world.run(JOIN + "\ndist.destroy_process_group()") == 0


def test_a_failing_rank_does_not_wait_for_its_group(world: World) -> None:
    script = "f = open('kept', 'w'); f.write('kept')\n" + JOIN + "\nraise ValueError('x')"
    assert world.run(script) == 1
    assert "destroyed" not in world.out()
    assert world.err().endswith("ValueError: x\n")
    assert (world.path / "kept").read_text() == "kept"


WRONG: list[tuple[dict[str, str | None], str]] = [
    ({"WORLD_SIZE": None}, "this process is a world of 1, but the job requested 2"),
    ({"WORLD_SIZE": "1"}, "the launcher started 1 rank in total, but the job requested 2"),
    ({"LOCAL_WORLD_SIZE": "2"}, "started 2 ranks on this node, but the job requested 1"),
    ({"RANK": "2"}, "RANK=2 is not valid in a world of 2"),
    ({"RANK": None}, "RANK=(not set) is not valid in a world of 2"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG)
def test_a_wrong_environment_ends_the_rank_before_the_script_starts(
    world: World, changes: dict[str, str | None], text: str
) -> None:
    rank = {"2": 2, None: 0}.get(changes.get("RANK", ""), 1)
    assert world.run("print('never')", **changes) == 120
    assert text in world.err(rank)
    assert world.err(rank).startswith("clusterrun: error: ")  # among `logs --errors`
    assert "use --set launch.world_contract=false to switch this check off" in world.err(rank)
    assert world.out(rank) == ""
    word = world.events("rank_exit", rank)[0]
    assert (word["code"], word["message"].startswith("world contract broken: ")) == (120, True)
    assert (world.spool / f"rank_{rank}.error.json").exists()


@pytest.mark.parametrize("size", [", world_size=2", ""])
def test_ranks_that_meet_by_remote_calls_have_joined(world: World, size: str) -> None:
    meet = f"from torch.distributed.rpc import init_rpc\ninit_rpc('w', rank=0{size})"
    assert world.run(meet, rank=0) == 0, world.err(0)
    (ready,) = world.events("world_ready")
    assert (ready["world_size"], ready["backend"]) == (2, "rpc")
    assert world.run("import torch.distributed.rpc as r; r.init_rpc('w', world_size=3)") == 120
    assert "init_rpc() has a world of 3, but the job requested 2" in world.err()
    assert "rpc w" not in world.out()


def test_accelerate_that_keeps_a_rank_to_itself_is_caught_with_the_reason(world: World) -> None:
    script = STATE.replace("\nstate", "\ntry:\n    state").replace("\nprint", "\n    print")
    assert world.run(script + "\nexcept BaseException:\n    pass\n") == 120
    assert "accelerate has a world of 1, but the job requested 2" in world.err()
    assert "no GPU is usable here and ACCELERATE_USE_CPU is not true" in world.err()


def test_the_backend_of_the_job_reaches_accelerate(world: World) -> None:
    assert world.run(STATE, ACCELERATE_USE_CPU="true") == 0, "a bare PartialState reads it, too"
    assert "given (True, {}) size 2" in world.out()
    assert world.run(STATE, CLUSTERRUN_BACKEND="gloo") == 0
    assert "given (False, {'backend': 'gloo'})" in world.out()
    none = STATE.replace("PartialState()", "PartialState(backend=None)")
    assert world.run(none, CLUSTERRUN_BACKEND="gloo") == 0
    assert world.out().count("given (False, {'backend': 'gloo'})") == 2
    own = STATE.replace("PartialState()", "PartialState(backend='nccl')")
    assert world.run(own, CLUSTERRUN_BACKEND="gloo") == 0
    assert "given (False, {'backend': 'nccl'})" in world.out()


def test_a_rank_that_never_joined_and_ends_well_has_broken_the_contract(world: World) -> None:
    assert world.run("import torch.distributed") == 120
    assert "this rank never joined the world of 2" in world.err()
    assert world.run("import sys; sys.exit(0)") == 120
    assert world.run("import sys; sys.exit(5)") == 5
    assert world.run("1 / 0") == 1


@pytest.mark.parametrize(("switch", "seen"), [("FSDP", "0"), ("DEEPSPEED", "0"), ("CPU", "None")])
def test_accelerate_makes_no_group_of_one_rank_unless_it_shards(
    world: World, switch: str, seen: str
) -> None:
    world.env |= {**ONE, f"ACCELERATE_USE_{switch}": "true"}
    assert world.run(STATE, rank=0) == 0, world.err(0)
    assert f"local {seen}\n" in world.out(0)


def test_the_contract_can_be_switched_off(world: World) -> None:
    off = {"CLUSTERRUN_WORLD_CONTRACT": "0"}
    assert world.run(STATE, **off) == world.run("pass", WORLD_SIZE="9", **off) == 0
    assert world.run(JOIN, STUB_GROUP="1", **off) == 0
    bare: dict[str, str | None] = {name: None for name in world.env if name.startswith("CLUSTER")}
    assert world.run(STATE, **bare) == 0, "outside a run"
    assert "size 1" in world.out()


def test_a_group_of_a_forked_child_is_its_own_business(world: World) -> None:
    script = f"""
import os
if os.fork() == 0:
    os.environ["WORLD_SIZE"] = os.environ["STUB_GROUP"] = "7"
    import torch.distributed as dist
    dist.init_process_group("gloo")
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
{JOIN}
"""
    assert world.run(script) == 0


def test_rank_0_proves_that_the_ranks_are_distinct(world: World) -> None:
    ranks = [
        world.start(rank, JOIN, CLUSTERRUN_NODE=f"n{rank}", RANK=str(rank)) for rank in range(2)
    ]
    assert [rank.wait(60 * patience()) for rank in ranks] == [0, 0]
    (ready,) = world.events("world_ready")
    assert (ready["world_size"], ready["hosts"]) == (2, ["n0", "n1"])
    assert (ready["backend"], ready["device"]) == ("gloo", "cpu")
    assert 0 < ready["waited_s"] < 60 * patience()
    assert world.events("world_ready", rank=1) == []


def test_two_ranks_in_one_place_break_the_contract(world: World) -> None:
    ranks = [world.start(rank, JOIN) for rank in range(2)]
    assert sorted(rank.wait(60 * patience()) for rank in ranks) == [0, 120]
    assert "2 ranks have LOCAL_RANK=0 on n0" in world.err(0)


def test_the_jobs_timeout_is_given_where_the_script_gives_none(world: World) -> None:
    assert world.run(JOIN, CLUSTERRUN_TIMEOUT_S="90") == 0
    assert "timeout=0:01:30" in world.out()


def test_the_jobs_timeout_beats_the_scripts_and_says_so_once(world: World) -> None:
    odd = JOIN.replace("'gloo'", "'gloo', colour='red'")
    assert world.run(odd, CLUSTERRUN_TIMEOUT_S="90") == 1, "torch itself refuses it"
    assert "init_process_group() got an unexpected keyword argument 'colour'" in world.err()
    script = """
from datetime import timedelta
import torch.distributed as dist
for _ in range(2):
    dist.init_process_group("gloo", None, timedelta(seconds=600))
"""
    (world.path / "clusterrun_world_1").write_text("n1\t0\tcpu")
    assert world.run(script, rank=0, CLUSTERRUN_TIMEOUT_S="90") == 0
    assert world.out(0).count("timeout=0:01:30") == 2
    note = "clusterrun: --timeout 90 s replaces the script's 0:10:00\n"
    assert world.err(0) == note


def test_a_torch_that_was_there_first_is_watched_too(world: World) -> None:
    site = world.path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import torch.distributed, accelerate.state")
    path = f"{site}:{STUB}:{ROOT}"
    assert world.run(JOIN, PYTHONPATH=path, STUB_GROUP="1") == 120
    assert world.run(STATE, PYTHONPATH=path) == 120
    assert world.run(JOIN, STUB_GROUP="1") == 120
    assert "torch.distributed has a world of 1, but the job requested 2" in world.err()
    assert "joined" not in world.out()


FREED_LATE = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

for n in range(15):
    meeting = f"file://{os.getcwd()}/meeting{n}"
    dist.init_process_group("gloo", meeting, rank=int(os.environ["RANK"]), world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
    dist.all_reduce(torch.zeros(3))
    dist.barrier()
    dist.destroy_process_group()
    del model
print("freed")
"""


@pytest.mark.torch
def test_a_model_that_goes_after_its_gloo_group_does_not_hang_the_rank(world: World) -> None:
    """Without the contract this hung in `del model`, each time that it was tried."""
    assert world.both(FREED_LATE) == [0, 0], world.err(0) + world.err(1)
    assert [world.out(rank) for rank in range(2)] == ["freed\n", "freed\n"]


OWN_PORTS = """
import os
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

def meet(_, url):
    dist.init_process_group("gloo", url, rank=int(os.environ["RANK"]), world_size=2)
    dist.barrier()
    print("met", flush=True)

if __name__ == "__main__":
    os.environ["MASTER_PORT"], other = os.environ["PORTS"].split()
    meet(0, "env://")
    multiprocessing.spawn(meet, [f"tcp://127.0.0.1:{other}"])
"""


@pytest.mark.torch
def test_rank_0_hosts_the_store_of_a_port_that_the_script_names(world: World) -> None:
    world.env |= {"PORTS": f"{free_port()} {free_port()}", "MASTER_PORT": str(free_port())}
    world.env |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert world.both(OWN_PORTS) == [0, 0], world.err(0) + world.err(1)
    assert [world.out(rank) for rank in range(2)] == ["met\nmet\n"] * 2


@pytest.mark.torch
@pytest.mark.parametrize("is_killed", [True, False])
def test_the_lock_of_a_build_is_known_while_a_rank_holds_it(world: World, is_killed: bool) -> None:
    lock = world.path / "a cache" / "lock"
    lock.parent.mkdir()
    script = f"""
import os
from torch.utils.file_baton import FileBaton
first, second = FileBaton({str(lock)!r}), FileBaton({str(lock)!r})
assert first.try_acquire() and not second.try_acquire()
if {is_killed}:
    os.kill(os.getpid(), 9)
first.release()
"""
    assert world.run(script, rank=0, **REAL, **ONE) == (-9 if is_killed else 0)
    assert lock.exists() is is_killed
    lines = Spool(root=world.spool).unlock()
    assert [str(lock) in line for line in lines] == [True] * is_killed
    assert not lock.exists()


# The engine: what trains is compared with what the launch and the script ask for


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


def test_a_script_that_trains_nothing_is_told_that_it_went_without_its_engine(world: World) -> None:
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
