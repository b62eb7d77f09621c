"""What clusterrun is compared with, each installed in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

CACHE = Path(os.environ.get("CLUSTERRUN_BENCHMARKS_CACHE", "~/.cache/clusterrun-benchmarks"))
ROOT = Path(__file__).resolve().parents[2]
TORCHX, SUBMITIT, CLICK = "torchx", "submitit", "click"
INSTALL_S = 900


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A virtual environment with one peer; `missing` is why it could not be installed."""

    name: str
    directory: Path
    missing: str = ""

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    def program(self, name: str) -> str:
        return str(self.directory / "bin" / name)

    @property
    def modules(self) -> Path:
        """Return the directory of the installed packages."""
        return next((self.directory / "lib").glob("python*/site-packages"))

    @property
    def version(self) -> str:
        """Return the installed version of the package that the environment is for."""
        if self.missing:
            return f"not installed: {self.missing}"
        code = f"import importlib.metadata as m; print(m.version({self.name!r}))"
        argv = [self.python, "-c", code]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def environment(name: str, *packages: str) -> Environment:
    """Return an environment of the cache; create it if it does not exist."""
    directory = CACHE.expanduser() / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    found, complete = Environment(name=name, directory=directory), directory / "complete"
    try:
        if not complete.exists():
            _run(sys.executable, "-m", "venv", "--clear", str(directory))
            _pip(found, "install", *(packages or (name,)))
            complete.touch()
    except subprocess.SubprocessError as error:
        return replace(found, missing=_reason(error))
    return found


def own() -> Environment:
    """Install this working tree as users do; an editable installation starts more slowly.

    The libraries that train are those of this interpreter.
    """
    found = environment("clusterrun", str(ROOT))
    if not found.missing:
        _pip(found, "uninstall", "--yes", "clusterrun")  # the cached one may be older
        _pip(found, "install", str(ROOT))
        libraries = [path for path in sys.path if path.endswith("site-packages")]
        (found.modules / "libraries.pth").write_text("\n".join(libraries))
    return found


def click_group(names: list[str]) -> list[str]:
    """Return the command of a click group that has commands of these names and nothing else."""
    found = environment(CLICK)
    program = Path(found.program("click-group"))
    (found.modules / "click_group.py").write_text(_GROUP.format(names=names))
    program.write_text(_PROGRAM.format(python=found.python))
    program.chmod(0o755)
    return [str(program)]


_GROUP = """\
import click

@click.group()
def main():
    pass

for name in {names!r}:
    @main.command(name, help=f"Do {{name}}.")
    def command():
        pass
"""
_PROGRAM = """\
#!{python}
import sys
from click_group import main
sys.exit(main())
"""


def _pip(environment: Environment, verb: str, *words: str) -> None:
    _run(environment.python, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *words)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=INSTALL_S)


def _reason(error: subprocess.SubprocessError) -> str:
    said = str(getattr(error, "stderr", "") or error).strip().splitlines()
    return said[-1] if said else type(error).__name__
