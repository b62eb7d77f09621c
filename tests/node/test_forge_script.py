"""What a script and its project import and set before the first import: read, not run."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterrun.node.forge import ranks
from clusterrun.node.forge.project import Changes, ProjectFiles, RankStart, directories, read_early
from tests.node.jobs import STUB
from tests.node.test_forge import FRESH, HELLO, ROOT, Make

SETS = {
    'os.environ["OMP_NUM_THREADS"] = "3"': ["OMP_NUM_THREADS"],
    'from os import environ as e; e["TORCH_LOGS"] = "dynamo"': ["TORCH_LOGS"],
    'e: dict = os.environ\ne["OMP_NUM_THREADS"] = "3"': ["OMP_NUM_THREADS"],
    'os.environ |= {"OMP_NUM_THREADS": "2"}': ["OMP_NUM_THREADS"],
    'del os.environ["OMP_NUM_THREADS"]': ["OMP_NUM_THREADS"],
    'os.environ.setdefault("PYTORCH_JIT", "0")': ["PYTORCH_JIT"],
    'os.environ.setdefault("MKL_NUM_THREADS", "1")': [],  # the job has set it
    'os.environ.update({"DS_SKIP_CUDA_CHECK": "1"}, KMP_AFFINITY="x")': [
        "DS_SKIP_CUDA_CHECK",
        "KMP_AFFINITY",
    ],
    'def f():\n  os.putenv("TORCHDYNAMO_DISABLE", "1")': ["TORCHDYNAMO_DISABLE"],
    'print(os.environ["OMP_NUM_THREADS"], os.environ.get("TORCH_LOGS", "MKL_X"))': [],
    'os.environ["NCCL_DEBUG"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "1"': [],
    'os.environ["TOKENIZERS_PARALLELISM"] = "false"': [],
    'config["TORCH_LOGS"] = "dynamo"': [],
    'e = os.environ; e["TORCH_LOGS"] = "dynamo"': ["TORCH_LOGS"],
    'os.environ["X"] = "1"; ours = [n for n in os.environ if n.startswith("DS_")]': [],
    'of = {"OMP_NUM_THREADS": 1}; print({n: os.environ.get(n) for n in of})': [],
    'os.environ["X"] = "1"; print("OMP", "TORCH_LOGS")': [],
    'os.environ["HF_TOKEN"] = read()': [],
    "this is no Python": [],
}


def changes(path: Path, source: str) -> Changes:
    (path / "train.py").write_text(source)
    return Changes(ProjectFiles([str(path / "train.py"), "--x"]))


def test_variables_that_libraries_read_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    found = {source: changes(tmp_path, source) for source in SETS}
    early = {source: read_early(each.names, ("transformers",)) for source, each in found.items()}
    assert early == SETS
    assert read_early(["HF_HOME"], ()) == []
    assert read_early(["HF_HOME", "TQDM_X"], ("huggingface_hub.x",)) == ["HF_HOME", "TQDM_X"]
    assert {each.place for each in found.values()} == {""}


UNKNOWN = [
    "os.environ.update(dict(line.split('=') for line in open('my.env')))\nimport torch",
    "from os import environ as e\nfor k, v in read(): e[k] = v\nfrom torch import nn",
    "os.environ |= json.load(open('my.json'))\nimport torch",
    "[os.environ.setdefault(k.upper(), v) for k, v in read()]\nimport accelerate",
    "def put(name): os.putenv(name, '1')\nput('OMP_NUM_THREADS')\nimport torch",
    "for k in ('WANDB_MODE', 'X'): os.environ[k] = '1'\nimport torch",
    "KEY = 'WANDB_MODE'\nos.environ[KEY] = args.mode\nimport torch",
    "import dotenv\ndotenv.load_dotenv('my.env')\nimport torch",
    "from dotenv import load_dotenv as ld\nif ld(): import torch",
    "from environs import Env\nEnv().read_env()\nimport torch",
    "settings = Dynaconf(load_dotenv=True)\nimport torch",
    "def f():\n  import helper\n  helper.load()\n  import torch\nif __name__ == '__main__': f()",
    f"os.environ.update(x){'+x' * 1500}",
]
KNOWN = [
    "env = dict(os.environ)\nenv.update(read())\nimport torch",
    "from dotenv import dotenv_values\nvalues = dotenv_values('my.env')\nimport torch",
]


def test_variables_whose_names_cannot_be_known_are_found(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import os\ndef load():\n    os.environ[key()] = '1'\n")
    found = {source: changes(tmp_path, source) for source in (*UNKNOWN, *KNOWN)}
    assert [source for source, each in found.items() if each.place] == UNKNOWN


def test_our_examples_stay_forks() -> None:
    scripts = map(str, (ROOT / "examples").glob("*.py"))
    assert [script for script in scripts if Changes(ProjectFiles([script])).place] == []


PUTS_FIRST = [
    'sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "third"))',
    'sys.path = ["../third"] + sys.path',
    'sys.path[:0] = ["../third"]',
    'sys.path.insert(0, str(Path(__file__).parents[1] / "third"))',
]
PUTS_NOTHING_FIRST = ['sys.path.append("../third")', 'names.insert(0, "../third")']


def test_directories_that_a_script_may_put_first(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    found = []
    for source in (*PUTS_FIRST, *PUTS_NOTHING_FIRST):
        (tmp_path / "jobs" / "train.py").write_text(source)
        project = ProjectFiles([str(tmp_path / "jobs" / "train.py")])
        found += [source] * (str(tmp_path / "third") in directories(project))
    assert found == PUTS_FIRST


def test_what_a_rank_has_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RankStart({"yaml", "torch.nn"})
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [Path("/no/text"), *sys.path])
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    assert (start.missed(), start.changed()) == ("", ["DS_SKIP_CUDA_CHECK"]), "no deepspeed yet"
    (tmp_path / "yaml.py").write_text("")
    assert "the script has its own yaml, but the forge" in start.missed()
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert "the script changes OMP_NUM_THREADS too late: the forge" in start.missed()


LOADS = "import accelerate\n"
DATASETS = {
    "import torch\n": False,
    LOADS: True,
    f"{LOADS}import os\nos.environ['HF_DATASETS_CACHE'] = '/x'\n": False,
    f"{LOADS}import sys\nsys.path.insert(0, 'third')\n": False,  # it has a datasets of its own
}


def test_the_datasets_package_is_imported_for_scripts_that_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    is_installed = importlib.util.find_spec("datasets") is not None
    (tmp_path / "third" / "datasets").mkdir(parents=True)
    (tmp_path / "third" / "datasets" / "__init__.py").write_text("")
    found = {}
    for source in DATASETS:
        (tmp_path / "train.py").write_text(source)
        project = ProjectFiles([str(tmp_path / "train.py")])
        late = ranks.late_imports(project, Changes(project).names)
        found[source] = "datasets" in late
    assert found == {source: is_used and is_installed for source, is_used in DATASETS.items()}


def test_a_fork_draws_names_of_its_own_for_cached_data(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(1)
    module = SimpleNamespace(fingerprint_rng=generator)
    monkeypatch.setitem(sys.modules, "datasets.fingerprint", module)
    ranks._refresh_seeds()
    assert generator.random() != random.Random(1).random()


@pytest.mark.agents
def test_more_is_imported_only_if_the_next_attempt_stays_like_this_one() -> None:
    program = """
