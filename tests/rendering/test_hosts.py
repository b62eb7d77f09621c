"""What hosts without Slurm get: their interpreter's home, and commands to type by hand."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import yaml

from clusterrun.config.choices import Cluster
from clusterrun.config.hosts import HostList
from clusterrun.config.spec import JobSpec
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import by_hand, render_bundle
from tests.launch.samples import slurm_facts
from tests.patience import finished
from tests.rendering.golden_cases import RESOLVED, two_nodes_of_gpus


def test_each_host_expands_the_home_of_its_interpreter(tmp_path: Path) -> None:
    """Run node.sh up to the interpreter, which here only prints its name."""
    home, run = tmp_path / "a home", tmp_path / "run"
    python = program(home / "env" / "bin" / "python", '#!/bin/sh\nprintf "%s\\n" "$0"\n')
    run.mkdir()
    plan = dataclasses.replace(
        two_nodes_of_gpus(), python="~/env/bin/python", workdir=str(tmp_path)
    )
    for name, text in render_bundle(plan, resolved_yaml=RESOLVED).files.items():
        (run / name).write_text(text)
    environ = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    done = finished(["bash", run / "node.sh", run, "1"], env=environ)
    assert (done.stdout, done.stderr) == (f"{python}\n", "")


SSH = """#!/bin/sh
printf '%s\\n' "$*" >> "$LOG"
for last; do :; done
exec sh -c "$last"
"""
PYTHON = """#!/bin/sh
{ pwd; printf '%s\\n' "$GREETING"; for word; do printf '%s\\0' "$word"; done; } > "$LOG.${10}"
cat "$4" > "$LOG.${10}.yaml"
"""


def program(path: Path, text: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def plan_for(root: Path, **asked: Any) -> Plan:
    """Plan two hosts and a spare, whose interpreter only writes down how it was called."""
    python = program(root / "python", PYTHON)
    work = root / "it's a project"
    work.mkdir()
    hosts = HostList(hosts=("gpu1", "ann@gpu2:2222", "gpu3"), slots=(0, 0, 0), source="--hosts")
    facts = slurm_facts(cluster=Cluster.SSH, hosts=hosts, python=str(python), workdir=str(work))
    return make_plan(JobSpec(script="train.py", gpus_per_node=2, spare_nodes=1, **asked), facts)


def typed(plan: Plan, root: Path) -> list[str]:
    """Run the commands with an ssh that stays here; return how each called ssh."""
    program(root / "bin" / "ssh", SSH)
    bundle = render_bundle(plan, resolved_yaml=RESOLVED)
    log = root / "log"
    (root / "tmp").mkdir()
    usual = {"HOME": str(root), "PATH": f"{root}/bin:/usr/bin:/bin"}
    environ = {**usual, "LOG": str(log), "TMPDIR": str(root / "tmp")}
    done = finished(["sh"], input="\n".join(by_hand(plan, bundle)), env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert list((root / "tmp").iterdir()) == []
    return log.read_text().splitlines()


def test_the_commands_to_type_by_hand_are_complete_and_take_any_text_as_data(
    tmp_path: Path,
) -> None:
    alone = ("$HOME", "`id`", "a\\b", 'a"b', "!!", "a b")
    args = (*alone, "--prompt", 'it\'s $HOME `id` "x" \\ !', "", "two\nlines", "*; touch /tmp/x #")
    plan = plan_for(tmp_path, args=args, env={"GREETING": "it's $(id)"}, setup=("true # fine",))
    calls = typed(plan, tmp_path)
    assert [line.split(" cd ")[0] for line in calls if " cd " in line] == [
        "gpu1",
        "-p 2222 ann@gpu2",
    ]
    for rank in ("0", "1"):
        cwd, greeting, rest = (tmp_path / f"log.{rank}").read_text().split("\n", 2)
        words = rest.split("\0")[:-1]
        assert (cwd, greeting) == (plan.workdir, "it's $(id)")
        assert words[:2] == ["-m", "accelerate.commands.launch"]
        assert words[-len(args) - 1 :] == ["train.py", *args]
        options = dict(itertools.pairwise(words[: words.index("train.py")]))
        assert options["--machine_rank"] == rank
        assert options["--num_machines"] == "2"
        assert options["--num_processes"] == "4"
        assert options["--main_process_ip"] == "gpu1"
        assert options["--main_process_port"] == "20000"
        read = yaml.safe_load((tmp_path / f"log.{rank}.yaml").read_text())
        bundle = render_bundle(plan, resolved_yaml=RESOLVED)
        assert read == yaml.safe_load(bundle.files["accelerate.yaml"])


def test_what_to_do_before_typing_is_a_comment(tmp_path: Path) -> None:
    plan = plan_for(tmp_path, pass_env=("HF_TOKEN",))
    lines = list(by_hand(plan, render_bundle(plan, resolved_yaml=RESOLVED)))
    assert "# On each host, set HF_TOKEN first, e.g. in ~/.bashrc." in lines
    assert "# On GPUs without bf16, write --mixed_precision fp16." in lines
    assert f"# Each host needs the project in {plan.workdir!r}. Nothing is copied." in lines
    assert len([line for line in lines if line.startswith("ssh ")]) == 2
