"""What is submitted from inside a job starts from the environment that the job was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from clusterrun.backends.environment import scrubbed
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import render_bundle
from clusterrun.shared import given
from tests.launch.samples import on_slurm

SHELL = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home/ada",
    "NCCL_NET": "IB",
    "MULTI": "two\nlines 'and' $quotes",
    "BASH_FUNC_module%%": "() {  :\n}",
    "MY_TOKEN": "s3cr3t",
    "TRITON_CACHE_DIR": "/mine",
}

NOTE = """
import os; from clusterrun.shared.given import PIPE, before_setup, note_given
note_given(os.environ, before_setup(int(os.environ[PIPE])))
os.execlp("env", "env", "-0")
"""


def in_the_job(plan: Plan, tmp_path: Path, **before: str) -> dict[str, str]:
    """Source env.sh as a node does; return the environment that its agent has."""
    script = tmp_path / "env.sh"
    script.write_text(render_bundle(plan, resolved_yaml="").files["env.sh"])
    start = f"source {script} && {given.PIPE}=$clusterrun_given exec {sys.executable} -c '{NOTE}'"
    argv = ["bash", "-c", start]
    done = subprocess.run(argv, env={**SHELL, **before}, capture_output=True, check=True)
    pairs = (entry.partition("=") for entry in done.stdout.decode().split("\0")[:-1])
    own = ("_", "SHLVL", "PWD", "LC_CTYPE")
    return {name: value for name, _, value in pairs if name not in own}


def plan_with_setup(*setup: str, **env: str) -> Plan:
    return on_slurm(nodes=2, gpus_per_node=4, setup=setup, env=env)


def test_what_env_sh_adds_and_changes_is_undone(tmp_path: Path) -> None:
    setup = ('export PATH="/opt/cuda/bin:$PATH"', "export MODULES=cuda", "unset TRITON_CACHE_DIR")
    plan = plan_with_setup(*setup, NCCL_NET="Socket")
    env = in_the_job(plan, tmp_path)
    assert (env["NCCL_NET"], env["MODULES"]) == ("Socket", "cuda")
    assert given.as_given(env) == SHELL
    assert given.as_given(in_the_job(plan, tmp_path, **env)) == SHELL, "a second look"


def test_no_secret_is_copied(tmp_path: Path) -> None:
    env = in_the_job(plan_with_setup("export MY_TOKEN=an0th3r"), tmp_path)
    given.note_start(env)
    assert [name for name, value in env.items() if "s3cr3t" in value] == []
    assert [name for name, value in env.items() if "an0th3r" in value] == ["MY_TOKEN"]
    assert given.as_given(env)["MY_TOKEN"] == "an0th3r"


def test_what_agent_and_launcher_add_is_dropped_and_what_the_script_sets_stays(
    tmp_path: Path,
) -> None:
    job = in_the_job(plan_with_setup(), tmp_path)
    rank = given.noting_changes(
        job, {**job, "HOME": "/spool", "CLUSTERRUN_SPOOL": "/spool", "GLOO_SOCKET_IFNAME": "lo"}
    )
    rank |= {"NCCL_P2P_DISABLE": "1", "MASTER_ADDR": "10.0.0.1"}  # by the launcher
    given.note_start(rank)
    assert scrubbed(rank) == SHELL
    rank |= {"TRITON_CACHE_DIR": "/the/scripts/own", "GLOO_SOCKET_IFNAME": "ib7"}
    del rank["MULTI"]
    own = {"TRITON_CACHE_DIR": "/the/scripts/own", "GLOO_SOCKET_IFNAME": "ib7"}
    kept = {name: value for name, value in SHELL.items() if name != "MULTI"}
    assert scrubbed(rank) == {**kept, **own}


def test_what_says_nothing_of_a_start_is_no_environment_of_a_rank() -> None:
    environ = {"CLUSTERRUN_GIVEN": "HOME", "HOME": "/h", "CLUSTERRUN_STARTED": "{", "X": "1"}
    assert given.as_given(environ) == {"HOME": "/h"}
    assert given.as_given({"HOME": "/h", "X": "1"}) == {"HOME": "/h", "X": "1"}
