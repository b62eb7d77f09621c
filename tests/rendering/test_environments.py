"""Environments that `setup` names, in real bash: conda and modules are stand-ins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clusterrun.errors import NodeExit
from tests.rendering.job import BatchSite, make_site, rendered

UNFIT = int(NodeExit.NODE_UNFIT)
# As conda's own: a hook that defines a function, whose scripts use what may not be set.
CONDA = r"""#!/bin/bash
[[ $* == "shell.bash hook" ]] || exit 9
cat <<'END'
conda() {
  [[ "$1 $2" == "activate it's; touch canary" ]] || { echo "no environment $2" >&2; return 1; }
  export CONDA_DEFAULT_ENV=$2 WITHOUT_A_VALUE=$NEVER_SET
}
END
"""
MODULE = r"""
module() {
  local name
  for name in "${@:2}"; do
    [[ $name == cuda/* ]] || { echo "unknown module $name" >&2; return 1; }
    export LOADED="${LOADED:-}$1 $name;" WITHOUT_A_VALUE=$NEVER_SET
  done
}
"""


@pytest.fixture(name="site")
def _site(tmp_path: Path) -> BatchSite:
    site = make_site(tmp_path)
    (site.root / "conda").write_text(CONDA)
    (site.root / "conda").chmod(0o755)
    (site.root / "init").mkdir()
    (site.root / "init" / "bash").write_text(MODULE)
    return site


def run(site: BatchSite, *setup: str, **variables: str) -> tuple[int, str]:
    """Run a batch script with these setup lines; return its status and what it said."""
    bundle = rendered(site.plan(setup=setup))
    home = {"HOME": str(site.root), "SLURMD_NODENAME": "n7"}
    done = site.run(bundle, str(site.run_dir(bundle)), **{**home, **variables})
    return done.returncode, done.stderr


def test_environments_and_lines_come_in_their_order_and_reach_the_ranks(site: BatchSite) -> None:
    places = {"CONDA_EXE": str(site.root / "conda"), "MODULESHOME": str(site.root)}
    lines = (
        "set -u",
        "modules: cuda/12.4 cuda/$(touch${IFS}canary)",
        "conda: it's; touch canary",
        'export SEEN="$LOADED$CONDA_DEFAULT_ENV"',
    )
    assert run(site, *lines, **places) == (0, "")
    seen = b"load cuda/12.4;load cuda/$(touch${IFS}canary);it's; touch canary"
    assert site.env_of("python.agent.0.env")[b"SEEN"] == seen
    assert site.canaries() == []


def test_conda_is_found_on_the_path_and_in_the_home(site: BatchSite) -> None:
    (site.root / "miniconda3" / "bin").mkdir(parents=True)
    (site.root / "conda").rename(site.root / "miniconda3/bin/conda")
    assert run(site, "conda: it's; touch canary") == (0, "")
    (site.root / "a run").rename(site.root / "before")
    (site.root / "miniconda3/bin/conda").rename(site.stubs / "conda")
    assert run(site, "conda: it's; touch canary") == (0, "")


def test_an_environment_that_is_not_there_ends_the_job_with_a_line(site: BatchSite) -> None:
    places = {"CONDA_EXE": str(site.root / "conda"), "MODULESHOME": str(site.root)}
    for line, said in {
        "conda: other": "conda can't activate other on this node; list its environments",
        "modules: cuda/12 nccl": "cannot load these modules on this node: cuda/12 nccl; list",
        "venv: /no/venv": "there is no virtual environment /no/venv on this node; put it where all",
        "uv: /no": "there is no virtual environment /no/.venv on this node",
    }.items():
        status, err = run(site, line, "touch canary", **places)
        assert status == UNFIT
        assert f"clusterrun: n7: {said}" in err
        assert site.canaries() == []
        assert not (site.stubs / "python.agent.0.args").exists()
        shutil.rmtree(site.root / "a run")


def test_a_shell_without_conda_or_modules_says_what_to_write(site: BatchSite) -> None:
    for line, said in {
        "conda: llm": "there is no conda on this node; put it on PATH in an earlier setup line",
        "modules: cuda": "there is no module command on this node; define it in an earlier setup",
        "conda activate llm": "status 127: conda activate llm; a job's shell has no",
        "module load cuda": "write setup: {modules: [NAME]}",
        "ml cuda": "write setup: {modules: [NAME]}",
        "no-such-command": "add 'source /etc/profile' before it",
    }.items():
        status, err = run(site, line)
        assert (status, said in err) == (UNFIT, True), line
        shutil.rmtree(site.root / "a run")


def test_conda_that_was_not_initialised_says_what_to_write(site: BatchSite) -> None:
    """Its program alone is on PATH, and can't activate anything."""
    (site.root / "conda").rename(site.stubs / "conda")
    status, err = run(site, "conda activate llm")
    assert status == UNFIT
    assert "status 9: conda activate llm; a job's shell has no 'conda activate': write" in err
    assert "setup: {conda: NAME}" in err
