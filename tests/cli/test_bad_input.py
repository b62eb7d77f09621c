"""Every mistake of the user's: one clear message, the right exit status, nothing left behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.backends.slurm import backend
from clusterrun.shared import shell
from clusterrun.shared.installed import installed_version
from tests.cli.conftest import CommandLine
from tests.cli.runs import ended, queue, submitted

LOCAL = ("--cluster", "local")
SLURM = ("--cluster", "slurm")
PROJECT = ["train.py"]


def without_times(err: str) -> str:
    return re.sub(r"within \d+ s", "within N s", err)


def refused(here: CommandLine, *args: str, code: int = 2, files: list[str] | None = None) -> str:
    """Run a submission that must fail; return what it said, having held the rest."""
    before = here.files() if files is None else files
    said = here("submit", *args)
    assert said.code == code, said.err
    assert said.out == ""
    assert here.files() == before
    state = here.path.parent / "state"
    assert not (state / "clusterrun" / "roots.json").exists()
    return said.err


def test_a_file_that_is_missing_is_named(here: CommandLine) -> None:
    (here.path / "src").mkdir()
    for words, error, hint in (
        (
            "sub/train.py",
            "the script 'sub/train.py' does not exist",
            f"check the path: there is no directory {here.path}/sub",
        ),
        (
            "src",
            "cannot read the script 'src': Is a directory",
            "name a script that you can read",
        ),
        (
            "--config job.yaml train.py",
            "cannot read job.yaml: No such file or directory",
            "check that it exists and that you can read it",
        ),
        *(
            (
                f"--{option}-config own.yaml train.py",
                f"the {name} configuration 'own.yaml' does not exist",
                f"check the name: it is not in {here.path}",
            )
            for option, name in (("accelerate", "accelerate"), ("deepspeed", "DeepSpeed"))
        ),
        (
            "--env HF_TOKEN=hf_abcdefghijklmnop1234 train.py",
            "--env: HF_TOKEN looks like a secret and would be written to the run directory",
            "export it in your shell and write pass_env: [HF_TOKEN]; its value is not stored",
        ),
    ):
        said = refused(here, *LOCAL, *words.split())
        assert said == f"error: {error}\n  hint: {hint}\n"


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        (
            b"\x7fELF\0\0",
            "'t.py' is not a Python script: it is a binary file",
            "name the Python training script",
        ),
        (b"#!/bin/bash\n", "'t.py' is not a Python script: it begins with #!/bin/bash", "name the"),
        (b"x = 1\nif x\n", "t.py:2: expected ':' (SyntaxError)", "correct this line: if x"),
        (b"def f():\n  a\n\tb\n", "t.py:3: inconsistent use of tabs", "correct this line: b"),
        (b"x = '\xff'\n", "t.py:1: ", "correct this line: x = "),
    ],
)
def test_a_file_that_is_no_python_program(
    here: CommandLine, source: bytes, message: str, hint: str
) -> None:
    (here.path / "t.py").write_bytes(source)
    lines = refused(here, *LOCAL, "t.py").splitlines()
    assert lines[-2].startswith(f"error: {message}")
    assert lines[-1].startswith(f"  hint: {hint}")


@pytest.mark.parametrize(
    "source", [b"#!/usr/bin/env python3\nprint(1)\n", b"PK\x03\x04\0\0", b"'\\d'\n", b""]
)
def test_a_program_is_not_executed_to_be_checked(here: CommandLine, source: bytes) -> None:
    (here.path / "t.py").write_bytes(source)
    said = here("render", *SLURM, "t.py")
    assert (said.code, "SyntaxWarning" in said.err) == (0, False)
    (here.path / "t.py").write_text("raise SystemExit('executed')\n")
    assert here("submit", "--dry-run", *LOCAL, "t.py").code == 0


def test_a_module_of_the_project_is_compiled(here: CommandLine) -> None:
    (here.path / "pkg").mkdir()
    (here.path / "pkg" / "__main__.py").write_text("import\n")
    assert "error: pkg:1: " in refused(here, *LOCAL, "-m", "pkg", files=here.files())
    assert here("render", *LOCAL, "-m", "elsewhere").code == 0


def test_an_interpreter_without_packages_is_named(here: CommandLine) -> None:
    """A project's file may name it, but it is not executed then."""
    (here.path / "clusterrun.yaml").write_text("launch: {setup: [{venv: env}]}\nscript: train.py\n")
    packages = here.path / "env/lib/python3.12/site-packages"
    (packages / "torch-2.5.1.dist-info").mkdir(parents=True)
    (packages / "torch-2.5.1.dist-info/METADATA").write_text("Name: torch\nVersion: 2.5.1\n")
    (here.path / "env/bin").mkdir()
    (here.path / "env/bin/activate").touch()
    (here.path / "env/pyvenv.cfg").write_text("home = /usr/bin\n")
    python = here.path / "env/bin/python"
    python.write_text(f"#!/bin/sh\necho ran > {here.path}/ran\n")
    python.chmod(0o755)
    here.slurm()
    assert refused(here).splitlines()[-2:] == [
        f"error: {python} has no clusterrun or accelerate",
        f"  hint: run {python} -m pip install '.[train]' in a clone of clusterrun, or name another "
        "interpreter with --python",
    ]
    assert here.asked("sbatch") == []
    said = here("render")
    assert said.code == 0
    assert f"note: submit would refuse this job here: {python} has no clusterrun or acc" in said.err
    (here.path / "clusterrun.yaml").write_text(
        "launch: {setup: [{modules: torch}, {venv: env}]}\nscript: train.py\n"
    )
    said = here("submit")  # the module may bring them
    assert (said.code, f"note: {python} has no clusterrun or accelerate; " in said.err) == (0, True)