import socket, sys
from clusterrun.node.forge import process, ranks
process.IDLE_S = 0.01
ranks.late_imports = lambda *_: ("colorsys",)
plan = {"strategy": "ddp", "entry": ["train.py"]}
agent, end = socket.socketpair()
forge = process.ForgeProcess(end, plan, is_alone=True)
for is_alike in (0, 1):
    forge._may_import_late[0] = is_alike
    forge._follow()
    print("colorsys" in sys.modules)
ranks.late_imports = lambda *_: 1 / 0
forge._may_import_late[0] = 1
forge._follow()
print(forge._why_closed.partition(";")[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    said = "ZeroDivisionError: division by zero"  # the running ranks live on
    assert done.stdout.splitlines() == ["False", "True", said], done.stderr


def test_a_script_that_sets_variables_first_gets_new_interpreters(stub_job: Make) -> None:
    script = f"import os, sys\nos.environ |= {{name: '3' for name in sys.argv[1:]}}\n{HELLO}"
    job = stub_job(script).start()
    assert job.wait() == [0, 0], job.text() + job.errors()
    why = "script.py:2 may set any variable, including one that an import reads"
    hint = "pass the variables with --env NAME=VALUE, and remove this line"
    assert job.errors().count(f"{FRESH}{why}; hint: {hint}") == 1
    assert "forked: True" not in job.text()


@pytest.mark.agents
def test_a_helper_that_sets_variables_first_is_named(stub_job: Make, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("import os; os.environ['TORCH_LOGS'] = '+dynamo'\n")
    job = stub_job(f"import helper\n{HELLO}")
    job.start(PYTHONPATH=f"{STUB}:{ROOT}:{tmp_path / 'lib'}")
    assert job.wait() == [0, 0], job.text() + job.errors()
    line = (
        "clusterrun: the script changes TORCH_LOGS too late: the forge has imported what reads it"
    )
    assert job.text().count(line) == 1
    assert job.text().count("forked: True") == 4


@pytest.fixture(name="project")
def _project(tmp_path: Path) -> Path:
    """Make a project whose script imports a module and a package of its own."""
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    (project / "helpers.py").write_text("import beta.part as b\nimport train\n")
    (project / "model" / "__init__.py").write_text("from .layers import Layer\n")
    (project / "model" / "layers.py").write_text("from gamma import *\nfrom . import extra\n")
    (project / "model" / "extra.py").write_text("import delta\n")
    return project


def test_what_every_rank_imports_is_found(project: Path) -> None:
    script = project / "train.py"
    script.write_text(
        "import os\nfrom alpha import Trainer\nimport helpers\nfrom model.layers import Layer\n"
        "def later():\n    import unused\nif os.environ:\n    import unused\n"
    )
    expected = {"os", "alpha", "beta", "gamma", "delta"}
    assert ProjectFiles([str(script), "--lr", "1"]).imported == expected
    script.write_text("import alpha\nnot = 1\n")
    for entry in ([str(script)], ["-m", "no_such_module"], [str(project / "none.py")]):
        assert ProjectFiles(entry).imported == set(), "it cannot be read"


@pytest.mark.parametrize("entry", [["-m", "model.run"], ["-m", "model"], ["model"]])
def test_a_module_or_a_directory_is_read_as_a_script_is(
    project: Path, monkeypatch: pytest.MonkeyPatch, entry: list[str]
) -> None:
    monkeypatch.chdir(project)
    for name in ("run.py", "__main__.py"):
        (project / "model" / name).write_text("import settings\nfrom .layers import Layer\n")
    for place in (project, project / "model"):
        (place / "settings.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '3'\n")
    found = ProjectFiles(entry)
    assert Changes(found).names == {"OMP_NUM_THREADS"}
    assert entry == ["model"] or found.imported == {"os", "gamma", "delta"}


def test_deepspeed_is_imported_for_a_script_that_imports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: name == "deepspeed")
    assert ranks.deepspeed_imports("ddp", ["alpha", "deepspeed"]) == ("deepspeed",)
    assert ranks.deepspeed_imports("ddp", ["alpha"]) == ()
