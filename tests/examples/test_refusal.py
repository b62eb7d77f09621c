"""When the example goes on from a checkpoint whose steps were divided in another way."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from resume import STATE, check_division

from clusterrun.runtime import Checkpoint

pytestmark = pytest.mark.torch


def divided(folder: Path, *, ranks: int, accumulation: int, exact: bool, dropout: float) -> None:
    (folder / STATE).write_text(json.dumps({"accumulation": 1}))
    saved = Checkpoint(path=folder, step=3, world_size=4, attempt=1, saved_at=0.0, settings={})
    accelerator = SimpleNamespace(num_processes=ranks, is_main_process=True)
    args = argparse.Namespace(accumulation=accumulation, exact=exact, dropout=dropout)
    check_division(saved, accelerator, args)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "dropout", "is_said"),
    [(4, 1, 0.1, False), (2, 2, 0.0, False), (2, 2, 0.1, True), (4, 2, 0.1, True)],
)
def test_other_masks_of_dropout_are_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ranks: int,
    accumulation: int,
    dropout: float,
    *,
    is_said: bool,
) -> None:
    divided(tmp_path, ranks=ranks, accumulation=accumulation, exact=False, dropout=dropout)
    assert ("dropout draws other masks" in capsys.readouterr().out) is is_said


def test_the_same_bits_need_the_same_sums(tmp_path: Path) -> None:
    divided(tmp_path, ranks=4, accumulation=1, exact=True, dropout=0.0)
    with pytest.raises(SystemExit, match="accumulation was 1 and is 2, but --exact needs"):
        divided(tmp_path, ranks=4, accumulation=2, exact=True, dropout=0.0)
