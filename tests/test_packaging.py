"""The package as it is shipped: complete, and working where nothing else is installed."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import clusterrun
from tests.checkout import ROOT, copy_listed
from tests.patience import finished, patience

DATA = ("templates", "accelerate_configs")
URL = "https://example.org/clusterrun"
LOG = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
TOPS = ("clusterrun", "hydra_plugins")


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_packages_that_are_listed_are_those_on_the_disk(
    setup_cfg: configparser.ConfigParser,
) -> None:
    code = {path.parent for top in TOPS for path in (ROOT / top).rglob("*.py")}
    on_disk = {".".join(path.relative_to(ROOT).parts) for path in code}
    on_disk |= {"hydra_plugins", *(f"clusterrun.{name}" for name in DATA)}
    assert sorted(setup_cfg["options"]["packages"].split()) == sorted(on_disk)


def test_data_beside_the_code_is_shipped(setup_cfg: configparser.ConfigParser) -> None:
    shipped = setup_cfg["options.package_data"]
    for path in (ROOT / "clusterrun").rglob("*.*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            parts = path.relative_to(ROOT).parts[:-1]
            packages = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
            patterns = [word for name in packages for word in shipped.get(name, "").split()]
            assert any(map(path.match, patterns)), path


def test_versions_and_requirements_agree(setup_cfg: configparser.ConfigParser) -> None:
    newest = re.search(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == clusterrun.__version__
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    _linux, _python, *others = recipe["requirements"]["run"]
    assert [each.replace(" ", "") for each in others] == requirements(setup_cfg)
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    named = re.findall(r":: (3\.\d+)$", setup_cfg["metadata"]["classifiers"], re.MULTILINE)
    assert jobs["fast"]["strategy"]["matrix"]["python"] == named


def _ran(
    *argv: str | Path, cwd: Path, environ: dict[str, str] | None = None, status: int = 0
) -> str:
    done = finished([str(word) for word in argv], timeout_s=300, cwd=cwd, env=environ)
    assert done.returncode == status, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from the tree and the wheel from the sdist, as publish.yml does."""
    tree = copy_listed(ROOT, tmp_path_factory.mktemp("tree"))
    output = tmp_path_factory.mktemp("dist")
    _ran(tree / "packaging/set-url.sh", URL, "v1", cwd=tree)
    _ran(sys.executable, "-m", "build", "--outdir", output, tree, cwd=tree)
    (found,) = output.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, and only what it requires, into an environment of its own."""
    place = tmp_path_factory.mktemp("clean")
    _ran(sys.executable, "-m", "venv", place, cwd=place)
    pip = (place / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    _ran(*pip, "--constraint", ROOT / "constraints.txt", wheel, cwd=place)
    return place / "bin"


@pytest.mark.install
def test_wheel_holds_every_module_and_every_template(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith("-info")}
    man = {name for name in held if ".data/data/share/man/man1/" in name}
    assert {Path(name).name for name in man} == {path.name for path in (ROOT / "man").iterdir()}
    code = {
        str(path.relative_to(ROOT))
        for top in TOPS
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    data = {
        f"clusterrun/{name}/{path.name}"
        for name in DATA
        for path in (ROOT / name).iterdir()
        if path.is_file()
    }
    assert any(name.endswith(".j2") for name in data)
    assert held - man == code | data


@pytest.mark.install
def test_archives_are_fit_for_the_index(wheel: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    _ran(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=wheel.parent)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        about = archive.extractfile(f"{sdist.name[:-7]}/PKG-INFO")
        assert about
        text = about.read().decode()
    assert names >= {"LICENSE", "README.md", "setup.cfg", "templates/node.sh.j2"}
    assert not any(name.startswith("tests") for name in names)
    assert f"\nProject-URL: Source, {URL}\n" in text
    assert f"]({URL}/blob/v1/docs/checkpoints.md)" in text
    assert re.findall(r"\]\((?!https:|#).*?\)", text) == []  # they would lead nowhere on PyPI


@pytest.mark.install
def test_uvx_diagnoses_a_log_without_installing(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(LOG)
    own = {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON": sys.executable}
    argv = ("uvx", "--from", wheel, "clusterrun", "diagnose", "job.log")
    assert "(cuda_oom)" in _ran(*argv, cwd=tmp_path, environ={**os.environ, **own}, status=3)


@pytest.mark.install
def test_wheel_works_where_there_is_no_torch(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    environ = {
        "PATH": f"{clean}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(clean.parent / "cache"),
    }
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        _ran(clean / "python", "-c", "import torch", cwd=tmp_path, environ=environ)
    where = _ran(
        clean / "python", "-c", "import clusterrun; print(clusterrun.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(clean.parent)
    argv = ("render", "--cluster", "slurm", "--nodes", "2", "--gpus-per-node", "4", "train.py")
    script = _ran(clean / "clusterrun", *argv, cwd=tmp_path, environ=environ)
    for words, said in {
        "--help": "submit",
        "completion bash": "complete",
        "plan --model gpt2 --seq-len 1024 --gpus-per-node 8 --gpu h100-80g": "fits",
    }.items():
        assert said in _ran(clean / "clusterrun", *words.split(), cwd=tmp_path, environ=environ)
    (tmp_path / "job.log").write_text(LOG)
    argv = ("diagnose", "job.log")
    said = _ran(clean / "clusterrun", *argv, cwd=tmp_path, environ=environ, status=3)
    assert "(cuda_oom)" in said
    assert script.startswith("#!/bin/bash\n")
    assert "#SBATCH --nodes=2\n" in script
    (tmp_path / "job.sbatch").write_text(script)
    _ran("bash", "-n", "job.sbatch", cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.log", "job.sbatch", "train.py"]


ROOMS = (  # in which only the command that gets Ctrl-C asks for torch
    *("config", "launch", "cli/test_submit.py", "cli/test_render.py", "logs/test_flags.py"),
    *("backends/test_slurm.py", "backends/test_local.py", "node/test_agent.py", "test_record.py"),
)
FAST = ("-m", "not slurm and not torch and not install and not long", "-k", "not ctrl_c")


def interpreter(version: str) -> str:
    """Find a Python on PATH, or as pyenv keeps them: its shim runs none that is not chosen."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in filter(None, (shutil.which(f"python{version}"), *map(str, found))):
        if not subprocess.run([path, "-c", "import venv, ensurepip"], check=False).returncode:
            return path
    pytest.skip(f"this machine has no Python {version}")


def requirements(config: configparser.ConfigParser, extra: str = "") -> list[str]:
    """Read what setup.cfg asks for."""
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
    setup_cfg: configparser.ConfigParser, tmp_path: Path, version: str, is_oldest: bool
) -> None:
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    light = [oldest(r) if is_oldest else r for r in requirements(setup_cfg)]
    tools = [r for r in requirements(setup_cfg, "dev") if r.startswith(("pytest", "hypothesis"))]
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, *light, *tools], check=True, timeout=300 * patience())
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    argv = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *FAST]
    argv += [ROOT / "tests" / room for room in ROOMS]
    done = finished(argv, timeout_s=600, cwd=ROOT, env={**clean, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout[-5000:]
