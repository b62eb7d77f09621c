"""Checkpoints of nodes that share no directory: four ranks of two nodes, each with its own disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterrun.errors import ClusterrunError
from clusterrun.rank.collectives import SavedPart, problem_of
from clusterrun.shared.checkpoint_files import Checkpoint
from tests.rank.parent import TORCH, TRAINER, ranks
from tests.rank.test_hf import TRAIN

SAVED = {"h1": ["model", "random_0"], "h2": ["random_1"]}


def part(node: str, *names: str, saved_at: float = 1.0) -> SavedPart:
    """What a node has of the save of SAVED; without names it has nothing."""
    path = Path("/disk", node, "step-00000040")
    found = Checkpoint(
        path=path, step=40, world_size=2, attempt=1, saved_at=saved_at, settings={}, nodes=SAVED
    )
    files = dict.fromkeys(names, (1, 1))
    problem = "" if names else f"{node}: this node does not have it"
    return SavedPart(
        node=node, path=path, checkpoint=found if names else None, files=files, problem=problem
    )


H1, H2 = part("h1", *SAVED["h1"]), part("h2", *SAVED["h2"])
ALL = ("model", "random_0", "random_1")


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ((H1, H2), ""),
        ((H2, H1), ""),
        ((part("h1", *ALL), part("h3")), ""),  # h1 has fetched h2's part before
        ((part("h3"), part("h2", *ALL)), ""),
        ((H1, H2, part("h3")), ""),
        ((H1, part("h2")), "h2: this node does not have it"),
        ((part("h1", *ALL), part("h2")), "h2: this node does not have it"),
        ((part("h1"), part("h2")), "h1: this node does not have it"),
        ((H1, part("h2", "random_1", saved_at=2.0)), "h2: it has another save of this step"),
    ],
)
def test_a_checkpoint_needs_a_part_of_the_same_save_from_each_node_that_saved_it(
    parts: tuple[SavedPart, ...], problem: str
) -> None:
    assert problem_of(parts) == problem


@pytest.mark.parametrize("parts", [(H1,), (H1, part("h3"))])
def test_other_nodes_are_refused_if_they_lack_files(parts: tuple[SavedPart, ...]) -> None:
    with pytest.raises(ClusterrunError, match="1 of its files can be found only on h2") as error:
        problem_of(parts)
    assert error.value.hint == "run on the nodes that saved it: --hosts h1,h2"


COURSE = """
import json, os, shutil, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from clusterrun.rank import collectives
from clusterrun.rank.collectives import broadcast
from clusterrun.runtime import Checkpoints, rank
from clusterrun.shared import checkpoint_files

collectives.CHUNK = 1000
dist.init_process_group("gloo")
here, node = rank(), os.environ["CLUSTERRUN_NODE"]
disk = Path(os.environ["CLUSTERRUN_CHECKPOINT_DIR"])
told = {}

def at(step):
    return disk / f"step-{step:08d}"

def on(name, deed):
    dist.barrier()
    if node == name and os.environ["LOCAL_RANK"] == "0":
        deed()
    dist.barrier()

def step_of(deed):
    try:
        found = deed()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return found and getattr(found, "step", found)

def names(step):
    dist.barrier()
    return sorted(path.name for path in at(step).iterdir()) if at(step).exists() else None

