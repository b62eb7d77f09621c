"""A rank that trains and has joined nothing ends at its first step, also in its own processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterrun.rank import import_hooks
from clusterrun.shared.control_page import ControlPage
from tests.rank.place import JOIN, ONE, REAL, World

STEP = """
from torch.optim.optimizer import Optimizer, Parameter, _global_optimizer_pre_hooks
def train(*_, grad=1.0):
    parameter = Parameter()
    parameter.grad = grad
    Optimizer([parameter]).step()
    print("stepped", len(_global_optimizer_pre_hooks), flush=True)
"""
START = {
    "fork": "import os\nif not os.fork():\n    train()\n    os._exit(0)\nos.wait()",
    "spawn": (
        "import multiprocessing\ncontext = multiprocessing.get_context('spawn')\n"
        "process = context.Process(target=train)\nprocess.start()\nprocess.join()"
    ),
    "forkserver": (
        "import multiprocessing\ncontext = multiprocessing.get_context('forkserver')\n"
        "process = context.Process(target=train)\nprocess.start()\nprocess.join()"
    ),
    "mp.spawn": "import torch.multiprocessing\ntorch.multiprocessing.spawn(train, nprocs=2)",
}
NEVER_REACHED = "print('after the processes')"
CHILD = "this rank started a process that trains separately from the job's world of 2"


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.spool.mkdir()
    ControlPage(made.spool / "control", 1)
    return made


def has_joined(world: World) -> bool:
    return ControlPage(world.spool / "control", 1).has_joined(0)


def main(source: str) -> str:
    """Write a script whose last part is not run in the processes that it starts."""
    body = "".join(f"\n    {line}" for line in source.splitlines())
    return f"{STEP}\nif __name__ == '__main__':{body}\n"


def test_a_rank_that_never_joins_ends_at_its_first_step(world: World) -> None:
    assert world.run(main("train()")) == 120
    assert "this rank trains alone, but the job requested a world of 2" in world.err()
    assert "hint: call torch.distributed.init_process_group()" in world.err()
    assert world.out() == ""
    (word,) = world.events("rank_exit", 1)
    assert "init_process_group()" in word["message"]
    assert word["message"].endswith(
        "use --set launch.world_contract=false to switch this check off"
    )


def test_steps_without_gradients_and_a_join_before_the_first_are_fine(world: World) -> None:
    assert world.run(main(f"train(grad=None)\n{JOIN}\ntrain()\ntrain()")) == 0
    steps = [line for line in world.out().splitlines() if line.startswith("stepped")]
    assert steps == ["stepped 1", "stepped 0", "stepped 0"]  # no hook stays behind
    assert has_joined(world)


def test_a_rank_alone_and_a_contract_that_is_off_are_not_checked(world: World) -> None:
    assert world.run(main("train()"), CLUSTERRUN_WORLD_CONTRACT="0") == 0
    assert world.run(main("train()"), rank=0, **ONE) == 0
    assert world.out() == world.out(0) == "stepped 0\n"


@pytest.mark.parametrize("how", START)
def test_a_process_that_a_rank_starts_must_not_train_beside_the_world(
    world: World, how: str
) -> None:
    assert world.run(main(f"{START[how]}\n{NEVER_REACHED}\n1 / 0")) in (1, 120)
    assert CHILD in world.err()
    assert "hint: call the training function directly" in world.err()
    assert "stepped" not in world.out()
    words = world.events("rank_exit", 1)  # what the rank itself meets then is a consequence
    assert {(word["code"], CHILD in word["message"]) for word in words} == {(120, True)}


@pytest.mark.parametrize("how", START)
def test_processes_of_a_rank_that_has_joined_may_train_what_they_like(
    world: World, how: str
) -> None:
    assert world.run(main(f"{JOIN}\n{START[how]}")) == 0, world.err()
    assert "stepped" in world.out()


ONE_CHILD = f"""
def join(i, rank, size):
    import os
    os.environ.update(RANK=rank, WORLD_SIZE=size, STUB_GROUP=size)
    {JOIN.replace(chr(10), chr(10) + "    ")}
    train()
"""


def test_a_process_that_joins_in_place_of_its_rank_is_the_rank(world: World) -> None:
    script = main("import torch.multiprocessing as mp\nmp.spawn(join, ('1', '2'))")
    assert world.run(script.replace("\nif __name__", f"{ONE_CHILD}\nif __name__")) == 0
    assert world.out().splitlines()[1:] == ["joined", "stepped 0"]
    assert has_joined(world)


@pytest.mark.parametrize(("rank", "size"), [("0", "2"), ("1", "4")])
def test_a_join_that_would_wait_in_vain_ends_the_rank_before_it(
    world: World, rank: str, size: str
) -> None:
    script = main(f"import torch.multiprocessing as mp\nmp.spawn(join, ({rank!r}, {size!r}))")
    assert world.run(script.replace("\nif __name__", f"{ONE_CHILD}\nif __name__")) == 1
    assert CHILD in world.err()
    assert "init" not in world.out()


def test_a_server_for_inference_may_make_a_world_of_its_own(world: World) -> None:
    serve = ONE_CHILD.replace("train()", "print('serves')")
    script = main(START["spawn"].replace("target=train", "target=join, args=(0, '0', '1')"))
    script = script.replace("\nif __name__", f"{serve}\nif __name__")
    assert world.run(f"{script}\n    {JOIN.replace(chr(10), chr(10) + '    ')}") == 0, world.err()
    assert "serves" in world.out()


def test_a_size_that_is_too_large_is_refused_before_the_rank_waits(world: World) -> None:
    script = "import torch.distributed as dist\ndist.init_process_group('gloo', world_size=8)"
    assert world.run(script) == 120
    assert "init_process_group() has a world of 8, but the job requested 2" in world.err()
    assert world.out() == ""


REAL_SPAWN = """
import torch
def train(i):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    print("stepped")
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""


@pytest.mark.torch
def test_torchs_own_spawn_and_optimizer_are_watched(world: World) -> None:
    assert world.run(REAL_SPAWN, **REAL) == 1
    assert CHILD in world.err()
    assert "stepped" not in world.out()
    assert world.events("rank_exit", 1)[0]["code"] == 120


def test_a_spawned_process_runs_also_if_the_checks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def install() -> None:
        raise RuntimeError("another module of this name")

    monkeypatch.setattr(import_hooks, "install", install)
    before = sys.path[:]
    exec(import_hooks._INSTALL, {})
    assert sys.path == before
