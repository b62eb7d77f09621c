"""The oldest Python and packages that setup.cfg allows run the tool, and so does a newer Python.

Python 3.10 has the lower bounds, others the newest packages. torch and accelerate are not among
them: no test installs their lower bounds.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    *("config", "launch", "cli/test_submit.py", "cli/test_render.py", "logs/test_flags.py"),
    *("backends/test_slurm.py", "backends/test_local.py", "node/test_agent.py", "test_record.py"),
)
FAST = "not slurm and not torch and not install and not long"


def interpreter(version: str) -> str:
    """Find a Python on PATH, or as pyenv keeps them."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    path = shutil.which(f"python{version}") or next(map(str, found), "")
    if not path or subprocess.run([path, "-c", "import venv, ensurepip"], check=False).returncode:
        pytest.skip(f"this machine has no Python {version}")
    return path


def requirements(extra: str = "") -> list[str]:
    """Read what setup.cfg asks for."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = (
        config["options.extras_require"][extra] if extra else config["options"]["install_requires"]
    )
    return named.split("\n")[1:]


def oldest(requirement: str) -> str:
    """Return the lower bound of a requirement, any of its last numbers."""
    name, version = re.fullmatch(r"([\w-]+)>=([\d.]+),<\d+", requirement).groups()  # type: ignore[union-attr]
    return f"{name}=={version}.*"


@pytest.mark.long
@pytest.mark.install
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("version", "is_oldest"), [("3.10", True), ("3.12", False)])
def test_a_python_and_its_packages_run_the_tool(
    tmp_path: Path, version: str, is_oldest: bool
) -> None:
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    light = [oldest(r) if is_oldest else r for r in requirements()]
    tools = [r for r in requirements("dev") if r.startswith(("pytest", "hypothesis"))]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, *light, *tools], check=True, timeout=300 * patience())
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-m", FAST]
        + [str(ROOT / "tests" / room) for room in ROOMS],
        cwd=ROOT, env={**clean, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=600 * patience(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
