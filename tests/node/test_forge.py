"""The forge without torch: what it forks, and when the ranks start another way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clusterrun.config.choices import Launcher
from clusterrun.errors import NodeExit
from clusterrun.node.forge import project, ranks
from clusterrun.node.forge.ranks import Closed
from tests.health.stand_in import stand_in
from tests.node.jobs import ROOT, STUB, AgentJob
from tests.patience import wait_for

Make = Callable[..., AgentJob]

HELLO = """
import os, sys
is_forked = "clusterrun.node.forge.process" in sys.modules
print("rank", os.environ["RANK"], sys.argv[1:], "ready" in sys.modules, "forked:", is_forked)
"""
FRESH = "the ranks start as new interpreters, not as forks: "
# Found where they are imported, and in the process that imports them.
REFUSED = {
    "raise ValueError('not\\nhere')": "cannot import bad: ValueError: not",
    "import sys; sys.exit(0)": "cannot import bad: SystemExit: 0",
    "import _thread, time; _thread.start_new_thread(time.sleep, (9,))": (
        "bad starts threads, which do not survive a fork"
    ),
    "import clusterrun.node.forge.ranks as p; p.DEVICES = ('/dev/zero',);"
    "opened = open('/dev/zero')": "bad opens /dev/zero",
    "import sys, types; torch = sys.modules['torch'] = types.ModuleType('torch');"
    "torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)": "bad initialises CUDA",
}
PRELOADS = """
from clusterrun.node.forge import ranks
try:
    ranks.preload(["bad"], lambda _: None)
except ranks.Closed as closed:
    print(closed)
"""


def test_what_does_not_survive_a_fork_is_refused(tmp_path: Path) -> None:
    wrong = []
    for source, why in REFUSED.items():
        (tmp_path / "bad.py").write_text(source)
        argv = [sys.executable, "-B", "-c", PRELOADS]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        wrong += [(source, done)] * (not done.stdout.startswith(why))
    assert wrong == []


def lib(path: Path, imported: str, **sources: str) -> str:
    """Write modules that agents and ranks can import; return PYTHONPATH.

    `imported` is the one that the forge imports, in place of those that ranks need for a strategy.
    """
    (path / "lib").mkdir()
    imports = (
        f"import clusterrun.node.forge.ranks as p; p.deepspeed_imports = lambda *_: ({imported!r},)"
    )
    sources["sitecustomize"] = f"{imports}\n{sources.get('sitecustomize', '')}"
    for name, source in sources.items():
        (path / "lib" / f"{name}.py").write_text(source)
    return f"{STUB}:{ROOT}:{path / 'lib'}"


# The module that the forge imports, those that can be imported, and the reason in the message.
BAD = {
    "missing name": ("none", {}, "cannot import none: ModuleNotFoundError: No module named 'none'"),
    "dies": (
        "bad",
        {"bad": "import os; os.kill(os.getpid(), 9)"},
        "the forge was killed by SIGKILL while it imported bad",
    ),
    "leaves": (
        "bad",
        {"bad": "import os; os._exit(7)"},
        "the forge exited with status 7 while it imported bad",
    ),
    "slow": (
        "bad",
        {
            "bad": "import time; time.sleep(1000)",
            "sitecustomize": "import clusterrun.node.forge.handle as h; h.IMPORT_S = 5.0",
        },
        "importing bad takes longer than 5 s",
    ),
    "environment": (
        "bad",
        {"bad": "import os, clusterrun.node.forge.ranks as r; r.READ_LATE = ('PATH',)"},
        "the ranks' environment differs from the forge's: ",
    ),
    "threads": (
        "bad",
        {
            "bad": "",
            "sitecustomize": "import _thread, time; _thread.start_new_thread(time.sleep, (99,))",
        },
        "Python starts threads before any import",
    ),
}
HINTS = {
    "environment": "--set launch.launcher=direct avoids this message",
    "threads": "remove them from sitecustomize or a .pth file",
}


@pytest.mark.agents
@pytest.mark.parametrize("what", BAD)
def test_ranks_start_as_usual_after_a_bad_preload(
    stub_job: Make, tmp_path: Path, what: str
) -> None:
    name, sources, why = BAD[what]
    job = stub_job(HELLO, "a b")
    job.start(PYTHONPATH=lib(tmp_path, name, **sources))
    assert job.wait() == [0, 0], job.text() + job.errors()
    for rank in range(4):
        assert f"rank {rank} ['a b'] False forked: False" in job.text()
    (line,) = [line for line in job.errors().splitlines() if "not as forks" in line]
    how = "as new interpreters|with accelerate launch"  # as far as the forge has lived
    assert re.match(rf"clusterrun: local0: the ranks start (?:{how}), not as forks: {why}", line)
    assert HINTS.get(what, "; hint: use --set launch.launcher=accelerate") in line
    job.assert_clean()


@pytest.mark.agents
def test_ranks_are_forks_that_have_imported_what_they_need_and_lose_no_output(
    stub_job: Make, tmp_path: Path
) -> None:
    script = f"""
