"""The guide for two machines: its commands by hand, and clusterrun's, train the same."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterrun.config.load import load_spec
from tests.examples.guides import commands
from tests.hosts import Hosts
from tests.patience import patience, wait_for
from tests.readme import ROOT, run

HERE = ROOT / "examples" / "several_machines"
ON_CPUS = "--nproc-per-node 2 --device cpu"
# The hosts of the tests have other names and no GPUs.
THERE = {
    "192.168.1.1": "h1",
    "192.168.1.2": "h2",
    "--nproc_per_node=4": "--nproc_per_node=2",
    "--gpus-per-node 4": ON_CPUS,
}
LOSSES = {  # of each epoch, with four ranks
    "train.py": ["0.789568", "0.358746"],
    "train_accelerate.py": ["0.789028", "0.359317"],
}
RANK = re.compile(r"rank (\d)/4 on (h\d), cpu")


def on_the_bench(text: str) -> str:
    """Return a command of the guide as the hosts of the tests can run it."""
    for name, other in THERE.items():
        text = text.replace(name, other)
    return text


def by_hand() -> list[str]:
    """Return the guide's commands for torchrun, by machine."""
    (block,) = commands(HERE, "torchrun")
    return [line for line in block.splitlines() if line.startswith("torchrun ")]


def check(out: str, script: str) -> None:
    """Check the lines of a training's ranks."""
    losses = re.findall(r"epoch (\d)/2 loss (\d\.\d{6})", out)
    assert losses == list(zip("12", LOSSES[script], strict=True)), out
    assert sorted(set(RANK.findall(out))) == [("0", "h1"), ("1", "h1"), ("2", "h2"), ("3", "h2")]


def test_the_commands_by_hand_and_the_configuration_start_the_same() -> None:
    resolved = load_spec({}, environ={}, cwd=HERE)
    assert resolved.notes == ()
    spec = resolved.spec
    for rank, line in enumerate(by_hand()):
        first, *_ = spec.hosts
        assert f"--nproc_per_node={spec.gpus_per_node} --nnodes={len(spec.hosts)} " in line
        assert f"--node_rank={rank} --master_addr={first} " in line
        assert line.endswith(" ".join(("", spec.script, *spec.args)))
    submit = commands(HERE, "ssh")[0].splitlines()[0]
    assert f"--hosts {','.join(spec.hosts)} --gpus-per-node {spec.gpus_per_node} " in submit
    assert submit.endswith(" ".join(("", spec.script, *spec.args)))
    assert "0.789568\nepoch 2/2 loss 0.358746" in (HERE / "README.md").read_text()
    assert LOSSES["train.py"] == ["0.789568", "0.358746"]


def test_render_prints_a_command_for_each_host(tmp_path: Path) -> None:
    (render,) = (block for block in commands(HERE, "ssh") if "render" in block)
    out = run(f"cd examples/several_machines\n{render}", tmp_path)
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    assert [line.split()[:2] for line in lines] == [["ssh", host] for host in THERE][:2]
    for rank, line in enumerate(lines):
        assert f" --num_machines 2 --num_processes 8 --machine_rank {rank} " in line
        assert line.endswith(" train.py --config paper_r64'")


@pytest.mark.torch
@pytest.mark.long
def test_the_commands_for_one_machine_run(tmp_path: Path) -> None:
    out = run("\n".join(commands(HERE, "local")), tmp_path)
    assert re.findall(r"epoch (\d)/2 loss (\d\.\d{6})", out) == list(
        zip("12", LOSSES["train.py"], strict=True)
    )


def project(hosts: Hosts, place: str, *machines: str) -> None:
    """Write the guide's files to machines."""
    for path in HERE.glob("*.*"):
        for machine in machines:
            hosts[machine].write(f"{place}/{path.name}", on_the_bench(path.read_text()))


