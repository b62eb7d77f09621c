"""Training scripts that packages ship: nothing is found in them, since nothing in them is wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterrun.linting.rule import lint
from tests.linting.test_rules import LAUNCHES

LEAST = 10
_SCRIPTS = "script sync ops merge_weights ddp_comm_hook distributed_data_loop"
_WITH_MODELS = (
    "checkpointing metrics performance pippy peak_memory_usage zero3_integration "
    "ds_multiple_model ds_alst_ulysses_sp"
)
_ACCELERATE = "accelerate/test_utils/scripts"
SCRIPTS = (
    *(f"{_ACCELERATE}/test_{name}.py" for name in _SCRIPTS.split()),
    *(f"{_ACCELERATE}/external_deps/test_{name}.py" for name in _WITH_MODELS.split()),
)
# `make test-all` installs these.
MORE = (
    *(f"trl/scripts/{name}.py" for name in ("sft", "dpo", "kto", "grpo", "reward", "rloo")),
    *(f"lightning/pytorch/demos/{name}.py" for name in ("transformer", "lstm", "boring_classes")),
    "torchtitan/train.py",
)
# Added to each script: a linter that reads nothing would also find nothing.
PITFALL = b'\nimport os\nos.environ["MASTER_PORT"] = "29500"\n'


def _found(scripts: tuple[str, ...]) -> Iterator[Path]:
    for name in scripts:
        package, _, rest = name.partition("/")
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            if (path := Path(place, rest)).is_file():
                yield path


def _in(path: Path, launch: str) -> list[tuple[str, str]]:
    found = lint(path.read_bytes() + PITFALL, LAUNCHES[launch])
    return [(each.id, each.text.partition(":")[0]) for each in found]


ONLY_OURS = [("fixed-port", "MASTER_PORT is set to 29500")]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_nothing_is_found_in_scripts_of_accelerate(launch: str) -> None:
    found = {path: _in(path, launch) for path in _found(SCRIPTS)}
    assert len(found) >= LEAST
    assert {path: each for path, each in found.items() if each != ONLY_OURS} == {}


@pytest.mark.long
@pytest.mark.parametrize("launch", LAUNCHES)
def test_nothing_is_found_in_scripts_of_other_trainers(launch: str) -> None:
    paths = list(_found(MORE))
    if len(paths) < len(MORE) // 2:
        pytest.skip("trl and lightning are not installed")
    assert {path.name: _in(path, launch) for path in paths} == {p.name: ONLY_OURS for p in paths}
