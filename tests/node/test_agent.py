"""Agents on simulated nodes, with a stand-in for accelerate: from the first word to the last."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clusterrun.backends.hosts.mirror import Receiver, bundle, news, write_bundle
from clusterrun.config.choices import Device, Launcher, MixedPrecision, Preflight
from clusterrun.errors import NodeExit
from clusterrun.rundir.attempt import take_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.usage import read_latest
from tests.health.stand_in import stand_in
from tests.node.jobs import ROOT, STUB, AgentJob
from tests.patience import patience, wait_for

pytestmark = [pytest.mark.agents, pytest.mark.timeout(120)]
Make = Callable[..., AgentJob]

HELLO = """
import os, subprocess, sys
print("left", subprocess.Popen(["sleep", "300"], start_new_session=True).pid, flush=True)
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:])
print("to stderr", file=sys.stderr)
"""
WAIT = "import time; print('ready', flush=True); time.sleep(60)"


def victim(deed: str, rank: int = 3) -> str:
    """Write a script in which one rank does something while the others wait."""
    return (
        "import glob, os, sys, time, signal\nprint('ready', flush=True)\n"
        "open('ready-' + os.environ['RANK'], 'w').close()\n"
        f"if os.environ['RANK'] == '{rank}':\n"
        "    while len(glob.glob('ready-*')) < int(os.environ['WORLD_SIZE']):\n"
        "        time.sleep(0.02)\n"
        f"    {deed}\ntime.sleep(60)\n"
    )


def test_two_nodes_run_their_ranks_and_leave_together(stub_job: Make) -> None:
    job = stub_job(HELLO, "a b", "$HOME").start()
    assert job.wait() == [0, 0]
    lines = {(rank, stream, text) for _, rank, stream, text in job.log("local1")}
    left = [int(text.split()[1]) for *_, text in lines if text.startswith("left")]
    assert (len(left), [pid for pid in left if psutil.pid_exists(pid)]) == (2, [])
    assert {
        ("2", "o", "rank 2 of 4 ['a b', '$HOME']"),
        ("3", "o", "rank 3 of 4 ['a b', '$HOME']"),
        ("3", "e", "to stderr"),
    } <= lines
    assert {rank for rank, _, _ in lines} <= {"2", "3", "-"}
    assert job.errors() == ""
    job.assert_clean()
    assert job.spools() == []
    written = [job.paths.log(1, "local0"), job.paths.events("local1"), job.paths.attempt_record(1)]
    assert [oct(path.stat().st_mode & 0o777) for path in written] == ["0o600"] * 3


@pytest.mark.parametrize(
    ("deed", "code", "cause", "message"),
    [
        ("sys.exit(3)", 3, "exit", "the script exited with status 3"),  # others ignore SIGTERM
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal", "killed by SIGKILL"),
        ("raise ValueError('bad\\\\nnews')", 1, "exception", "ValueError: bad"),
    ],
)
def test_one_failing_rank_ends_all_nodes_with_its_status(
    stub_job: Make, deed: str, code: int, cause: str, message: str
) -> None:
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    job = stub_job((ignore if code == 3 else "") + victim(deed)).start()
    job.wait_for("ready", 4)
    since = time.monotonic()
    assert job.wait() == [code, code]
    job.assert_clean()
    assert time.monotonic() - since < 10 * patience()
    (failed,) = job.events("failed")
    assert (failed["node"], failed["rank"]) == ("local1", 3)
    assert (failed["code"], failed["cause"]) == (code, cause)
    assert failed["message"].startswith(message)
    assert {event["reason"] for event in job.events("ended")} == {
        f"rank 3 on local1: {failed['message']}"
    }
    assert job.errors().count("rank 3 on local1") == 1
    for node in ("local0", "local1"):
        *_, own = (line for line in job.log(node) if line[1:3] == ("-", "a"))
        assert own[3] == f"error: rank 3 on local1: {' '.join(failed['message'].split())}"


def test_the_error_files_of_a_nodes_ranks_come_home_as_one(stub_job: Make) -> None:
    job = stub_job(victim("raise ValueError('no such tokenizer')", rank=0)).start()
    assert job.wait() == [1, 1]
    [line] = job.paths.rank_errors(1, "local0").read_text().splitlines()
    error = json.loads(line)["message"]
    assert error["message"] == "ValueError: no such tokenizer"
    assert "script.py" in error["extraInfo"]["py_callstack"]
    assert error["extraInfo"]["timestamp"] == job.events("failed")[0]["ts"]
    assert not job.paths.rank_errors(1, "local1").exists()


@pytest.mark.parametrize("node", ["local0", "local1"])
def test_an_agent_that_is_killed_ends_the_others(stub_job: Make, node: str) -> None:
    job = stub_job(WAIT).start()
    job.wait_for("ready", 4)
    since = time.monotonic()
    os.kill(job.agent_pid(node), signal.SIGKILL)
    expected = [-9, 123] if node == "local0" else [123, -9]
    assert job.wait() == expected
    job.assert_clean()
    assert time.monotonic() - since < 10 * patience()
    (failed,) = job.events("failed")
    assert (failed["node"], failed["cause"]) == (node, "node_lost")
    assert node in job.errors()
    assert len(job.spools()) == 1  # that of the killed agent, which the next one clears
    assert stub_job(HELLO, nodes=1).start(TMPDIR=str(job.tmp)).wait() == [0]
    assert job.spools() == []


def test_user_signals_for_a_whole_step_kill_nothing_of_ours(
    stub_job: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import os, signal, time
heard = set()
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: heard.add(number))
print("ready", flush=True)
while len(heard) < 2:
    time.sleep(0.1)
print("heard", flush=True)
while not os.path.exists("go"):
    time.sleep(0.1)
"""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 36000))
    job = stub_job(script).start()
    job.wait_for("ready", 4)
    for process in job.processes():
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
    job.wait_for("heard", 4)
    (Path(job.plan.workdir) / "go").touch()
    assert job.wait() == [0, 0]