class Training:
    def __init__(self):
        torch.manual_seed(here)
        self.model = DistributedDataParallel(torch.nn.Linear(64, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
    def steps(self, count):
        for _ in range(count):
            self.model(torch.randn(4, 64)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
    def write(self, folder):
        torch.save(torch.get_rng_state(), folder / f"random_{here}.pt")
        if here == 0:
            torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / "state.pt")
    def load(self, folder):
        model, optimizer = torch.load(folder / "state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(torch.load(folder / f"random_{here}.pt"))
    def digest(self):
        return [float(value) for value in self.model.module.weight.flatten()]

def only_first(folder):
    if here == 0:
        (folder / "model").write_text("weights")

def fails_on_2(folder):
    (folder / f"part_{here}").write_text("x")
    if here == 3:
        raise OSError(28, "No space left on device")

store = Checkpoints(keep=3)
told["none"] = step_of(store.newest)
whole = Training()
whole.steps(2)
told["saved"] = str(store.save(2, whole.write)) == str(at(2))
told["own"] = names(2)
whole.steps(2)
resumed = Training()
newest = store.newest()
told["complete"] = names(2)
resumed.load(newest.path)
resumed.steps(2)
told["equal"] = resumed.digest() == whole.digest()
collectives.broadcast = None  # nothing is left to send
told["again"] = step_of(store.newest)
collectives.broadcast = broadcast

told["full"] = step_of(lambda: store.save(3, fails_on_2))
dist.barrier()
told["after full"] = sorted(path.name for path in disk.iterdir())
renamed = checkpoint_files.publish
def publish(unfinished, final):
    if node == "h2":
        raise OSError(28, "No space left on device")
    renamed(unfinished, final)
checkpoint_files.publish = publish
told["unpublished"] = [step_of(lambda: store.save(3, only_first)), names(3)]
checkpoint_files.publish = renamed

store.save(4, only_first)
told["empty part"] = names(4)
on("h2", lambda: shutil.rmtree(at(4)))
told["lost"] = step_of(store.newest)
store.save(5, resumed.write)
on("h2", lambda: (at(5) / "random_3.pt").write_text("x"))
told["damaged"] = step_of(store.newest)

os.environ["CLUSTERRUN_NODE"] = {"h1": "h1", "h2": "h3"}[node]
spare = Checkpoints(disk if node == "h1" else disk.parent / "h3")
told["spare"] = step_of(spare.newest)
told["refused"] = step_of(spare.resumable)
on("h1", lambda: [shutil.rmtree(at(step)) for step in (4, 5)])
told["fetched"] = step_of(spare.resumable)
told["fetched files"] = sorted(p.name for p in (spare.directory / "step-00000002").iterdir())
os.environ["CLUSTERRUN_NODE"] = {"h1": "h3", "h2": "h4"}[node]
moved = Checkpoints(disk.parent / ("h3" if node == "h1" else "h4"))
told["only the spare is left"] = step_of(moved.newest)

os.environ["CLUSTERRUN_NODE"] = node
pruned = Checkpoints(disk.parent / f"{node}-pruned", keep=1)
for step in (1, 2, 3):
    pruned.save(step, only_first)
    pruned._await_tidying()
dist.barrier()
told["kept"] = sorted(path.name for path in pruned.directory.iterdir())

os.environ["CLUSTERRUN_HOSTS_APART"] = "h1"  # as two nodes that share a directory, beside others
os.environ["CLUSTERRUN_NODE"] = "x1"
both = Checkpoints(disk.parent / "both")
told["both"] = [step_of(lambda: bool(both.save(1, only_first))), step_of(both.newest)]
print(json.dumps(told))
dist.barrier()
dist.destroy_process_group()
"""
NODES = ("h1", "h1", "h2", "h2")


def world(folder: Path, *argv: str) -> list[tuple[str, str]]:
    """Run Python on two nodes of two ranks; return what each rank wrote."""

    def own(rank: int) -> dict[str, str]:
        disk = {"CLUSTERRUN_CHECKPOINT_DIR": str(folder / NODES[rank])}
        return {"LOCAL_RANK": str(rank % 2), "CLUSTERRUN_NODE": NODES[rank], **disk}

    modules = TRAINER if TRAIN in argv else TORCH
    folders = [folder / node for node in NODES]
    return ranks([*argv], folders, modules=modules, own=own, CLUSTERRUN_HOSTS_APART="1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """What the ranks got in each step of COURSE, and what rank 0 reported."""

    folder: Path
    told: list[dict[str, Any]]
    said: str

    def of(self, name: str) -> Mapping[str, Any]:
        """Return what a rank of each node got; both ranks of a node got the same."""
        values = [rank[name] for rank in self.told]
        assert values[0] == values[1], name
        assert values[2] == values[3], name
        return {"h1": values[0], "h2": values[2]}

    def every(self, name: str) -> Any:
        """Return what all ranks got."""
        values = self.of(name)
        assert values["h1"] == values["h2"], name
        return values["h1"]


@pytest.fixture(name="course", scope="module")
def _course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("apart")
    told = world(folder, "-c", COURSE)
    assert [err for _, err in told[1:] if "clusterrun:" in err] == []
    return Course(folder=folder, told=[json.loads(out) for out, _ in told], said=told[0][1])


@pytest.mark.torch
def test_each_node_keeps_what_its_ranks_wrote(course: Course) -> None:
    assert course.every("none") is None
    assert course.every("saved")
    assert course.of("own") == {
        "h1": [".complete", "random_0.pt", "random_1.pt", "state.pt"],
        "h2": [".complete", "random_2.pt", "random_3.pt"],
    }


ALL_FILES = [".complete", *(f"random_{rank}.pt" for rank in range(4)), "state.pt"]


@pytest.mark.torch
def test_a_resume_passes_on_what_a_node_lacks_and_ends_in_the_same_weights(course: Course) -> None:
    assert course.every("complete") == ALL_FILES
    assert course.every("equal")
    assert course.every("again") == 2
    assert "step-00000002: sending 1 MiB of files to nodes that lack them" in course.said


@pytest.mark.torch
def test_nodes_remove_their_old_checkpoints_and_may_share_a_directory(course: Course) -> None:
    assert course.every("kept") == ["step-00000003"]
    assert course.every("both") == [True, 1]
    marker = json.loads((course.folder / "both/step-00000001/.complete").read_text())
    assert marker["nodes"] == {"h1": ["model"]}


@pytest.mark.torch
def test_a_failure_on_one_node_leaves_the_step_unpublished_on_all(course: Course) -> None:
    assert course.every("full") is None
    assert course.every("after full") == ["step-00000002"]
    assert course.every("unpublished") == [None, None]
    assert "step 3 was not saved: No space left on device (rank 3); training" in course.said
    assert "step 3 was not saved: No space left on device (rank 2); training" in course.said


@pytest.mark.torch
def test_what_a_node_lost_or_damaged_is_passed_over_by_all(course: Course) -> None:
    assert course.of("empty part") == {"h1": [".complete", "model"], "h2": [".complete"]}
    assert course.every("lost") == course.every("damaged") == 2
    assert "step-00000004 is incomplete and was skipped: h2: this node does not" in course.said
    assert "step-00000005 is incomplete and was skipped: h2: random_3.pt has 1 by" in course.said


@pytest.mark.torch
def test_a_spare_node_resumes_if_the_others_have_all_files(course: Course) -> None:
    refused = "can't resume from step-00000005: 2 of its files can be found only on h2, "
    assert course.every("spare") == f"ClusterrunError: {refused}not on this job's nodes (h1, h3)"
    assert course.every("refused").startswith(f"SystemExit: error: {refused}")
    assert course.every("refused").endswith("run on the nodes that saved it: --hosts h1,h2")
    assert course.every("fetched") == 2
    assert course.every("fetched files") == ALL_FILES
    assert course.every("only the spare is left") == 2


def files(*checkpoints: Path) -> dict[str, bytes]:
    return {
        f"{path.parent.name}/{file.name}": file.read_bytes()
        for path in checkpoints
        for file in path.iterdir()
        if file.name != ".complete"
    }


@pytest.mark.torch
@pytest.mark.long
def test_a_trainer_ends_in_the_same_weights_and_saves_on_each_node(tmp_path: Path) -> None:
    last = [tmp_path / node / "out/checkpoint-9" for node in ("h1", "h2")]
    world(tmp_path, "-c", TRAIN, "steps")
    saved = files(*last)
    for path in last:
        path.rename(path.with_name("whole"))
    (_, said), *_ = world(tmp_path, "-c", TRAIN, "steps")
    assert files(*last) == saved
    assert "clusterrun: sets save_on_each_node=True: the nodes share no directory" in said
    assert {"out/model.safetensors", "out/rng_state_3.pth"} < {*saved}
    for node in ("h1", "h2"):
        marker = json.loads((tmp_path / node / "out/checkpoint-9/.complete").read_text())
        assert [*marker["nodes"]] == ["h1", "h2"]
        assert "model.safetensors" in marker["nodes"][node]
