"""What is found out about a job's interpreter, and which ones are executed for it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterrun.backends import interpreters
from clusterrun.config.spec import JobSpec
from clusterrun.launch.facts import Interpreter

ANSWER = {"version": [3, 12]}


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    """Make an environment whose interpreter counts its calls and prints ANSWER."""
    root = tmp_path / "env"
    packages = root / "lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    (root / "bin").mkdir()
    answer = json.dumps({**ANSWER, "path": [str(packages)]})
    python = root / "bin/python"
    python.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\necho '{answer}'\n")
    python.chmod(0o755)
    return root


def installed(root: Path, name: str, version: str) -> None:
    info = root / f"lib/python3.12/site-packages/{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


def look(root: Path, tmp_path: Path, *, may_run: bool, **environ: str) -> Interpreter:
    path = str(root / "bin/python")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), **environ}
    return interpreters.inspect(path, may_run=may_run, environ=environ)


def calls(tmp_path: Path) -> int:
    path = tmp_path / "calls"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_an_interpreter_is_asked(root: Path, tmp_path: Path) -> None:
    installed(root, "torch", "2.5.1")
    found = look(root, tmp_path, may_run=True)
    assert (found.version, found.packages["torch"], found.is_known) == ((3, 12), "2.5.1", True)
    assert calls(tmp_path) == 1


def test_one_that_a_project_names_is_not_executed(root: Path, tmp_path: Path) -> None:
    installed(root, "torch", "2.5.1")
    assert not look(root, tmp_path, may_run=False).is_known  # it may have packages elsewhere
    (root / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    found = look(root, tmp_path, may_run=False)
    assert (found.version, found.is_known) == ((3, 12), True)
    assert (found.packages["torch"], found.packages["clusterrun"]) == ("2.5.1", "")
    (root / "pyvenv.cfg").write_text("include-system-site-packages = TRUE\n")
    assert not look(root, tmp_path, may_run=False).is_known
    assert calls(tmp_path) == 0


def test_packages_of_pth_files_and_pythonpath_count(root: Path, tmp_path: Path) -> None:
    (root / "pyvenv.cfg").touch()
    for name in ("clusterrun", "accelerate"):
        (tmp_path / "src" / name / name).mkdir(parents=True)
    lines = f"# x\nimport os\n{tmp_path}/src/clusterrun\n"
    (root / "lib/python3.12/site-packages/own.pth").write_text(lines)
    found = look(root, tmp_path, may_run=False, PYTHONPATH=f"{tmp_path}/src/accelerate:rel")
    assert found.packages == {"clusterrun": "?", "torch": "", "accelerate": "?", "deepspeed": ""}


@pytest.mark.parametrize("may_run", [True, False])
def test_keys_of_a_yaml_are_those_of_the_jobs_own_accelerate(
    root: Path, tmp_path: Path, *, may_run: bool
) -> None:
    assert interpreters.accelerate_keys(look(root, tmp_path, may_run=may_run)) == frozenset()
    file = root / "lib/python3.12/site-packages/accelerate/commands/config/config_args.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import torch_that_is_missing\nclass BaseConfig:\n    distributed_type: str\n"
        "    def load(config):\n        if 'fp16' in config: del config['fp16']\n"
        "class ClusterConfig(BaseConfig):\n    newest: int = -1\n"
        "class SageMakerConfig(BaseConfig):\n    region: str = ''\n"
    )
    found = interpreters.accelerate_keys(look(root, tmp_path, may_run=may_run))
    assert found == {"distributed_type", "fp16", "newest"}


@pytest.mark.parametrize(
    ("file", "text", "is_known"),
    [
        ("own.pth", "import site; site.addsitedir('/shared/pkgs')\n", False),
        ("own.pth", "import\tsite\n", False),
        ("distutils-precedence.pth", "import os; pass\n", True),
        ("__editable__.clusterrun-1.0.pth", "import finder\n", True),
        ("google-nspkg.pth", "import sys, types, os\n", True),
        ("own.pth", "importlib_own\n", True),
        ("own.pth", "# caf\xe9\n", True),
        ("sitecustomize.py", "", False),
        ("../../../etc/conda/activate.d/own.sh", "export PYTHONPATH=/shared/pkgs\n", False),
        ("../../../conda-meta/state", '{"env_vars": {"PYTHONPATH": "/shared"}}', False),
        ("../../../conda-meta/history", "", True),
        ("../../../bin/activate", "export PYTHONPATH=/shared/pkgs\n", False),
        ("../../../bin/activate", "unset PYTHONHOME\n", True),
    ],
)
def test_code_of_an_environment_may_add_packages(
    root: Path, tmp_path: Path, file: str, text: str, is_known: bool
) -> None:
    path = Path(os.path.normpath(root / "lib/python3.12/site-packages" / file))
    path.parent.mkdir(parents=True, exist_ok=True)
    if "conda-meta" not in file:
        (root / "pyvenv.cfg").touch()
    path.write_text(text, encoding="latin-1")
    assert look(root, tmp_path, may_run=False).is_known is is_known
    assert calls(tmp_path) == 0


@pytest.mark.parametrize("answer", ["exit 1", "echo '{}'", "echo '[]'"])
def test_one_that_gives_no_answer_is_unknown(root: Path, tmp_path: Path, answer: str) -> None:
    (root / "bin/python").write_text(f"#!/bin/sh\n{answer}\n")
    assert not look(root, tmp_path, may_run=True).is_known


def test_a_real_interpreter_is_asked(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    found = interpreters.inspect(str(link), may_run=True, environ=environ)
    assert (found.version, found.is_known) == (sys.version_info[:2], True)


def test_the_oldest_versions_are_those_of_the_packages_metadata() -> None:
    oldest = interpreters.oldest()
    assert oldest["python"] == (3, 10)
    assert oldest["torch"] == (2, 4)


@pytest.mark.parametrize(
    ("setup", "places", "found"),
    [
        (("conda: llm",), "envs", "envs/llm"),
        (("modules: conda", "conda: llm"), "envs", "envs/llm"),
        (("conda: gone",), "envs", ""),
        (("conda: llm",), "envs:other", ""),
        (("conda: llm", "venv: /v"), "envs", ""),
        (("conda: /abs",), "envs", "abs"),
        (("source x",), "envs", ""),
    ],
)
def test_an_environment_of_conda_is_found_by_its_name(
    tmp_path: Path, setup: tuple[str, ...], places: str, found: str
) -> None:
    for place in ("envs/llm", "other/llm", "abs"):
        python = tmp_path / place / "bin/python"
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
    setup = tuple(line.replace("/abs", f"{tmp_path}/abs") for line in setup)
    known = ":".join(str(tmp_path / name) for name in places.split(":"))
    variables: dict[str, Any] = {"CONDA_ENVS_PATH": known, "CONDA_EXE": "/nowhere/bin/conda"}
    spec = JobSpec(script="t.py", setup=setup)
    expected = str(tmp_path / found / "bin/python") if found else ""
    assert interpreters.path_of("python", spec, variables) == expected