def test_an_import_that_fails_on_every_rank_counts_on_all_of_them(stub_job: Make) -> None:
    """The launcher ends the other ranks of its node: they need time to reach the same line."""
    script = "import os, time; time.sleep(0.3 * int(os.environ['RANK'])); import nosuchmodule"
    job = stub_job(script).start()
    assert job.wait() == [1, 1]
    assert json.loads(job.paths.outcome(1).read_text())["alike"] > 2


def test_a_node_with_too_few_gpus_is_refused_before_the_launch(stub_job: Make) -> None:
    asked = {"device": Device.CUDA, "gpus_per_node": 2, "mixed_precision": MixedPrecision.NO}
    job = stub_job(HELLO, gpus=("0", "1", "2", "3"), **asked)
    job.start_node(0, CUDA_VISIBLE_DEVICES="0,1")
    job.start_node(1, CUDA_VISIBLE_DEVICES="2")
    assert job.wait() == [122, 122]
    assert "local1: only 1 GPU for 2 ranks; each rank needs one" in job.errors()
    assert job.events("rank_start") == []


def test_a_launcher_that_refuses_is_quoted(stub_job: Make) -> None:
    job = stub_job(HELLO).start(STUB_REFUSES="1")
    assert job.wait() == [7, 7]
    assert "the stub does not like this configuration" in job.errors()


def test_a_launcher_that_starts_no_rank_and_ends_well_has_failed(stub_job: Make) -> None:
    job = stub_job(HELLO, nodes=1, world_contract=True).start(STUB_RANKS="0")
    assert job.wait() == [1]
    assert "the launcher exited with status 0 after 0 of 2 ranks had started" in job.errors()
    assert job.events("failed")[0]["cause"] == "launcher"


ENDS_AT_ONCE = """
import os
if "RANK" in os.environ:
    os._exit(0)
"""


def test_new_interpreters_that_end_before_they_begin_have_failed(
    stub_job: Make, tmp_path: Path
) -> None:
    job = stub_job(HELLO, nodes=1, world_contract=True, launcher=Launcher.DIRECT)
    (tmp_path / "sitecustomize.py").write_text(ENDS_AT_ONCE)
    job.start_node(0, PYTHONPATH=f"{tmp_path}:{STUB}:{ROOT}")
    assert job.wait() == [1]
    assert "the launcher exited with status 0 after 0 of 2 ranks had started" in job.errors()


def test_ranks_that_leave_without_a_word_have_started_all_the_same(stub_job: Make) -> None:
    job = stub_job("import os; os._exit(0)", nodes=1, world_contract=True).start()
    assert job.wait() == [0]


