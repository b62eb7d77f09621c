"""The process that computes answers in lines of JSON, whatever libraries print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NOISY = """
import os
os.write(1, b"NCCL version 2.27.5\\n")
raise ImportError("libcudart.so.12")
"""


def test_what_a_library_prints_is_no_answer(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(NOISY)
    group = {"interface": "", "address": "127.0.0.1", "port": 1, "rank": 0, "world": 1}
    done = subprocess.run(
        [sys.executable, "-m", "clusterrun.health.probe", "cpu"],
        input=json.dumps(group) + "\n",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert answers == [{"error": "ImportError: libcudart.so.12"}] * 2
    assert "NCCL version" in done.stderr
