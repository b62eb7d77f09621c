"""What a script sets before its first import, which an import before the fork would miss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.node.forge.project import ProjectFiles
from clusterrun.node.forge.script import RankStart, directories, read_early, variables
from tests.node.jobs import STUB, AgentJob
from tests.node.test_forge import FRESH, HELLO, ROOT, Make

SETS = {
    'os.environ["OMP_NUM_THREADS"] = "3"': ["OMP_NUM_THREADS"],
    'from os import environ as e; e["TORCH_LOGS"] = "dynamo"': ["TORCH_LOGS"],
    'for k in ["OMP_NUM_THREADS", "TF_X"]: os.environ[k] = "1"': ["OMP_NUM_THREADS"],
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
    "this is no Python": [],
}


@pytest.mark.parametrize("source", SETS)
def test_variables_that_libraries_read_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(source)
    found = variables(ProjectFiles([str(tmp_path / "train.py"), "--x"]))
    assert read_early(found, ()) == SETS[source]


def test_a_preloaded_module_reads_more() -> None:
    assert read_early(["HF_HOME"], ()) == []
    assert read_early(["HF_HOME"], ("transformers",)) == ["HF_HOME"]
    assert read_early(["HF_HOME", "TQDM_DISABLE"], ("huggingface_hub.constants",)) == [
        "HF_HOME",
        "TQDM_DISABLE",
    ]


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "third"))', True),
        ('sys.path = ["../third"] + sys.path', True),
        ('sys.path[:0] = ["../third"]', True),
        ('sys.path.insert(0, str(Path(__file__).parents[1] / "third"))', True),
        ('sys.path.append("../third")', False),  # installed packages are found first
        ('names.insert(0, "../third")', False),
    ],
)
def test_directories_that_a_script_may_put_first(
    tmp_path: Path, source: str, is_found: bool
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text(source)
    found = directories(ProjectFiles([str(tmp_path / "jobs" / "train.py")]))
    assert (str(tmp_path / "third") in found) is is_found


def test_what_a_rank_has_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = RankStart({"yaml", "torch.nn"})
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [Path("/no/text"), *sys.path])
    assert start.missed() == ""
    (tmp_path / "yaml.py").write_text("")
    assert "the script has its own yaml, but the forge" in start.missed()
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert "the script changes OMP_NUM_THREADS too late: the forge" in start.missed()


def test_more_is_imported_only_if_the_next_attempt_stays_like_this_one() -> None:
    program = """
import socket, sys
from clusterrun.node.forge import preload, process
preload.between_attempts = lambda: ("colorsys",)
plan = {"strategy": "ddp", "preload": [], "entry": ["train.py"]}
ends = socket.socketpair()
forge = process.ForgeProcess(ends[0], plan, is_alone=True)
for state in (process._CHANGED, process._UNKNOWN, process._ALIKE):
    forge._page[0] = state
    forge._import_late()
    print("colorsys" in sys.modules, forge._late_at > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split("\n")[:3] == ["False False", "False True", "True False"], done.stderr


@pytest.mark.agents
def test_a_script_that_sets_variables_first_gets_new_interpreters(stub_job: Make) -> None:
    job = stub_job(f"import os; os.environ['OMP_NUM_THREADS'] = '3'\n{HELLO}").start()
    assert job.wait() == [0, 0], job.text() + job.errors()
    why = "the script may set OMP_NUM_THREADS before it imports what reads it; hint: pass it with"
    assert job.errors().count(f"{FRESH}{why} --env OMP_NUM_THREADS=VALUE") == 1
    assert _forked(job) == 0


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
    assert _forked(job) == 4


def _forked(job: AgentJob) -> int:
    return job.text().count("forked: True")