def test_a_node_whose_clock_is_off_stamps_in_the_time_of_the_head(
    stub_job: Make, tmp_path: Path
) -> None:
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "sitecustomize.py").write_text(
        "import time\nnow, now_ns = time.time, time.time_ns\n"
        "time.time, time.time_ns = lambda: now() + 3600, lambda: now_ns() + 3600 * 10**9\n"
    )
    job = stub_job("import time; time.sleep(1); print(time.clock_gettime(time.CLOCK_REALTIME))")
    job.start_node(0)
    job.start_node(1, PYTHONPATH=f"{tmp_path / 'off'}:{STUB}:{ROOT}")
    assert job.wait() == [0, 0]
    (event,) = job.events("clock")
    assert event["node"] == "local1"
    assert abs(event["offset_us"] - 3600 * 10**6) <= event["rtt_us"] / 2 + 1
    for node in ("local0", "local1"):
        lines = [(at, text) for at, _, stream, text in job.log(node) if stream == "o"]
        assert len(lines) == 2
        assert all(abs(at / 1e6 - float(text)) < 100 for at, text in lines)
    said = [text for _, _, stream, text in job.log("local1") if stream == "a"]
    ahead = f"{event['offset_us'] / 10**6:.3f} s ahead"  # 3600 s, but for the way of a message
    assert said == [f"this node's clock is {ahead} of the conductor's; times are corrected"]
    ends = [event["ts"] for event in job.events("rank_exit")]  # by then the clocks are compared
    assert max(ends) - min(ends) < 100


def test_a_status_is_that_of_the_rank_where_nothing_can_be_said_of_it(stub_job: Make) -> None:
    job = stub_job("import sys; sys.exit(3)", nodes=1)
    (job.paths.slurm_dir / "node0.out").symlink_to("/dev/full")
    assert job.start().wait() == [3]


def test_what_could_not_be_written_is_kept_and_named_in_the_last_words(
    stub_job: Make, tmp_path: Path
) -> None:
    (tmp_path / "hasty").mkdir()
    (tmp_path / "hasty" / "sitecustomize.py").write_text(
        "from clusterrun.node.agent import process as agent_process\nagent_process.DRAIN_S = 1.0\n"
    )
    script = "import sys; print('rank 0 of 1 []'); print('to stderr', file=sys.stderr)"
    job = stub_job(script, nodes=1, nproc_per_node=1)
    log = job.paths.log(1, "local0")
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    job.start(PYTHONPATH=f"{tmp_path / 'hasty'}:{STUB}:{ROOT}")
    assert job.wait() == [0]
    assert "not all logs could be written" in job.errors()
    assert "(No space left on device); the ranks' own files are kept" in job.errors()
    [kept] = job.spools()
    assert f"are kept on local0 in {kept}" in job.errors()
    assert (kept / "rank_0.out").read_text() == "rank 0 of 1 []\n"


def test_a_node_with_fewer_ranks_breaks_the_world_contract(stub_job: Make) -> None:
    job = stub_job(HELLO, world_contract=True, launcher=Launcher.ACCELERATE)
    job.start_node(0, STUB_WORLD="3")
    job.start_node(1, STUB_WORLD="3", STUB_RANKS="1")
    since = time.monotonic()
    assert job.wait() == [120, 120]
    assert time.monotonic() - since < 20 * patience()
    assert "the launcher started 1 rank on this node, but the job requested 2" in job.errors()
    assert "LOCAL_WORLD_SIZE is 1 on local1" in job.errors()
    assert "the launcher started 3 ranks in total, but the job requested 4" in job.text()


def test_a_module_is_run_as_python_does(stub_job: Make) -> None:
    job = stub_job("timeit", "-n", "1", "pass", as_module=True).start()
    assert job.wait() == [0, 0]
    assert job.text().count("1 loop, best of 5") == 4


def test_a_plan_that_cannot_be_read_is_said_so(stub_job: Make) -> None:
    job = stub_job(HELLO, nodes=1)
    job.paths.plan.write_text("{}")
    job.start()
    assert job.wait() == [122]
    assert f"cannot read {job.paths.plan}" in job.errors()


# What a project or a script may do without harm

SHADOWS = ("secrets", "platform", "statistics", "logging", "json", "types", "threading", "psutil")


@pytest.mark.parametrize("as_module", [False, True])
def test_modules_of_the_project_replace_no_others_but_in_the_script(
    stub_job: Make, as_module: bool
) -> None:
    script = "import os, sys; print('first', sys.path[0], os.getcwd())\nimport secrets\n"
    job = stub_job("src.train" if as_module else "", "x", as_module=as_module)
    root = Path(job.plan.workdir)
    (root / "src").mkdir()
    (root / "src" / "train.py").write_text(script)
    for name in SHADOWS:
        (root / f"{name}.py").write_text(f"print('shadow {name}'); raise ImportError('{name}')")
    if not as_module:
        (root / "script.py").write_text("import runpy; runpy.run_path('src/train.py')")
    job.start()
    assert job.wait() == [1, 1], job.text()
    assert "ImportError: secrets" in job.text()  # the script's own are found, as by plain Python
    assert f"first {root} {root}" in job.text()
    assert not [name for name in SHADOWS[1:] if f"shadow {name}" in job.text() + job.errors()]
    assert "ImportError: secrets" in str(job.events("failed"))


