"""The guide's DeepSpeed example: its tour, what it learns, and how it goes on, offloaded."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.patience import PATIENCE
from tests.readme import BLOCK, run
from tests.road import EXAMPLES, Project, project

HERE = EXAMPLES / "deepspeed_offload"
# The first run on a machine compiles DeepSpeed's optimizer, for some minutes.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
TWO = ("--cluster", "local", "--nproc-per-node", "2", "--device", "cpu")
DEBUG = ("train_captions.py", "--max-steps", "10", "--save-every", "5", "--log-every", "1")
SMALL = ("--width", "32", "--layers", "1", "--batch-size", "4", "--held-out", "9")


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    copied = project(tmp_path / "examples", tmp_path / "state")
    return replace(copied, path=copied.path / HERE.name)


@pytest.fixture(name="pairs")
def _pairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    import pairs

    return pairs


def train(here: Project, *argv: str) -> str:
    """Run to the end on this machine and return all that was printed."""
    here.ok("submit", "--wait", *TWO, *argv, timeout_s=500)
    return here.logs(here.json("status")["job_id"])


def losses(text: str) -> dict[int, float]:
    return {int(n): float(loss) for n, loss in re.findall(r"step (\d+)/\d+ loss (\S+)", text)}


def words_right(text: str) -> int:
    """Return the percentage, of which 29 is by chance."""
    found = re.search(r"held-out \d+ images: (\d+)% of the words right \(by chance 29%\)", text)
    assert found, text
    return int(found[1])


@pytest.mark.long
def test_the_tour_debugs_goes_on_and_captions_images_that_it_never_saw(tmp_path: Path) -> None:
    blocks = BLOCK.findall((HERE / "README.md").read_text())
    tour = "\n".join(block for name, _, block in blocks if name == "local")
    out = run(tour, tmp_path)
    assert "strategy deepspeed zero-2, optimizer in host memory, precision no" in out
    assert set(re.findall(r"rank (\d)/2 on local0 device cpu", out)) == {"0", "1"}
    assert len(re.findall(r"saved .*/step-00000005$", out, re.MULTILINE)) == 1
    assert re.search(r"resumed from .*/step-00000010 at step 10$", out, re.MULTILINE)
    debugged, trained = out.split("resumed from")
    assert words_right(trained) > 75 > words_right(debugged)
    params = yaml.safe_load((HERE / "clusterrun.yaml").read_text())["training"]["params"]
    assert f"model {params} parameters" in out


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "said"),
    [("zero3-offload", "zero-3, optimizer and weights in host memory")],  # the tour has zero2
)
def test_an_offloaded_run_goes_on_from_a_checkpoint_with_the_same_losses(
    here: Project, strategy: str, said: str
) -> None:
    whole = train(here, "--strategy", strategy, *DEBUG, *SMALL)
    assert f"strategy deepspeed {said}, precision no" in whole
    assert sorted(losses(whole)) == list(range(1, 11))
    job_id = here.json("status")["job_id"]
    here.ok("resume", job_id, "--from", "step-5", timeout_s=60)
    here.ok("status", job_id, "--wait", "--exit-status", timeout_s=300)
    second = here.ok("logs", job_id, "--attempt", "2", "-n", "all", "--no-dedup")
    assert re.search(r"resumed from .*/step-00000005 at step 5\n", second)
    expected = {step: loss for step, loss in losses(whole).items() if step > 5}
    assert losses(second) == {step: pytest.approx(loss) for step, loss in expected.items()}


@pytest.mark.long
def test_images_are_taken_in_the_precision_of_the_weights(here: Project) -> None:
    words = ("--strategy", "zero2-offload", "--mixed-precision", "bf16")
    text = train(here, *words, *DEBUG, *SMALL)
    assert "precision bf16" in text
    assert losses(text)[10] < losses(text)[1]


@pytest.mark.long
def test_a_checkpoint_of_another_strategy_is_refused_in_one_line(
    here: Project, tmp_path: Path
) -> None:
    words = (*DEBUG[:3], *SMALL, "--output", str(tmp_path / "kept"))
    train(here, "--strategy", "zero2-offload", *words)
    again = here.cli("submit", "--wait", *TWO, "--strategy", "ddp", *words)
    assert again.returncode != 0
    text = here.logs(here.json("status")["job_id"])
    assert "can't go on from" in text
    assert "sharding was deepspeed zero-2, optimizer in host memory and is multi_cpu" in text
    assert "Traceback" not in text


@pytest.mark.long
def test_one_process_trains_without_a_launcher(here: Project, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *DEBUG[:3], *DEBUG[-2:], *SMALL], cwd=here.path, env={**here.environ},
        capture_output=True, text=True, timeout=120 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "strategy no, precision no" in done.stdout
    assert words_right(done.stdout) <= 100
    assert losses(done.stdout).keys() == set(range(1, 11))


def test_a_pair_depends_on_the_seed_and_its_number_alone(pairs: Any) -> None:
    first, again = pairs.Pairs(3, 10), pairs.Pairs(3, 1)
    for one, other in zip(first[7], again[7], strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[7][0], pairs.Pairs(4, 10)[7][0])


def test_an_image_shows_the_colour_at_the_place_of_its_caption(pairs: Any) -> None:
    for index in range(40):
        image, words = pairs.Pairs(0, 40)[index]
        _, colour, _, place = (pairs.WORDS[word] for word in words)
        x, y = pairs.CENTRE[place]
        around = image[:, y - 1 : y + 2, x - 1 : x + 2] * pairs.SPREAD + pairs.MEAN
        colours = around.flatten(1).T.tolist()
        assert any(seen == pytest.approx(pairs.COLOUR[colour], abs=1e-6) for seen in colours)
