"""Run rendered scripts in real bash with the real conductor; srun and the agents are stubs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.config.spec import JobSpec
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import Bundle, render_bundle
from clusterrun.rundir.outcome import Outcome
from tests.launch.samples import slurm_facts
from tests.patience import patience

# Starts the command once for each node, as srun does; its status is the last node's, or the one
# that STUB_SRUN_STATUS gives this attempt (the last one also for those that follow).
_SRUN = r"""#!/bin/bash
printf '%s\0' "$@" > "$STUB_DIR/srun.args"
cp "$STUB_DIR/srun.args" "$STUB_DIR/srun.${@: -3:1}.args"
statuses=(${STUB_SRUN_STATUS:-0})
status=${statuses[${@: -3:1} - 1]:-${statuses[-1]}}
nodes=1
while [[ $1 == -* ]]; do
  [[ $1 == --nodes=* ]] && nodes=${1#--nodes=}
  shift
done
[[ -n ${STUB_SRUN_SLEEP:-} ]] && { touch "$STUB_DIR/srun.up"; sleep "$STUB_SRUN_SLEEP"; }
for ((node = 0; node < nodes; node++)); do
  SLURM_NODEID=$node "$@" || exit
done
exit "$status"
"""
# The conductor is real; an agent leaves the outcome that the test put down for its attempt.
_PYTHON = r"""#!/bin/bash
[[ $1 == -V || $2 == *clusterrun.backends* ]] && exec REAL "$@"
[[ $1 == -c && $2 == *run_module_as_main* ]] && set -- -m "${@:3}"
where=$STUB_DIR/python.agent.$SLURM_NODEID
printf '%s\0' "$@" > "$where.args"
env -0 > "$where.env"
printf '%s' "$PWD" > "$where.cwd"
readlink "/proc/$$/fd/0" > "$where.stdin"
outcome=$STUB_DIR/outcome.${@: -3:1}
[[ ! -f $outcome ]] || cp "$outcome" "${@: -4:1}/attempts/${@: -3:1}/outcome.json"
exit "${STUB_PYTHON_STATUS:-0}"
""".replace("REAL", shlex.quote(sys.executable))
_SCONTROL = r"""#!/bin/bash
[[ $1 == ping ]] && { cat "$STUB_DIR/ping" 2> /dev/null; exit; }
[[ $* == *show* ]] || printf '%s\n' "$*" >> "$STUB_DIR/scontrol.asked"
"""
_SBATCH = r"""#!/bin/bash
touch "$STUB_DIR/sbatch.up"
sleep "${STUB_SBATCH_SLEEP:-0}" && touch "$STUB_DIR/sbatch.done" && echo 4712
"""
STUBS = {
    "srun": _SRUN,
    "python": _PYTHON,
    "scontrol": _SCONTROL,
    "sbatch": _SBATCH,
    "squeue": "#!/bin/bash\n",
}


@dataclass(frozen=True, kw_only=True)
class BatchSite:
    """A place where jobs run: a working directory, runs, and stubs on PATH."""

    root: Path

    @property
    def workdir(self) -> Path:
        return self.root / "it's my work"

    @property
    def runs(self) -> Path:
        return self.root / "runs; touch canary"

    @property
    def stubs(self) -> Path:
        return self.root / "stubs"

    def plan(self, *, python: str = "", **asked: Any) -> Plan:
        """Plan a job of this site, by default with the stub for an interpreter."""
        python = python or str(self.stubs / "python")
        facts = slurm_facts(workdir=str(self.workdir), runs_dir=str(self.runs), python=python)
        return make_plan(JobSpec(**{"script": "train.py", "name": "job", **asked}), facts)

    def environment(self, **variables: str) -> dict[str, str]:
        """Name the environment that Slurm would start the batch script with."""
        return {
            "PATH": f"{self.stubs}:/usr/bin:/bin",
            "STUB_DIR": str(self.stubs),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
            **variables,
        }

    def start(self, bundle: Bundle, *args: str, **variables: str) -> subprocess.Popen[str]:
        """Start the batch script as slurmd does, from a spool file."""
        spool = self.root / "slurm_script"
        spool.write_text(bundle.script)
        return subprocess.Popen(
            ["bash", str(spool), *args],
            cwd=self.root,
            env=self.environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, bundle: Bundle, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the batch script to its end."""
        process = self.start(bundle, *args, **variables)
        out, err = process.communicate(timeout=60 * patience())
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_dir(self, bundle: Bundle) -> Path:
        """Write a run directory, as submit does."""
        path = self.root / "a run"
        path.mkdir()
        for name, text in bundle.files.items():
            (path / name).write_text(text)
        return path

    def ends(self, attempt: int, code: int, cause: str = "signal", **what: Any) -> None:
        """Say what an attempt's agents report of its end."""
        about = {"attempt": attempt, "job_id": "4711", "started_at": 1.0, "ended_at": 2.0}
        values = {**about, "nodes": ("n1", "n2"), "reason": "why", **what}
        outcome = Outcome(code=code, cause=cause, **values)
        (self.stubs / f"outcome.{attempt}").write_text(outcome.to_json())

    def got(self, name: str) -> list[bytes]:
        """Read what a stub was given."""
        return (self.stubs / name).read_bytes().split(b"\0")[:-1]

    def env_of(self, name: str) -> dict[bytes, bytes]:
        """Read the environment that a stub was given."""
        pairs = (entry.partition(b"=") for entry in self.got(name))
        return {key: value for key, _, value in pairs}

    def canaries(self) -> list[Path]:
        """Find what only a text that ran as a command could have made."""
        return list(self.root.rglob("canary*"))


def make_site(root: Path) -> BatchSite:
    """Build a site below a directory."""
    site = BatchSite(root=root)
    site.workdir.mkdir()
    site.stubs.mkdir()
    for name, text in STUBS.items():
        (site.stubs / name).write_text(text)
        (site.stubs / name).chmod(0o755)
    return site


def rendered(plan: Plan) -> Bundle:
    """Render a plan for a job of the tests."""
    return render_bundle(plan, resolved_yaml="# resolved\n")


def end_of(run_dir: Path) -> dict[str, Any]:
    """Read the last word about a run."""
    return dict(json.loads((run_dir / "end.json").read_text()))


def mode(path: Path) -> int:
    """Read the permissions of a path."""
    return os.stat(path).st_mode & 0o777
