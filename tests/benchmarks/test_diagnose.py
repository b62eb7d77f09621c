"""The benchmark of diagnose: its score of a few logs, and that its measurement still runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.diagnose import hang, score, subtraction
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
LOGS = {
    "oom": ("cuda_oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"),
    "limit": (
        "slurm_time_limit",
        "error: *** JOB 7 ON n1 CANCELLED AT 10:00 DUE TO TIME LIMIT ***\n",
    ),
    "fine": ("benign_warning", "step 1 loss 2.5\n"),
}


def _written(root: Path, **logs: tuple[str, str]) -> Path:
    for name, (cause, text) in logs.items():
        (root / name).mkdir()
        (root / name / "log.txt").write_text(text)
        (root / name / "meta.json").write_text(json.dumps({"cause": cause}))
    return root


def test_right_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score.run(_written(tmp_path, **LOGS), least=1.0) == 0
    assert "right 3 (100%)  wrong 0 (0%)  silent 0 (0%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cause", "text", "least"),
    [
        pytest.param("cuda_oom", "ZeroDivisionError\n", 0.95, id="too few are right"),
        pytest.param("benign_warning", LOGS["oom"][1], 0.0, id="a cause where nothing failed"),
    ],
)
def test_wrong_answers(tmp_path: Path, cause: str, text: str, least: float) -> None:
    assert score.run(_written(tmp_path, one=(cause, text)), least=least) == 1


def test_subtraction_is_measured(tmp_path: Path) -> None:
    subtraction.run(tmp_path / "results", most=12)
    (section,) = json.loads((tmp_path / "results.json").read_text())["sections"]
    both, failed_only, _ = section["rows"]
    assert float(both["wrong with"][:-1]) < float(both["wrong without"][:-1])
    assert failed_only["wrong with"] == failed_only["wrong without"]


@pytest.mark.long
def test_runs_of_many_ranks_are_measured(tmp_path: Path) -> None:
    results = tmp_path / "results"
    argv = [sys.executable, "-m", "benchmarks.diagnose", "scale", "--runs", "1"]
    argv += ["--dir", str(tmp_path), "--results", str(results)]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=300 * patience())
    (section,) = json.loads(results.with_suffix(".json").read_text())["sections"]
    assert len(section["rows"]) == 4
    assert all(row["peak_MB"] < 200 for row in section["rows"])
    (run,) = (tmp_path / "runs" / "hang64").iterdir()
    argv = [score.CLUSTERRUN, "diagnose", str(run), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["class"], verdict["ranks"]) == ("hang_rank_missing", str(hang.LATE))