import gc, os, ready
print("held:", os.path.exists("/proc/self/fd/9"))
ready.file.write(os.environ["RANK"])
first = open({str(tmp_path)!r} + "/first" + os.environ["RANK"], "w")
first.write("frozen")
gc.freeze()
second = open({str(tmp_path)!r} + "/second" + os.environ["RANK"], "wb")
second.write(b"new")
print("no end of line", end="")
"""
    job = stub_job(HELLO + script, nodes=1)
    env_script = job.paths.env_script  # whose descriptor the ranks must not inherit
    env_script.write_text(f"exec 9> {tmp_path / 'lock'}\n{env_script.read_text()}")
    warns = "import warnings; warnings.warn('deprecated')"
    file = f"file = open({str(tmp_path / 'ready')!r}, 'a')"
    job.start(PYTHONPATH=lib(tmp_path, "ready", ready=f"{warns}\n{file}"))
    assert job.wait() == [0], job.text() + job.errors()
    assert sorted((tmp_path / "ready").read_text()) == ["0", "1"]
    for rank in range(2):
        assert f"rank {rank} [] True forked: True" in job.text()
        assert (tmp_path / f"first{rank}").read_text() == "frozen"
        assert (tmp_path / f"second{rank}").read_text() == "new"
    counts = {"no end of line": 2, "held: False": 2, "UserWarning: deprecated": 1}
    assert {text: job.text().count(text) for text in counts} == counts
    assert (job.errors(), (tmp_path / "lock").exists()) == ("", True)
    job.assert_clean()


OLD = """
import os
import clusterrun.node.base.processes as processes
del os.memfd_create, os.pidfd_open
processes.SYS_PIDFD_OPEN = -1
"""
ENDS_AT_ONCE = """
import os
import clusterrun.rank.worker as worker

def end_at_once():
    if os.environ["RANK"] == "1":
        os._exit(5)
    main()

main, worker.main = worker.main, end_at_once
"""


@pytest.mark.agents
def test_an_old_python_and_kernel_fork_ranks_and_notice_their_ends(
    stub_job: Make, tmp_path: Path
) -> None:
    """The agent notices the end of a rank that has not yet written its first event."""
    job = stub_job("import time; time.sleep(1000)", nodes=1)
    job.start(PYTHONPATH=lib(tmp_path, "ends", sitecustomize=OLD, ends=ENDS_AT_ONCE))
    assert job.wait() == [5], job.text() + job.errors()
    assert "not as forks" not in job.text()
    job.assert_clean()


FORKS_ONE_RANK = """
import sys
import clusterrun.node.forge.process as process

def fork_one_rank():
    if sys._getframe(1).f_code.co_name == "_fork_ranks":
        if forked:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        forked.append(True)
    return fork()

