"""The example in real worlds of processes: it learns, and a cut run goes on as if never cut."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from clusterrun.shared.control_page import ControlPage
from tests.examples.worlds import EXAMPLES, IN_A_RUN, asked_to_leave, held_out, printed, train

pytestmark = pytest.mark.torch
long = pytest.mark.long

TINY = "--layers 1 --width 32 --held-out 9 --batch-size 4 --warmup 3 --max-steps 8 --log-every 1"
SAVING = "--output out --save-every 3 --keep 9"


def flags(*parts: str) -> list[str]:
    return " ".join(parts).split()


def steps(text: str) -> dict[int, tuple[float, float]]:
    lines = re.findall(r"^step (\d+)/\d+ loss (\S+) lr (\S+) tok/s \d+$", text, re.MULTILINE)
    return {int(step): (float(loss), float(lr)) for step, loss, lr in lines}


def tensors(path: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint by file and name."""
    found: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        if file.suffix == ".safetensors":
            found |= {f"{file.name}/{name}": value for name, value in load_file(file).items()}
        elif file.suffix in {".bin", ".pt", ".pkl"}:
            content = torch.load(file, weights_only=False)
            found |= {f"{file.name}{name}": value for name, value in leaves(content)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from leaves(item, f"{name}/{key}")
    else:
        yield name, value


@long
def test_a_run_that_is_asked_leaves_with_a_checkpoint_and_its_next_attempt_ends_in_the_same_bits(
    tmp_path: Path,
) -> None:
    options = flags(TINY, SAVING, "--exact --dropout 0.1")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    first, page = asked_to_leave(cut, 4), ControlPage(cut / "control", 2)
    text = printed(train(whole, "ddp", 2, *options))
    assert printed(train(cut, "ddp", 2, *options, environ=first)).splitlines()[-2:] == [
        f"saved {cut}/out/step-00000004",
        "stopped at step 4, saved",
    ]
    assert [page.has_stopped(rank) for rank in range(2)] == [True, True]
    second = IN_A_RUN | {"CLUSTERRUN_ATTEMPT": "2"}
    resumed = printed(train(cut, "ddp", 2, *options, environ=second))
    assert f"resumed from {cut}/out/step-00000004 at step 4" in resumed
    assert held_out(resumed) == held_out(text)
    expected, found = (tensors(folder / "out/step-00000008") for folder in (whole, cut))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def set_back(folder: Path) -> None:
    """Leave the checkpoint of step 3 as the newest complete one."""
    for step in (6, 8):
        (folder / f"out/step-{step:08d}/.complete").unlink()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("none", 1, "--batch-size 16"), ("none", 1, "--batch-size 8 --accumulation 2")),
        *(
            pytest.param(*worlds, marks=long)
            for worlds in [
                (("ddp", 2, "--batch-size 16"), ("ddp", 2, "--batch-size 8 --accumulation 2")),
                (("ddp", 2, "--batch-size 4"), ("none", 1, "--batch-size 8")),
                (("none", 1, "--batch-size 8"), ("ddp", 2, "--batch-size 4")),
                (("zero2", 2, "--batch-size 16"), ("zero2", 2, "--batch-size 8 --accumulation 2")),
            ]
        ),
    ],
)
def test_the_same_effective_batch_goes_on_with_the_same_windows_rates_and_losses(
    tmp_path: Path, before: tuple[str, int, str], after: tuple[str, int, str]
) -> None:
    text = printed(train(tmp_path, *before[:2], *flags(TINY, SAVING, before[2])))
    set_back(tmp_path)
    run = train(tmp_path, *after[:2], *flags(TINY, SAVING, "--resume", after[2]))
    resumed = printed(run)
    assert "checkpoint step-00000008 is incomplete and was skipped: it has no" in run.stderr
    assert steps(resumed) == {step: values for step, values in steps(text).items() if step > 3}
    assert held_out(resumed) == held_out(text)


@long
def test_another_batch_or_rate_is_refused_and_a_rate_may_be_overridden(tmp_path: Path) -> None:
    printed(train(tmp_path, "none", 1, *flags(TINY, SAVING)))
    set_back(tmp_path)
    again = flags(TINY, SAVING, "--resume --lr 1e-3")
    refused = train(tmp_path, "none", 1, *again, "--batch-size", "2")
    assert refused.returncode == 1
    assert "effective_batch was 4 and is 2; lr was 0.002 and is 0.001\n" in refused.stderr
    assert "accumulation x ranks = 4; accept the change with --override lr" in refused.stderr
    assert "Traceback" not in refused.stderr
    run = train(tmp_path, "none", 1, *again, "--override", "lr")
    assert "resuming with lr 0.001 instead of 0.002 (override)" in run.stderr
    assert max(rate for _, rate in steps(printed(run)).values()) == pytest.approx(1e-3)
    marker = json.loads((tmp_path / "out/step-00000008/.complete").read_text())
    assert marker["overrides"] == [{"step": 3, "settings": {"lr": [0.002, 0.001]}}]


@long
@pytest.mark.parametrize("strategy", ["zero2-offload", "zero3", "fsdp"])
def test_sharded_strategies_resume_with_rate_and_data_in_step(
    tmp_path: Path, strategy: str
) -> None:
    text = printed(train(tmp_path, strategy, 2, *flags(TINY, SAVING)))
    expected = tensors(tmp_path / "out/step-00000008")
    set_back(tmp_path)
    resumed = printed(train(tmp_path, strategy, 2, *flags(TINY, SAVING, "--resume")))
    assert steps(resumed) == {step: value for step, value in steps(text).items() if step > 3}
    assert held_out(resumed) == held_out(text)
    found = tensors(tmp_path / "out/step-00000008")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@long
def test_a_deepspeed_config_with_optimizer_and_scheduler_decides_both(tmp_path: Path) -> None:
    own = EXAMPLES / "ds_zero2_auto.json"
    options = flags(TINY, SAVING, "--accumulation 2")
    text = printed(train(tmp_path, "own", 2, *options, json_file=own))
    assert "\nbatch 4 x 2 accumulation x 2 ranks = 16 windows a step\n" in text
    rates = [rate for _, rate in steps(text).values()]
    assert rates[0] == 0
    assert max(rates) == pytest.approx(2e-3)
    # WarmupDecayLR falls in a line from the end of the warm-up (3) to 0 at the last step (8), and
    # is one step late: the rate of the first step comes from before it started.
    assert rates[-1] == pytest.approx(2e-3 * 2 / 5, rel=0.05)
    set_back(tmp_path)
    resumed = printed(train(tmp_path, "own", 2, *options, "--resume", json_file=own))
    assert steps(resumed) == {step: value for step, value in steps(text).items() if step > 3}
