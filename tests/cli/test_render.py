"""What `render` prints and writes; none of it needs Slurm."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat

import pytest

from tests.cli.conftest import CommandLine
from tests.readme import blocks
from tests.test_docs import pages_with

SLURM = ("--cluster", "slurm", "-N2", "--gpus-per-node", "4")
FILES = ["accelerate.yaml", "env.sh", "job.sbatch", "node.sh", "plan.json", "resolved.yaml"]


def test_stdout_holds_the_script_alone_or_in_json_all_files_and_nothing_is_written(
    here: CommandLine,
) -> None:
    plain = here("render", *SLURM, "train.py")
    assert plain.out.startswith("#!/bin/bash\n")
    assert "#SBATCH --job-name=train\n" in plain.out
    assert "#SBATCH --gpus-per-node=4\n" in plain.out
    assert here("render", "--color", "always", *SLURM, "train.py").out == plain.out
    answer = json.loads(here("render", "--json", *SLURM, "train.py").out)
    assert answer["schema"] == "clusterrun.render/1"
    assert answer["name"] == "train"
    assert sorted(answer["files"]) == FILES
    assert answer["files"]["job.sbatch"] == plain.out
    assert here("render", *SLURM, "train.py") == plain
    assert here.files() == ["train.py"]


def test_a_new_or_empty_directory_gets_every_file(here: CommandLine) -> None:
    (here.path / "empty").mkdir()
    for directory in (here.path / "empty", here.path / "a b" / "out"):
        said = here("render", *SLURM, "-O", str(directory), "train.py")
        assert (said.code, said.out) == (0, "")
        assert sorted(path.name for path in directory.iterdir()) == FILES
        assert (directory / "job.sbatch").read_text() == here("render", *SLURM, "train.py").out
        assert (directory / "job.sbatch").stat().st_mode & stat.S_IXUSR
    assert said.err.endswith(
        f"  wrote      6 files to {directory}\n  submit     sbatch '{directory}/job.sbatch'\n"
    )


def test_an_accelerate_yaml_gives_the_numbers_that_nobody_else_gives(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 8\n"
    (here.path / "acc.yaml").write_text(text)
    argv = ("render", "--cluster", "slurm", "--accelerate-config", "acc.yaml", "train.py")

    def asked() -> tuple[str, str, bool]:
        said = here(*argv)
        assert said.code == 0, said.err
        found = re.search(r"--nodes=(\d)\n(?:.*\n)*?#SBATCH --gpus-per-node=(\d)\n", said.out)
        assert found is not None
        return found[1], found[2], "acc.yaml has num_processes 8 on 2 machines\n" in said.err

    assert asked() == ("2", "4", False)
    monkeypatch.setenv("CLUSTERRUN_SLURM_NODES", "1")  # which is the default, too
    assert asked() == ("1", "4", True)
    monkeypatch.delenv("CLUSTERRUN_SLURM_NODES")
    (here.path / "clusterrun.yaml").write_text("slurm: {gpus_per_node: 1}\n")
    assert asked() == ("2", "1", True)


def test_check_of_a_script_for_slurm_needs_sbatch_and_gives_3_where_that_says_no(
    here: CommandLine,
) -> None:
    said = here("render", *SLURM, "--check", "train.py")
    assert (said.code, said.out) == (2, "")
    assert "error: sbatch was not found on this machine\n" in said.err
    here.slurm(
        "echo 'allocation failure: Requested node configuration is not available' >&2; exit 1"
    )
    said = here("render", *SLURM, "--check", "train.py")
    assert (said.code, said.out) == (3, "")
    assert "error: sbatch refused the job: " in said.err


def test_check_on_this_machine_asks_bash(here: CommandLine) -> None:
    said = here("render", "--check", "--cluster", "local", "train.py", "a'b", "$(touch x)")
    assert said.code == 0
    assert said.err.endswith("bash finds no errors\n")
    assert here.files() == ["train.py"]
    (here.path / "clusterrun.yaml").write_text("script: train.py\n")
    (here.path / "templates").mkdir()
    (here.path / "templates" / "job.sbatch.j2").write_text("#!/bin/bash\nif true; then\n")
    said = here("render", "--cluster", "local", "--check")
    assert (said.code, said.out) == (1, "")
    assert "error: bash finds an error in the batch script" in said.err


def test_templates_of_project_user_and_site_win_in_this_order(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = here.path.parent / "site"
    user = here.path.parent / "config" / "clusterrun"
    (here.path / "clusterrun.yaml").write_text("script: train.py\n")
    site.mkdir()
    (site / "config.yaml").write_text("{}\n")
    monkeypatch.setenv("CLUSTERRUN_SITE_CONFIG", str(site / "config.yaml"))
    places = [site, user, here.path]
    for place in places:
        templates = place / "templates"
        templates.mkdir(parents=True)
        (templates / "job.sbatch.j2").write_text(f"#!/bin/bash\n# of {place.name}\n")
        assert here("render", "--cluster", "local").out == f"#!/bin/bash\n# of {place.name}\n"


def test_bf16_on_a_gpu_without_it_is_told(here: CommandLine) -> None:
    for gpu, is_told in {"v100": True, "a100": False, "unknown": False}.items():
        cluster = ("--cluster", "slurm", "--gpus-per-node", "1", "--set", f"slurm.gpu_type={gpu}")
        said = here("render", *cluster, "--mixed-precision", "bf16", "train.py").err
        assert ("emulates bf16, slowly" in said) is is_told
        assert "no bf16" not in here("render", *cluster, "train.py").err
    asked = ("plan", "--params", "1B", "--gpu", "v100-32g", "--mixed-precision", "bf16")
    assert "the V100-32G emulates bf16, slowly" in here(*asked).err


def test_quiet_prints_no_notes_and_q_stays_the_quality_of_service(here: CommandLine) -> None:
    argv = ("render", "--cluster", "slurm", "-q", "high", "train.py", "--device", "x")
    loud = here(*argv)
    assert "note: " in loud.err
    assert "#SBATCH --qos=high\n" in loud.out
    for quiet in (("-q", *argv), ("render", "-Q", *argv[1:]), ("render", "--quiet", *argv[1:])):
        said = here(*quiet)
        assert (said.err, said.out) == ("", loud.out)


def test_verbose_names_the_files_and_settings_in_use(here: CommandLine) -> None:
    (here.path / "clusterrun.yaml").write_text(
        "script: train.py\nprofiles: {a: {slurm: {time: 1h}}}\n"
    )
    for argv in (("-v", "render", "--profile", "a"), ("render", "--profile", "a", "--verbose")):
        said = here(*argv, "--cluster", "local")
        assert "  files      clusterrun.yaml, /dev/null\n  profile    a\n" in said.err
        assert "script: train.py  (./clusterrun.yaml:1)\n" in said.err
        assert "slurm.time: 01:00:00  (./clusterrun.yaml:2 (profile a))\n" in said.err
    assert "files" not in here("render", "--cluster", "local").err


@pytest.mark.parametrize("page", pages_with("render"))
def test_commands_for_a_cluster_render(page: str, here: CommandLine) -> None:
    here.slurm()
    for text in blocks("render", page):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(os.path.expandvars(re.sub(r"\s#\s.*", "", line)))
            assert words[0] == "clusterrun"
            assert words[1] in ("submit", "scaling")
            said = here("render", *(re.sub(r"^[\d,]+,", "", word) for word in words[2:]))
            assert said.code == 0, said.err