def test_a_key_that_the_jobs_accelerate_does_not_know(here: CommandLine) -> None:
    (here.path / "own.yaml").write_text(
        "distributed_type: MULTI_GPU\nfp16: true\ndynamo_backend: 'NO'\nfsdp_config: {any: 1}\n"
        "num_proceses: 2\nuse_gradient_checkpoints: true\n"
    )
    assert refused(here, *LOCAL, "--accelerate-config", "own.yaml", "train.py") == (
        f"error: own.yaml: accelerate {installed_version('accelerate')} has no key 'num_proceses' "
        "or 'use_gradient_checkpoints'\n"
        "  hint: write num_processes for num_proceses\n"
    )


@pytest.mark.parametrize("verb", ["submit", "resubmit", "resume"])
def test_a_refused_job_has_no_notes_before_its_error(here: CommandLine, verb: str) -> None:
    ended(submitted(here, "4711", "-N2", "train.py"), "FAILED", 1)
    queue(here, "4711|FAILED|n|1:00|1:00|1000|2000|||NonZeroExitCode")
    (here.path / "train.py").write_text("def (")
    what = {"resubmit": ("4711",), "resume": ("4711", "--from", "scratch", "--time", "5")}
    said = here(verb, *what.get(verb, ("-N2", "train.py")))
    assert said.code == 2
    assert said.err.startswith("error: ")


def test_run_directory_that_cannot_be_made(here: CommandLine) -> None:
    (here.path / "taken").write_text("")
    err = refused(here, *LOCAL, "--run-dir", "taken", "train.py", code=1)
    assert err.splitlines()[-2].startswith(
        f"error: cannot create the run directory {here.path}/taken/train/"
    )
    assert ": [Errno " in err.splitlines()[-2]
    assert err.splitlines()[-1] == "  hint: choose another directory with --run-dir"


