"""The bundle: its files, what the batch script carries, and what no script may hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clusterrun.config.choices import Strategy
from clusterrun.config.load import adopt_spec
from clusterrun.config.spec import JobSpec
from clusterrun.errors import ConfigError
from clusterrun.launch.accelerate_argv import shown_command
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.rendering.bundle import render_bundle, sh_word
from tests.launch.samples import on_slurm, slurm_facts
from tests.rendering.golden_cases import RESOLVED, bundle_of
from tests.rendering.sbatch_reader import directives_of, read_by_sbatch, sbatch
from tests.rendering.strategies import LINE, TEXT


def rendered(plan: Plan, *template_dirs: Path) -> dict[str, str]:
    return dict(render_bundle(plan, resolved_yaml=RESOLVED, template_dirs=template_dirs).files)


def test_the_files_of_a_run() -> None:
    assert list(rendered(on_slurm())) == [
        *("job.sbatch", "env.sh", "node.sh", "accelerate.yaml", "plan.json", "resolved.yaml")
    ]
    assert "ds_config.json" in bundle_of("own_json_on_cpus").files


def test_no_script_prints_the_environment_or_guesses_an_address() -> None:
    never = (
        r"set -\w*x|\bprintenv\b|^\s*env\b|declare -x|localhost|127\.0|hostname -|MASTER_ADDR="
        r"|29500"
    )
    for case in ("everything_said", "two_nodes_of_gpus"):
        for name, text in bundle_of(case).files.items():
            assert not re.search(never, text, re.M), name
    assert not re.search(r"PORT=|RDZV_ID=", "".join(bundle_of("two_nodes_of_gpus").files.values()))
    script = bundle_of("two_nodes_of_gpus").script
    assert not re.search(r"machine_rank=|\$\{?SLURM_(NODEID|PROCID)", script)


def test_a_here_document_ends_where_it_should() -> None:
    hostile = "x: |\n  a\nEND_OF_FILE\nEND_OF_FILE_\ntouch canary\n"
    script = render_bundle(on_slurm(), resolved_yaml=hostile).script
    assert f"<<'END_OF_FILE__' || return\n{hostile}END_OF_FILE__\n" in script


def test_a_person_can_read_a_script_of_two_nodes() -> None:
    header = {"partition": "gpu", "account": "nlp", "time_minutes": 60, "cpus_per_gpu": 8}
    options: list[dict[str, Any]] = [
        {"strategy": Strategy.ZERO2_OFFLOAD, "env": {"A": "b"}},
        {"srun_args": ("--container-image=nvcr.io/a:b", "--container-mounts=/data")},
        {"setup": ("conda: llm",)},
        {"setup": ("source env/bin/activate",)},
    ]
    for asked in options:
        spec = JobSpec(script="train.py", nodes=2, gpus_per_node=4, **{**header, **asked})
        job = adopt_spec(spec, cwd=Path("/w"))
        plan = make_plan(job.spec, slurm_facts())
        script = render_bundle(plan, resolved_yaml=job.to_yaml()).script
        assert script.count("\n") <= 150
        srun, launch = (" ".join(map(sh_word, x)) for x in (plan.srun_args, shown_command(plan, 0)))
        assert f"\nclusterrun_srun=(srun {srun})\n" in script
        assert f"\n# {launch}\n" in script
        places = ("# accelerate launch", "env.sh <<", '{"acc')
        assert sorted(places, key=script.index) == list(places)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        name: LINE.filter(lambda text: text != "")
        for name in ("name", "partition", "account", "comment", "constraint", "mail_user")
    },
)


@settings(max_examples=60, deadline=None)
@given(asked=OPTIONS, env=TEXT, arg=TEXT)
def test_any_text_in_an_option_is_one_directive(asked: dict[str, str], env: str, arg: str) -> None:
    name = asked.get("name", "x")
    assume("/" not in name and name not in (".", "..") and len(name.encode()) <= 200)
    plan = on_slurm(**asked, env={"A": env}, args=(arg,))
    assert directives_of(rendered(plan)["job.sbatch"]) == [
        f"--{line.name}" if line.value is None else f"--{line.name}={line.value}"
        for line in plan.directives
    ]


@pytest.mark.skipif(sbatch() is None, reason="no sbatch is installed here")
def test_what_a_script_carries_adds_no_option_to_the_sbatch_installed(tmp_path: Path) -> None:
    pbs = "#PBS -N evil\n#BSUB -J evil\n#SBATCH --job-name=evil\n"
    facts = slurm_facts(accelerate_config_text=f"{pbs}distributed_type: MULTI_GPU\n")
    plan = on_slurm(
        facts,
        gpus_per_node=2,
        name="run #1 of 100%",
        comment="back\\slash 'and' \"quotes\"",
        accelerate_config="mine.yaml",
        env={"A": f"\n{pbs}", "B": "dos\r\nline"},
        setup=(f"true\n{pbs}",),
        sbatch_args=("--licenses=a b",),
    )
    script = render_bundle(plan, resolved_yaml=pbs).script
    found = read_by_sbatch(script, tmp_path)
    assert found == directives_of(script)
    assert "evil" not in "".join(found)


@settings(max_examples=60, deadline=None)
@given(name=TEXT, value=TEXT, setup=TEXT, arg=TEXT, workdir=TEXT)
def test_a_script_has_no_carriage_return_which_sbatch_refuses(
    name: str, value: str, setup: str, arg: str, workdir: str
) -> None:
    facts = slurm_facts(workdir=f"/w{workdir}", runs_dir=f"/r{workdir}")
    plan = on_slurm(facts, env={"A": value}, setup=(setup,), args=(arg, name))
    for text in rendered(plan).values():
        assert "\r" not in text
        text.encode()  # no lone surrogate: any file system and any pipe takes it


def test_a_site_overrides_a_template_by_name(tmp_path: Path) -> None:
    (tmp_path / "node.sh.j2").write_text("exec {{ plan.python | sh }} # ours\n")
    (tmp_path / "ddp.yaml.j2").write_text(
        '{% extends "_base.yaml.j2" %}{% block strategy %}debug: true\n{% endblock %}'
    )
    files = rendered(on_slurm(nodes=2), tmp_path)
    assert files["node.sh"] == "exec /usr/bin/python3 # ours\n"
    assert files["accelerate.yaml"].endswith(
        'num_processes: 2\nmixed_precision: "no"\ndebug: true\n'
    )
    assert "# ours" in files["job.sbatch"]


BROKEN = {
    "cd {{ plan.workdir }}": "passed through none of the filters",
    "cd {{ 'x' ~ (plan.workdir | sh) }}": "passed through none of the filters",
    "{{ plan.workdirr | sh }}": "has no attribute 'workdirr'",
    "{{ nothing }}": "'nothing' is undefined",
    "{{ plan.env | sh }}": "neither text nor a number",
    "{% if %}": "Expected an expression",
    "{{ plan.workdir | quote }}": "No filter named 'quote'",
    "{{ cycler.__init__.__globals__.os.name | sh }}": "is unsafe",
    "{{ plan.env.__class__.__base__.__subclasses__() | sh }}": "is unsafe",
    "{{ plan.accelerate.update(strategy='none') | sh }}": "is unsafe",
    '{% include "missing.j2" %}': "'missing.j2' not found",
}


def test_a_template_that_quotes_nothing_or_is_broken_is_refused(tmp_path: Path) -> None:
    for number, (template, cause) in enumerate(BROKEN.items()):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "node.sh.j2").write_text(template)
        with pytest.raises(ConfigError, match=r"template node\.sh\.j2") as refused:
            rendered(on_slurm(), place)
        assert cause in (refused.value.cause or "")
