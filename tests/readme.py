"""The code blocks of README and docs, and a place to run them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.checkout import EXAMPLES, ROOT, copy_listed
from tests.patience import finished

BLOCK = re.compile(r"<!-- test: (\w+) -->\n```(\w+)\n(.*?)```", re.DOTALL)


def blocks(kind: str, page: str = "README.md") -> list[str]:
    """Return the blocks of a page that a comment marks as of this kind."""
    found = BLOCK.findall((ROOT / page).read_text())
    return [text for name, _, text in found if name == kind]


def tour(kind: str, page: str = "README.md") -> str:
    """Return those blocks as one script; one that enters the examples starts from the clone."""
    return "\n".join(blocks(kind, page)).replace("cd examples", 'cd "$CLONE/examples"')


def run(script: str, tmp_path: Path) -> str:
    """Run a script in a copy of the examples and the environment, as in a clone after `make demo`.

    /tmp is a directory of the test's own.
    """
    copy_listed(EXAMPLES, tmp_path / "examples")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    env = {
        **os.environ,
        "CLONE": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    argv = ["bash", "-euo", "pipefail", "-c", script.replace("/tmp/", f"{scratch}/")]
    done = finished(argv, timeout_s=500, cwd=tmp_path, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
