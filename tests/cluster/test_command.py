"""The command line of the test cluster, without a cluster."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster import __main__ as program
from tests.cluster.cluster import Cluster


@pytest.mark.parametrize("line", ['eval "$1"', "eval $1"])
def test_what_up_prints_can_be_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    monkeypatch.setattr(Cluster, "up", lambda _: False)
    monkeypatch.setattr(program, "_need_root", lambda: None)
    monkeypatch.setattr("sys.argv", ["tests.cluster", "up", "--slot", "99"])
    assert program.main() == 0
    told = capsys.readouterr().out
    assert told.splitlines()[-1] == program.NEXT
    shell = ["bash", "-c", f'{line}; echo "$SLURM_CONF"', "bash", told]
    done = subprocess.run(shell, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.endswith("-99/slurm.conf\n")