def test_a_script_may_call_its_metrics_as_it_likes(stub_job: Make) -> None:
    """Signs of life are not kept: a long evaluation reports thousands."""
    names = ["self", "kind", "type", "ts", "node", "attempt", "rank", "code"]
    script = f"""
from clusterrun import runtime
runtime.emit("alive")
deep = []
for _ in range(100_000):
    deep = [deep]
runtime.emit("deep", deep=deep)
for name in {names}:
    runtime.emit("evaluated", **{{name: "odd"}}, deep=10**400)
print("went on")
"""
    job = stub_job(script).start()
    assert job.wait() == [0, 0], job.errors()
    assert job.text().count("went on") == 4
    assert job.events("alive") == []
    events = job.events("evaluated")
    assert [event["attempt"] for event in events] == [1] * 4 * len(names)
    assert {event["node"] for event in events} == {"local0", "local1"}


def test_what_outlived_its_parent_in_a_rank_is_reaped(stub_job: Make) -> None:
    script = """
import os, sys, time
if os.fork() == 0:
    for _ in range(5):
        if os.fork() == 0:
            os._exit(0)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(60)
"""
    job = stub_job(script, nproc_per_node=1).start()
    job.wait_for("ready", 2)
    agent = psutil.Process(job.agent_pid("local1"))
    wait_for(lambda: len(agent.children()) == 1, "the launcher is the only child", 15)


NO_ROOM = """
import subprocess
def Popen(*args, **options):
    raise OSError(28, "No space left on device")
subprocess.Popen = Popen
"""


def test_a_launcher_that_the_system_does_not_start_fails_the_job_in_words(
    stub_job: Make, tmp_path: Path
) -> None:
    job = stub_job(WAIT, launcher=Launcher.DIRECT)
    (tmp_path / "sitecustomize.py").write_text(NO_ROOM)
    job.start_node(0)
    job.start_node(1, PYTHONPATH=f"{tmp_path}:{STUB}:{ROOT}")
    assert job.wait() == [1, 1], job.errors()
    [failed] = job.events("failed")
    assert failed["message"] == "cannot start the launcher: No space left on device"
    assert (failed["node"], failed["cause"]) == ("local1", "launcher")
    assert "Traceback" not in job.errors() + job.text()
    assert json.loads(job.paths.outcome(1).read_text())["cause"] == "launcher"
    assert job.log("local1")[-1][2:] == ("z", "1 local1: " + failed["message"])