def test_run_directory_that_the_nodes_do_not_share_is_told(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm()
    local = os.path.realpath(here.path)
    for place, option, value, where, fix in (
        ("/dev/shm", "--run-dir", "/dev/shm/runs", "/dev/shm/runs", "pass a --run-dir that all"),
        (local, "--run-dir", "/shared", str(here.path), "submit from a directory that all nodes"),
        ("/dev/shm", "--python", "/dev/shm/bin/python", "/dev/shm/bin", "name an interpreter that"),
    ):
        monkeypatch.setattr("clusterrun.verbs.render.PLACES_OF_ONE_MACHINE", (place,))
        said = here("render", *SLURM, option, value, "train.py")
        assert said.code == 0
        assert f"note: {where} is probably on a local disk of this machine; {fix}" in said.err


def test_slurm_without_sbatch(here: CommandLine) -> None:
    assert refused(here, *SLURM, "train.py").endswith(
        "error: sbatch was not found on this machine\n"
        "  hint: use a login node of the cluster, or run here with --cluster local\n"
    )


def test_slurm_that_cannot_be_reached(here: CommandLine) -> None:
    words = "Unable to contact slurm controller (connect failure)"
    here.slurm(f'echo "sbatch: error: {words}" >&2; exit 1')
    err = refused(here, "train.py", code=5)
    assert without_times(err[err.index("error:") :]) == (
        "error: sbatch could not reach Slurm (1 try): "
        f"sbatch: error: {words}\n"
        "  hint: try again later; jobs that are already in the queue are not affected\n"
    )
    assert here.asked("sbatch").count("--parsable") == 1


def test_sbatch_that_does_not_answer_is_never_asked_twice(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may be in the queue: its run directory stays, and the user is told to look."""
    here.slurm("sleep 30")
    monkeypatch.setattr(backend, "SBATCH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(backend, "LOOK_AGAIN_S", 0.0)
    said = here("submit", "train.py")
    assert (said.code, said.out) == (5, "")
    (run_dir,) = (here.path / "runs" / "train").iterdir()
    assert said.err[said.err.index("error:") :] == (
        "error: sbatch got no answer; the job may or may not be in the queue: "
        "the command was still running and was killed\n"
        "  hint: look for it with 'squeue --me' before you submit again; "
        f"its run directory was kept: {run_dir}\n"
    )
    assert here.asked("sbatch").count("--parsable") == 1


def test_an_unknown_job_is_one_message(here: CommandLine) -> None:
    error = f"error: no job or run '47111' in {here.path}/runs\n"
    hint = "  hint: run the command where you submitted, or pass the path of the run\n"
    for words in (["status"], ["logs"], ["cancel", "--json"]):
        said = here(*words, "47111")
        assert (said.code, said.err) == (4, error + hint)
        assert "--json" in words or said.out == ""
    assert json.loads(said.out)["code"] == "job_not_found"  # nothing else is on stdout
    assert here.files() == PROJECT
    here.slurm()
    assert here("submit", "--job-name", "llama", "train.py").code == 0
    said = here("status", "47111")
    assert said.err == f"{error}  hint: choose a run; the newest are: 4711 (llama)\n"


def test_scheduler_that_is_silent_is_not_an_unknown_job(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.slurm()
    assert here("submit", "train.py").code == 0
    monkeypatch.setattr(shell, "PAUSES_S", (0.0, 0.0))
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for name in ("squeue", "sacct", "scontrol"):
        here.program(name, f'echo "{words}" >&2; exit 1')
    said = here("status", "4711", "--json")
    assert said.code == 5
    assert json.loads(said.out)["state"] == "UNKNOWN"
    assert without_times(said.err).endswith(
        "error: squeue could not reach Slurm (3 tries): "
        f"{words}\n"
        "  hint: try again later; jobs that are already in the queue are not affected\n"
    )
    listed = here("list")
    assert listed.code == 5
    assert "UNKNOWN" in listed.out


def test_several_jobs_are_not_cancelled_without_a_yes(here: CommandLine) -> None:
    here.slurm()
    here.program("squeue", "printf '%s|RUNNING|n1|1:00|UNLIMITED|N/A|N/A|||None\\n' 4711 4712")
    assert here("submit", "train.py").code == 0
    here.program("sbatch", "echo 4712")
    assert here("submit", "train.py").code == 0
    said = here("cancel", "4711", "4712")
    assert (said.code, said.out) == (2, "")
    assert said.err == (
        "error: cancelling 2 jobs on 2 nodes needs confirmation, but this is not a terminal\n"
        "  hint: pass -y to cancel without confirmation\n"
    )
    assert here.asked("scancel") == []
    assert here("cancel", "-y", "4711", "4712").code == 0
    assert sorted(here.asked("scancel")) == ["4711", "4712"]


def test_cancel_refuses_an_empty_selection(here: CommandLine) -> None:
    for jobs in ((), ("",), ("-y",), ("4711", "")):
        said = here("cancel", *jobs)
        assert (said.code, said.out) == (2, "")
        assert said.err == "error: no job given\n  hint: name a job that clusterrun list shows\n"


def test_many_nodes_need_a_yes_where_nobody_can_be_asked(here: CommandLine) -> None:
    here.slurm()
    err = refused(here, "-N", "65", "train.py")
    assert err[err.index("error:") :] == (
        "error: a job on more than 64 nodes needs confirmation, but this is not a terminal\n"
        "  hint: pass -y to submit to 65 nodes\n"
    )
    assert here.asked("sbatch") == []
    assert here("submit", "-y", "-N", "65", "train.py").code == 0


def test_render_that_cannot_write_leaves_nothing(here: CommandLine) -> None:
    (here.path / "out").mkdir()
    (here.path / "out" / "mine").write_text("")
    before = here.files()
    for where, status, error in (
        ("out", 2, "error: the directory 'out' is not empty\n  hint: choose a new one\n"),
        ("train.py/out", 1, "error: cannot write into 'train.py/out': "),
    ):
        said = here("render", *LOCAL, "-O", where, "train.py")
        assert (said.code, said.out) == (status, "")
        assert error in said.err
        assert here.files() == before


def test_a_mistake_is_named(here: CommandLine) -> None:
    for line, error in (
        ("submit --cluster local", "no training script given"),
        ("submit --cluster local trian.py --lr 1", "the script 'trian.py' does not exist"),
        ("submit --cluster local --nodes 0 train.py", "--nodes must be at least 1, not 0"),
        ("completion", "missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish"),
        ("submti", "no command 'submti'"),
        ("help sumbit", "no command 'sumbit'"),
    ):
        said = here(*shlex.split(line))
        assert (said.code, said.err.splitlines()[0]) == (2, f"error: {error}")
    for text, error in (
        ("name: x\nscript: tain.py\n", "2:9: the script 'tain.py' does not exist"),
        ("slurm:\n  gpus_per_nodes: 4\n", "2:3: unknown key 'gpus_per_nodes' in section [slurm]"),
    ):
        (here.path / "clusterrun.yaml").write_text(text)
        assert refused(here, *LOCAL).startswith(f"error: clusterrun.yaml:{error}\n")


# Looking at a project of somebody else runs none of its code on the login node


LOOKS = ("render", "submit --dry-run", "config validate")
PROJECTS = (  # the configuration, and options
    ("launch: {python: ./evilenv/bin/python}", ""),
    ("launch: {setup: [{conda: ./evilenv}]}", ""),
    ("launch: {setup: [{conda: ./evilenv}]}", "--setup export --python python"),
    ("env: {PYTHONPATH: HERE/lib}", ""),
    ("env: {PYTHONPATH: HERE/lib}", "--python ./mine"),
)


@pytest.fixture(name="ran")
def _ran(here: CommandLine) -> Path:
    """Make a project whose interpreter and modules write the file that is returned."""
    marker = here.path.parent / "ran"
    python = here.path / "evilenv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho python >> {marker}\n")
    python.chmod(0o755)
    (here.path / "evilenv/lib/python3.99/site-packages").mkdir(parents=True)
    (here.path / "evilenv/conda-meta").mkdir()
    for name in ("json", "sitecustomize", "lib/sitecustomize", "lib/json"):
        (here.path / "lib").mkdir(exist_ok=True)
        text = f"open({str(marker)!r}, 'a').write({name!r})\n"
        (here.path / f"{name}.py").write_text(text)
    here.slurm()
    return marker


def test_no_code_of_the_project_runs(here: CommandLine, ran: Path) -> None:
    (here.path / "mine").symlink_to(sys.executable)
    for command, (config, options) in itertools.product(LOOKS, PROJECTS):
        text = f"script: train.py\n{config.replace('HERE', str(here.path))}\n"
        (here.path / "clusterrun.yaml").write_text(text)
        words = options.split() if not command.startswith("config") else []
        assert "Traceback" not in here(*command.split(), *words).err
        assert not ran.exists(), (command, config, options, ran.read_text())


def test_the_users_own_choice_runs(here: CommandLine, ran: Path) -> None:
    here("render", "--python", "./evilenv/bin/python", "train.py")
    assert ran.read_text().startswith("python")
    ran.unlink()
    subprocess.run([sys.executable, "-c", "import json"], cwd=here.path, check=True)
    assert ran.read_text() == "json"


def test_submit_refuses_no_environment_whose_own_code_may_add_packages(
    here: CommandLine, ran: Path
) -> None:
    text = "script: train.py\nlaunch: {setup: [{conda: ./evilenv}]}\n"
    (here.path / "clusterrun.yaml").write_text(text)
    said = here("submit", "--dry-run")
    assert (said.code, "has no clusterrun, torch or accelerate" in said.err) == (2, True), said
    pth = here.path / "evilenv/lib/python3.99/site-packages/shared.pth"
    pth.write_text("import site; site.addsitedir('/shared/pkgs')\n")
    said = here("submit", "--dry-run")
    assert said.code != 2
    assert "has no clusterrun" not in said.err
    assert "note: the nodes run python from the environment that setup activates" in said.err
    assert not ran.exists()