def at_once(hosts: Hosts, lines: Sequence[str]) -> str:
    """Run commands on the laptop, each in a terminal of its own; return what all print."""
    started = [hosts.laptop.start(["bash", "-c", line]) for line in lines]
    outs = [process.communicate(timeout=120 * patience()) for process in started]
    assert [process.returncode for process in started] == [0] * len(lines), outs
    return "".join(out for out, _ in outs)


def ok(hosts: Hosts, command: str, cwd: str) -> str:
    done = hosts.laptop.run(["bash", "-c", command], cwd=cwd, timeout_s=200)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.ssh
@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("script", LOSSES)
def test_a_script_for_torchrun_trains_the_same_by_hand_and_by_clusterrun(
    hosts: Hosts, script: str
) -> None:
    project(hosts, "/shared/guide", "laptop")
    activated = f"cd /shared/guide; PATH={Path(sys.executable).parent}:$PATH"
    lines = [on_the_bench(line).replace("train.py", script) for line in by_hand()]
    typed = [f"ssh h{n} '{activated} {line}'" for n, line in enumerate(lines, 1)]
    check(at_once(hosts, typed), script)
    line, *_ = on_the_bench(commands(HERE, "ssh")[0]).splitlines()
    ok(hosts, line.replace("train.py", script), "/shared/guide")
    check(ok(hosts, "clusterrun logs --all-ranks --no-dedup", "/shared/guide"), script)
    wait_for(lambda: not hosts.processes(), "all processes to end")


@pytest.mark.ssh
def test_a_path_that_is_not_copied_is_refused_and_nothing_is_left(hosts: Hosts) -> None:
    project(hosts, "guide", "laptop")
    hosts.laptop.write("big.parquet", "")
    argv = f"clusterrun submit {ON_CPUS} train.py --config paper_r64 --data-file".split()
    for path, cause in (("../big.parquet", "is not copied"), ("/home/ann/guide/", "only")):
        done = hosts.laptop.run([*argv, path], cwd="/home/ann/guide")
        assert done.returncode == 2
        assert f"error: --data-file: {path}" in done.stderr
        assert cause in done.stderr
    assert [line for line in hosts.leftovers() if not line.startswith("laptop: file")] == []


@pytest.mark.ssh
@pytest.mark.torch
@pytest.mark.long
def test_a_host_that_shares_nothing_has_the_output_in_its_copy_of_the_project(hosts: Hosts) -> None:
    project(hosts, "guide", "laptop")
    hosts.laptop.write("guide/.env", "TOKEN=1")
    (block,) = (block for block in commands(HERE, "ssh") if "--device cpu" in block)
    out = ok(hosts, f"exec 2>&1; {block}", "/home/ann/guide")
    assert "note: .env is not copied: it may hold a secret" in out
    shown = (HERE / "README.md").read_text().split("```\nrank 0/4 ")[1].split("```")[0]
    for text in shown.replace("gpu1", "h1").splitlines():
        assert text in out
    (saved,) = hosts["h1"].home().glob("clusterrun/runs/train/*/project/output/paper_r64.pt")
    assert saved.stat().st_size > 0
    assert not (saved.parents[1] / ".env").exists()
    wait_for(lambda: not hosts.processes(), "all processes to end")


@pytest.mark.ssh
@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_printed_commands_form_one_world_when_typed_by_hand(
    hosts: Hosts, *, is_shared: bool
) -> None:
    """Without a shared directory, the user copies the project to the same place."""
    place = "/shared/guide" if is_shared else "/tmp/guide"
    project(hosts, place, *(["laptop"] if is_shared else ["laptop", "h1", "h2"]))
    out = ok(hosts, f"clusterrun render {ON_CPUS}", place)
    assert f"# Each host needs the project in '{place}'. Nothing is copied." in out
    lines = [line for line in out.splitlines() if line.startswith("ssh ")]
    check(at_once(hosts, lines), "train.py")
    wait_for(lambda: not hosts.processes(), "all processes to end")