def failed_on_gpus(
    stub_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> AgentJob:
    """Fail on a node whose driver answers differently since then."""
    driver = stand_in(tmp_path / "nvml", tmp_path / "says", monkeypatch)
    asked = {"device": Device.CUDA, "gpus_per_node": 2, "mixed_precision": MixedPrecision.NO}
    driver.answer(gpu1_celsius=90)
    logs = "glob.glob(os.environ['CLUSTERRUN_RUN_DIR'] + '/logs/a1/*.log')"
    wait = f"while not any('90 °C' in open(log).read() for log in {logs}): time.sleep(0.1)"
    deed = f"{wait}\n    open('{driver.says}', 'w').write('{then}'); raise ValueError('torn')"
    job = stub_job(victim(deed, rank=1), nodes=1, gpus=("0", "1"), **asked)
    assert job.start(CUDA_VISIBLE_DEVICES="0,1").wait() == [1]
    return job


def test_an_alert_and_what_became_worse_on_the_gpus_are_noted(
    stub_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = failed_on_gpus(stub_job, tmp_path, monkeypatch, "gpu0.errors 3")
    assert "nvml: GPU 0 (0000:3b:00, GPU-a): 3 new uncorrectable ECC errors\n" in job.text()
    assert job.text().count("GPU 1: 90 °C") == 1
    (sample,) = read_latest(job.paths).values()
    assert [gpu.power_w for gpu in sample.gpus] == [350.5, 350.5]


def test_a_driver_that_hangs_does_not_keep_the_agent(
    stub_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = failed_on_gpus(stub_job, tmp_path, monkeypatch, "gpu0.errors hang")
    (end,) = job.events("failed")
    assert time.time() - end["ts"] < 12 * patience()
    assert "nvml: NVIDIA's driver did not answer within 3 s" in job.text()
    assert "cannot be killed" not in job.text()
    job.assert_clean()


FULL_SHM = """
import os
statvfs = os.statvfs

def full(path):
    found = statvfs(path)
    is_full = str(path) == "/dev/shm"
    return os.statvfs_result([*found[:2], 1 << 30, 0, 0, *found[5:]]) if is_full else found

os.statvfs = full
"""
SHM = "node.shm: /dev/shm: only 0 MiB of "


def start_with_shm(job: AgentJob, rank: int) -> AgentJob:
    """Start nodes, one of which has a full /dev/shm."""
    (job.tmp / "sitecustomize.py").write_text(FULL_SHM)
    for each in range(job.plan.nodes):
        path = f"{job.tmp}:{STUB}:{ROOT}"
        job.start_node(each, **({"PYTHONPATH": path} if each == rank else {}))
    return job


def test_a_node_that_fails_preflight_is_named_and_trains(stub_job: Make) -> None:
    job = start_with_shm(stub_job(HELLO), 1)
    assert job.wait() == [0, 0]
    assert f"clusterrun: preflight: local1: {SHM}" in job.errors()
    (found,) = job.events("preflight")[0]["findings"]
    assert (found["nodes"], found["id"], found["status"]) == (["local1"], "node.shm", "fail")
    assert job.events("preflight")[0]["node"] == "local0"
    assert json.loads(job.paths.outcome(1).read_text())["unfit"] == ["local1"]


def test_an_enforced_preflight_starts_no_rank(stub_job: Make) -> None:
    job = start_with_shm(stub_job(HELLO, preflight=Preflight.ENFORCE), 1)
    assert job.wait() == [NodeExit.NODE_UNFIT] * 2
    end = json.loads(job.paths.outcome(1).read_text())
    reason = "preflight failed: node.shm on local1"
    assert (end["cause"], end["unfit"], end["reason"]) == ("preflight", ["local1"], reason)
    assert job.events("rank_start") == []
    assert f"local1: {SHM}" in job.errors()
    job.assert_clean()


# Run directories in different places, and what the home has of both


PRINTS_STEPS = """
import os, sys, time
for step in range(30):
    where = os.environ["CLUSTERRUN_RUN_DIR"]
    print("rank", os.environ["RANK"], "step", step, "in", where, flush=True)
    time.sleep(0.02)
if os.environ["RANK"] == os.environ.get("FAILS"):
    raise SystemExit(3)
"""


@pytest.mark.parametrize("fails", ["", "3"])
def test_a_node_with_a_run_directory_of_its_own_takes_part(
    stub_job: Callable[..., AgentJob], tmp_path: Path, fails: str
) -> None:
    job = stub_job(PRINTS_STEPS)
    host = RunPaths(root=tmp_path / "gpu2" / "runs" / "job" / "run1")
    take_attempt(job.paths, 1, "me")
    write_bundle(host.root, bundle(job.paths))
    job.start_node(0, FAILS=fails)
    home, job.paths = job.paths, host
    job.paths.slurm_dir.mkdir()
    member = job.start_node(1, FAILS=fails, TMPDIR=str(tmp_path))
    job.paths = home
    receiver = Receiver(root=home.root, node="local1")
    deadline = time.monotonic() + 60 * patience()
    is_whole = False
    while not is_whole and time.monotonic() < deadline:
        has_ended, wanted = member.poll() is not None, receiver.wants()
        assert wanted
        parts = list(news(host.root, **wanted, shifts={}))
        for path, at, data in parts[:1] if not has_ended else parts:
            receiver.take(path, at, data)
        is_whole = has_ended and not parts
        time.sleep(0.02)
    assert [bool(code) for code in job.wait()] == [bool(fails)] * 2
    assert home.log(1, "local1").read_bytes() == host.log(1, "local1").read_bytes()
    lines = [text for _, rank, _, text in job.log("local1") if rank == "3"]
    assert lines[:30] == [f"rank 3 step {n} in {host.root}" for n in range(30)]
    assert [event["code"] for event in job.events("ended")] == [3 if fails else 0] * 2
    assert {event["node"] for event in job.events("failed")} == ({"local1"} if fails else set())
    job.assert_clean()