forked, fork = [], process.fork
process.fork = fork_one_rank
"""


@pytest.mark.agents
def test_no_rank_begins_twice_if_not_all_can_be_forked(stub_job: Make, tmp_path: Path) -> None:
    job = stub_job(HELLO, nodes=1)
    job.start(PYTHONPATH=lib(tmp_path, "limits", limits=FORKS_ONE_RANK))
    assert job.wait() == [0], job.text() + job.errors()
    assert f"{FRESH}the forge cannot fork: Resource temporarily unavailable" in job.errors()
    assert [job.text().count(f"rank {rank} [] False forked: False") for rank in (0, 1)] == [1, 1]
    assert len(job.events("rank_start")) == 2
    job.assert_clean()


STORE = """
import os, socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
"""


@pytest.mark.agents
@pytest.mark.parametrize("launcher", [Launcher.FORGE, Launcher.DIRECT])
def test_one_rank_finds_the_store_of_its_launcher(stub_job: Make, launcher: Launcher) -> None:
    job = stub_job(STORE, nodes=1, nproc_per_node=1, launcher=launcher)
    assert job.start(STUB_AGENT_STORE="True").wait() == [0], job.text() + job.errors()


@pytest.mark.agents
def test_a_module_of_the_project_is_found_before_a_preloaded_one(
    stub_job: Make, tmp_path: Path
) -> None:
    job = stub_job("import ready; print(ready.__file__)", nodes=1)
    (job.paths.root.parents[2] / "ready.py").write_text("")
    job.start(PYTHONPATH=lib(tmp_path, "ready", ready=""))
    assert job.wait() == [0], job.text() + job.errors()
    why = "modules of the project have the same names as installed ones: ready; hint: rename them"
    assert f"{FRESH}{why}" in job.errors()
    assert str(job.paths.root.parents[2] / "ready.py") in job.text()


@pytest.mark.agents
def test_no_rank_starts_after_a_cancellation(stub_job: Make, tmp_path: Path) -> None:
    job = stub_job(HELLO, nodes=1)
    job.start(
        PYTHONPATH=lib(
            tmp_path,
            "slow",
            slow="import pathlib, time\n"
            "here = pathlib.Path(__file__).parent\n"
            "(here / 'begun').touch(); time.sleep(30); (here / 'ended').touch()\n",
        )
    )
    wait_for((tmp_path / "lib" / "begun").exists)
    wait_for(lambda: job.events("rendezvous"))
    os.kill(job.agent_pid("local0"), signal.SIGTERM)
    assert job.wait() == [NodeExit.CANCELLED], job.text() + job.errors()
    assert not (tmp_path / "lib" / "ended").exists()
    assert "rank 0" not in job.text()
    assert FRESH not in job.errors()
    job.assert_clean()


@pytest.mark.agents
def test_a_forge_that_is_killed_takes_its_ranks_along(stub_job: Make) -> None:
    job = stub_job("import time; print('up', flush=True); time.sleep(1000)").start()
    job.wait_for("up", 4)
    forge = psutil.Process(job.rank_pid(2)).parent()
    assert forge is not None
    assert forge.cmdline()[0] == f"clusterrun: forge of {job.paths.root}"
    names = [Path(f"/proc/{pid}/comm").read_text() for pid in (forge.pid, job.rank_pid(2))]
    assert names == ["python\n"] * 2  # Slurm misreads a name with a space
    forge.kill()
    assert job.wait() != [0, 0]
    found = json.loads(job.paths.outcome(1).read_text())
    reason = "local1: the forge was killed by SIGKILL; its ranks were killed with it"
    assert (found["cause"], found["rank"], found["reason"]) == ("launcher", None, reason)
    job.assert_clean()


ASKS_NVML = """
import contextlib, ctypes, os, sys, types

def count():
    library, found = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
    assert library.nvmlInitWithFlags(0) == 0
    assert library.nvmlDeviceGetCount_v2(ctypes.byref(found)) == 0
    return found.value

def show(what):
    is_loaded = "libnvidia-ml" in open("/proc/self/maps").read()
    with contextlib.suppress(pynvml.NVMLError):
        what = f"{what}, pynvml: {pynvml.nvmlDeviceGetCount()}"
    print(what, "loaded" if is_loaded else "untouched", flush=True)

cuda = sys.modules["torch.cuda"] = types.ModuleType("torch.cuda")
cuda._device_count_nvml, cuda._is_compiled = count, lambda: True
from clusterrun.node.forge import ranks
with ranks.nvml_kept_out():
    import pynvml
    pynvml.nvmlInit()
    found = cuda._device_count_nvml()
show(f"forge: {found}")
if os.fork() == 0:
    ranks.start_nvml()
    show(f"rank: {cuda._device_count_nvml()}")
    os._exit(0)
os.wait()
"""


def test_what_an_import_asks_nvml_leaves_it_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "driver", tmp_path / "says", monkeypatch)
    program = [sys.executable, "-c", ASKS_NVML]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.stdout == "forge: 2 untouched\nrank: 2, pynvml: 2 loaded\n", done.stderr


MAY_DIFFER = [
    ({}, {"RANK": "1", "MASTER_PORT": "2", "CLUSTERRUN_SPOOL": "x", "NCCL_DEBUG": "INFO"}, ""),
    ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2", "SECRET": "s3"}, "OMP_NUM_THREADS, SECRET"),
    ({"MKL_CBWR": "AVX2"}, {}, "MKL_CBWR"),
    ({"no_proxy": "a"}, {"no_proxy": "a", "NO_PROXY": "a", "CUDA_VISIBLE_DEVICES": "0"}, ""),
    ({"no_proxy": "a"}, {"no_proxy": "a", "NO_PROXY": "b"}, "NO_PROXY"),
]


def test_only_variables_that_are_read_late_may_differ() -> None:
    for ours, theirs, names in MAY_DIFFER:
        differ = pytest.raises(Closed, match=f": {names};") if names else contextlib.nullcontext()
        with differ:
            ranks.check_environment(ours, theirs)
    assert ranks.added_path({"PYTHONPATH": "/a:"}, {"PYTHONPATH": "/a:/b"}) == ["/b"]
    with pytest.raises(Closed):
        ranks.added_path({"PYTHONPATH": "/a"}, {"PYTHONPATH": "/b:/a"})


def test_a_directory_shadows_modules_and_packages(tmp_path: Path) -> None:
    for name in ("calendar.py", "fast.cpython-311-x86_64-linux-gnu.so", "notes.txt", "data.csv"):
        (tmp_path / name).write_text("")
    for name in ("pack", "wandb"):
        (tmp_path / name).mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    imported = {"calendar", "fast.part", "pack.x", "notes", "data", "wandb"}
    found = project.shadowing([tmp_path.as_posix(), "/no/such"], imported)
    assert found == ["calendar", "fast", "pack"]


SIGNALS = """
import signal
lines = [line.split() for line in open("/proc/self/status")]
masks = {words[0]: int(words[1], 16) for words in lines if words[0] in ("SigIgn:", "SigBlk:")}
print(masks, *map(signal.getsignal, (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)))
"""


@pytest.mark.agents
@pytest.mark.parametrize("launcher", [Launcher.FORGE, Launcher.DIRECT, Launcher.ACCELERATE])
def test_a_rank_of_a_run_in_the_background_has_the_signals_of_a_terminal(
    stub_job: Make, launcher: Launcher
) -> None:
    default = ("env", "--default-signal=HUP,INT,QUIT,TERM,TSTP", sys.executable, "-c", SIGNALS)
    plain = subprocess.run(default, capture_output=True, text=True, check=True).stdout
    job = stub_job(SIGNALS, nodes=1, launcher=launcher)
    script = job.paths.node_script.read_text()
    job.paths.node_script.write_text(f"trap '' HUP INT QUIT TERM TSTP\n{script}")
    assert job.start().wait() == [0], job.text() + job.errors()
    assert job.text().count(f" {plain}") == 2, job.text()
