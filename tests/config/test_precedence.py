from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from clusterrun.config.choices import Strategy
from clusterrun.config.load import Given, adopt_spec, load_run_dir
from clusterrun.config.spec import FIELDS, JobSpec
from clusterrun.errors import ConfigError, UsageError
from tests.config.conftest import Workplace

# The order of the places, the highest first; each says slurm.partition in its own words.
PLACES = ("flag", "set", "env", "job", "project", "user", "site")
ORIGINS = {
    "flag": "command line (-p)",
    "set": "command line (--set)",
    "env": "env CLUSTERRUN_SLURM_PARTITION",
    "job": "./job.yaml:1",
    "project": "./clusterrun.yaml:1",
    "user": "~/.config/clusterrun/config.yaml:1",
    "site": "{root}/site.yaml:1",
}


@pytest.mark.parametrize("lowest", range(len(PLACES)))
def test_each_place_wins_over_those_below_it(workplace: Workplace, lowest: int) -> None:
    said = PLACES[lowest:]
    line = "slurm: {{partition: {}}}\n".format
    workplace.write("home/project/job.yaml", line("job") if "job" in said else "")
    workplace.write_project(line("project") if "project" in said else "")
    workplace.write_user(line("user") if "user" in said else "")
    workplace.write_site(line("site"))
    if "env" in said:
        workplace.environ["CLUSTERRUN_SLURM_PARTITION"] = "env"
    resolved = workplace.load(
        {"partition": Given(value="flag", flag="-p")} if "flag" in said else {},
        config_file="job.yaml",
        overrides=["slurm.partition=set"] if "set" in said else [],
    )
    assert resolved.spec.partition == said[0]
    expected = ORIGINS[said[0]].format(root=workplace.root)
    assert str(resolved.origins["slurm.partition"]) == expected


def test_a_profile_beats_plain_values_of_every_file_and_loses_to_environment_and_flags(
    workplace: Workplace,
) -> None:
    workplace.write_site("profiles: {a100: {slurm: {partition: site-a100}}}")
    text = "slurm: {partition: plain}"
    workplace.write_project(text)
    workplace.write("home/project/job.yaml", text)
    where: dict[str, Any] = {"config_file": "job.yaml", "profile": "a100"}
    assert workplace.load(**where).spec.partition == "site-a100"
    assert workplace.load({"partition": "plain"}, **where).spec.partition == "plain"
    workplace.environ["CLUSTERRUN_SLURM_PARTITION"] = "plain"
    assert workplace.load(**where).spec.partition == "plain"


def test_a_profile_that_several_files_define_is_laid_together(workplace: Workplace) -> None:
    workplace.write_site("profiles: {a100: {slurm: {partition: gpu, constraint: a100}}}")
    workplace.write_project("profiles:\n  a100:\n    slurm:\n      partition: mine\n")
    resolved = workplace.load(profile="a100")
    assert (resolved.spec.partition, resolved.spec.constraint) == ("mine", "a100")
    assert str(resolved.origins["slurm.partition"]) == "./clusterrun.yaml:4 (profile a100)"


def test_the_profile_is_chosen_by_option_then_environment_then_file(workplace: Workplace) -> None:
    workplace.write_project("profile: a\nprofiles: {a: {}, b: {}, c: }\n")
    for option, variable, chosen in (
        *(("b", "c", "b"), (None, "c", "c"), (None, "", "a"), ("", "c", None)),
    ):
        workplace.environ["CLUSTERRUN_PROFILE"] = variable
        assert workplace.load(profile=option).profile == chosen


def test_an_unknown_profile_is_answered_with_the_names(workplace: Workplace) -> None:
    workplace.write_project("profiles: {a100: {}, cpu: {}}")
    with pytest.raises(UsageError, match="unknown profile 'a10'") as caught:
        workplace.load(profile="a10")
    assert caught.value.hint == "use one of: a100, cpu"
    workplace.write_project("name: x\nprofile: gone\n")
    with pytest.raises(ConfigError, match="unknown profile 'gone'") as caught:
        workplace.load()
    assert caught.value.where == "clusterrun.yaml:2:10"
    assert caught.value.hint.endswith("no file defines a profile")


def test_what_nobody_said_is_built_in(workplace: Workplace) -> None:
    workplace.environ["CLUSTERRUN_SLURM_ACCOUNT"] = ""
    del workplace.environ["HOME"]
    resolved = workplace.load()
    origins = {key: str(origin) for key, origin in resolved.origins.items()}
    assert origins == {field.key: "built-in" for field in FIELDS}
    assert resolved.project_dir == workplace.project
    assert (resolved.spec.account, resolved.spec.run_dir) == (None, "runs")


def test_the_project_file_is_found_from_a_directory_below(workplace: Workplace) -> None:
    workplace.write_project("script: train.py\nslurm: {nodes: 3}\n")
    below = workplace.project / "src" / "deep"
    below.mkdir(parents=True)
    resolved = workplace.load(cwd=below)
    assert resolved.project_dir == workplace.project
    assert str(resolved.origins["slurm.nodes"]) == "../../clusterrun.yaml:2"
    assert resolved.spec.script == str(workplace.project / "train.py")
    assert resolved.spec.run_dir == str(workplace.project / "runs")
    once = workplace.load(config_file="./clusterrun.yaml")  # the project's, too
    assert once.files == ("./clusterrun.yaml", f"{workplace.root}/site.yaml")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_above_that_another_user_owns_does_not_command_us(workplace: Workplace) -> None:
    planted = workplace.write("home/clusterrun.yaml", "launch: {setup: ['touch /tmp/x']}")
    os.chown(planted, 12345, 12345)
    resolved = workplace.load()
    assert resolved.spec.setup == ()
    assert str(planted) in resolved.notes[0]
    assert "--config" in resolved.notes[0]


def test_paths_in_files_count_from_the_file_and_others_stay_as_typed(workplace: Workplace) -> None:
    workplace.write_user("launch: {accelerate_config: acc.yaml, python: ~/venv/bin/python}")
    assert workplace.load({"python": "python3.12"}).spec.python == "python3.12"
    workplace.write_site("launch: {deepspeed_config: ~/ds.json}")
    workplace.write_project("script: ./train.py\n")
    workplace.environ["CLUSTERRUN_RUN_DIR"] = "out/runs"
    spec = workplace.load().spec
    home = workplace.root / "home"
    assert spec.accelerate_config == str(home / ".config/clusterrun/acc.yaml")
    assert spec.deepspeed_config == str(home / "ds.json")
    assert spec.python == "~/venv/bin/python"  # of the machine that runs it
    assert spec.script == "./train.py"
    assert spec.run_dir == "out/runs"


def test_a_variable_in_a_path_is_warned_of_since_it_is_not_expanded(workplace: Workplace) -> None:
    workplace.write_project("run_dir: /scratch/$USER/runs")
    resolved = workplace.load()
    assert resolved.spec.run_dir == "/scratch/$USER/runs"
    assert "'$USER', which is not expanded" in resolved.notes[0]
    assert "CLUSTERRUN_RUN_DIR" in resolved.notes[0]


def test_the_directory_of_runs_is_read_whatever_else_is_wrong(workplace: Workplace) -> None:
    workplace.write_project("x: 1\nrun_dir: a\nprofile: p\nprofiles: {p: {run_dir: b, slurm: 4}}")
    workplace.environ["CLUSTERRUN_SLURM_NODES"] = "none"
    assert load_run_dir(environ=workplace.environ, cwd=workplace.project) == "b"


def test_a_pipe_instead_of_the_projects_file_is_not_opened(workplace: Workplace) -> None:
    os.mkfifo(workplace.project / "clusterrun.yaml")
    assert "clusterrun.yaml is a pipe or a device, and is ignored" in workplace.load().notes[0]


def test_inside_a_job_the_runs_own_directory_is_not_taken_for_the_setting(
    workplace: Workplace,
) -> None:
    workplace.environ |= {"CLUSTERRUN_RUN_DIR": "/runs/x/1", "CLUSTERRUN_ATTEMPT": "1"}
    assert workplace.load().spec.run_dir == "runs"
    workplace.environ["CLUSTERRUN_SLURM_PARTITON"] = "gpu"
    assert workplace.load().notes == (
        "CLUSTERRUN_SLURM_PARTITON is set in your shell but is not a setting, so it is ignored; "
        "use CLUSTERRUN_SLURM_PARTITION",
    )


def test_lists_in_variables_are_yaml_flow_or_one_item(workplace: Workplace) -> None:
    workplace.environ |= {
        "CLUSTERRUN_PASS_ENV": "[HF_TOKEN, WANDB_API_KEY]",
        "CLUSTERRUN_LAUNCH_SETUP": "module load cuda, gcc",
        "CLUSTERRUN_ENV": "{A: 1, B: 'x, y'}",
        "CLUSTERRUN_NETWORK_ENV": "NCCL_DEBUG=INFO",
    }
    spec = workplace.load().spec
    assert spec.pass_env == ("HF_TOKEN", "WANDB_API_KEY")
    assert spec.setup == ("module load cuda, gcc",)
    assert spec.env == {"A": "1", "B": "x, y"}
    assert spec.network_env == {"NCCL_DEBUG": "INFO"}


def test_mappings_are_united_name_by_name_each_with_its_origin(workplace: Workplace) -> None:
    workplace.write_site("env: {A: site, B: site}")
    workplace.write_project("env:\n  B: project\n  C: project\n")
    resolved = workplace.load({"env": Given(value=("C=flag",), flag="--env")})
    assert resolved.spec.env == {"A": "site", "B": "project", "C": "flag"}
    assert str(resolved.origins["env.B"]) == "./clusterrun.yaml:2"
    assert str(resolved.origins["env.C"]) == "command line (--env)"


def test_a_list_replaces_the_lower_one_and_a_repeatable_option_adds(workplace: Workplace) -> None:
    workplace.write_site("launch: {setup: [module load site]}\npass_env: [A]")
    workplace.write_project("launch: {setup: [module load mine]}\npass_env: [B]")
    assert workplace.load().spec.setup == ("module load mine",)
    resolved = workplace.load(
        {
            "setup": Given(value=("source venv",), flag="--setup"),
            "pass_env": Given(value=("C", "A"), flag="--pass-env"),
        }
    )
    assert resolved.spec.setup == ("module load mine", "source venv")
    assert resolved.spec.pass_env == ("A", "B", "C")
    expected = "./clusterrun.yaml:1 + command line (--setup)"
    assert str(resolved.origins["launch.setup"]) == expected
    assert workplace.load(overrides=["launch.setup=[]"]).spec.setup == ()


def test_a_script_on_the_command_line_does_not_get_the_files_arguments(
    workplace: Workplace,
) -> None:
    workplace.write_project("script: a.py\nargs: [--steps, 5]\n")
    assert workplace.load().spec.args == ("--steps", "5")
    spec = workplace.load({"script": "b.py", "args": ()}).spec
    assert (spec.script, spec.args) == ("b.py", ())
    spec = workplace.load({"module": "pkg.train"}).spec
    assert (spec.script, spec.module, spec.args) == (None, "pkg.train", ())
    assert workplace.load({"args": ("--steps", "9")}).spec.script == "a.py"


def test_what_cannot_be_combined_is_refused_where_it_stands(workplace: Workplace) -> None:
    for text, message, place in (
        ("script: a.py\nmodule: pkg.train\n", "script and module cannot be combined", "2:9"),
        ("slurm: {clusters: 'a,b'}", "slurm.clusters must name one cluster, not 'a,b'", "1:19"),
        ("env:\n  NCCL_TIMEOUT: never\n", "'never' is not a time span", "2:3"),
    ):
        workplace.write_project(text)
        with pytest.raises(ConfigError) as caught:
            workplace.load()
        assert (caught.value.message, caught.value.where) == (message, f"clusterrun.yaml:{place}")


def test_slurms_typed_gpu_count_sets_the_type_too(workplace: Workplace) -> None:
    spec = workplace.load({"gpus_per_node": Given(value="a100:4", flag="--gpus-per-node")}).spec
    assert (spec.gpu_type, spec.gpus_per_node) == ("a100", 4)


@pytest.mark.parametrize(
    ("where", "name"),
    [("env", "NCCL_TIMEOUT"), ("env", "TORCH_NCCL_TIMEOUT"), ("network: {env", "NCCL_TIMEOUT")],
)
def test_p6b_a_timeout_that_nothing_reads_is_taken_as_the_option_that_was_meant(
    workplace: Workplace, where: str, name: str
) -> None:
    workplace.write_project(f"{where}: {{{name}: 1800, A: 1}}" + "}" * where.count("{"))
    resolved = workplace.load()
    assert resolved.spec.timeout_s == 1800
    assert name not in {**resolved.spec.env, **resolved.spec.network_env}
    assert str(resolved.origins["launch.timeout"]) == f"./clusterrun.yaml:1 ({name})"
    assert resolved.notes == (
        f"neither NCCL nor torch reads {name} (./clusterrun.yaml:1); "
        "it is used as launch.timeout: 30m",
    )


def test_p6b_a_timeout_of_our_own_wins_over_nccl_timeout(workplace: Workplace) -> None:
    workplace.write_project("launch: {timeout: 1h}\n")
    resolved = workplace.load({"env": ("NCCL_TIMEOUT=5",)})
    assert (resolved.spec.timeout_s, dict(resolved.spec.env)) == (3600, {})
    assert "launch.timeout is used" in resolved.notes[0]


def test_the_user_file_is_found_where_xdg_says(workplace: Workplace) -> None:
    workplace.write("xdg/clusterrun/config.yaml", "slurm: {account: nlp}")
    workplace.environ["XDG_CONFIG_HOME"] = str(workplace.root / "xdg")
    assert workplace.load().spec.account == "nlp"
    workplace.environ["XDG_CONFIG_HOME"] = "relative"
    assert workplace.load().spec.account is None


def test_variables_of_a_rank_are_no_settings_but_for_the_one_that_loading_knows() -> None:
    contract = (Path(__file__).resolve().parents[2] / "docs" / "contracts.md").read_text()
    rows = "".join(re.findall(r"^\| `CLUSTERRUN_.*$", contract, re.MULTILINE))
    names = set(re.findall(r"CLUSTERRUN_\w+", rows))
    assert "CLUSTERRUN_ATTEMPT" in names
    assert names & {field.env for field in FIELDS} == {"CLUSTERRUN_RUN_DIR"}


def test_a_spec_made_in_python_is_held_against_the_same_rules(tmp_path: Path) -> None:
    env = {"A": "1", "NCCL_TIMEOUT": "60"}
    spec = JobSpec(script="a.py", env=env, time_minutes=90, nodes=2, exclusive=True)
    resolved = adopt_spec(spec, cwd=tmp_path)
    expected = dataclasses.replace(spec, env={"A": "1"}, timeout_s=60)
    assert (resolved.spec, resolved.cwd) == (expected, tmp_path)
    assert str(resolved.origins["env.A"]) == "Python"
    assert str(resolved.origins["slurm.mem"]) == "built-in"
    assert adopt_spec(JobSpec(), cwd=tmp_path).spec == JobSpec()
    words = JobSpec(strategy="zero2")  # type: ignore[arg-type]  # a word stands for its member
    assert adopt_spec(words, cwd=tmp_path).spec.strategy is Strategy.ZERO2


HF = "hf_" + "a1B2" * 8


def test_an_argument_that_looks_like_a_secret_is_warned_of(workplace: Workplace) -> None:
    for word, named in (
        *(("--hf-token", "--hf-token"), ("--api_key=x", "--api_key")),
        *(("+logger.wandb.api_key=x", "+logger.wandb.api_key"), (f"hub={HF}", "hub")),
        *((HF, "hf_..."), ("https://me:pw@host/x", "htt...")),
    ):
        args = (word, "x", "--max-tokens", "5", "pad_token=0", "wandb.api_key=${oc.env:KEY}")
        (note,) = workplace.load({"script": "a.py", "args": args}).notes
        assert note.startswith(f"argument {named} looks like a secret")


def test_what_slurm_or_bash_would_show_to_others_holds_no_secret(workplace: Workplace) -> None:
    for name, value in (
        ("setup", (f"huggingface-cli login --token {HF}",)),
        ("setup", ("export HTTPS_PROXY=http://me:hunter2@proxy:3128",)),
        ("comment", HF),
        ("sbatch_args", (f"--comment={HF}",)),
    ):
        with pytest.raises(UsageError, match="contains what looks like a secret") as caught:
            workplace.load({"script": "a.py", name: value})
        told = repr((caught.value.message, caught.value.hints, caught.value.cause))
        assert HF not in told
        assert "hunter2" not in told


FACTS = "training:\n  params: 478_720\n  hidden: 128\n  layers: 2\n  max_steps: 200\n"


def test_a_model_named_above_replaces_the_numbers_below_and_that_is_said(
    workplace: Workplace,
) -> None:
    workplace.write_project(FACTS)
    resolved = workplace.load({"model": Given(value="gpt2", flag="--model")})
    spec = resolved.spec
    assert (spec.model, spec.params, spec.hidden, spec.layers) == ("gpt2", None, None, None)
    assert spec.max_steps == 200
    assert str(resolved.origins["training.params"]) == "built-in"
    assert resolved.notes == tuple(
        f"training.model, command line (--model), replaces training.{name} (./clusterrun.yaml:{n})"
        for n, name in enumerate(("params", "hidden", "layers"), 2)
    )


def test_the_same_fact_in_other_words_is_replaced(workplace: Workplace) -> None:
    for section, file, name, value, gone in (
        ("training", "model: gpt2", "params", "7e9", "model"),
        ("training", "model: gpt2", "hidden", "64", "model"),
        ("training", "max_steps: 200", "epochs", "10", "max_steps"),
        ("training", "tokens: 1e9", "samples", "1000", "tokens"),
        ("training", "accumulation: 1", "effective_batch", "64", "accumulation"),
        ("training", "gpu_mem: 20GiB", "gpu", "h100", "gpu_mem_bytes"),
        ("slurm", "cpus_per_gpu: 8", "cpus_per_task", "4", "cpus_per_gpu"),
    ):
        workplace.write_project(f"{section}: {{{file}}}\n")
        resolved = workplace.load({name: value})
        assert getattr(resolved.spec, name) is not None
        assert getattr(resolved.spec, gone) is None
        (note,) = resolved.notes
        assert f"{section}.{file.partition(':')[0]} (./clusterrun.yaml:1)" in note


def test_a_profile_replaces_what_plain_values_say_in_other_words(workplace: Workplace) -> None:
    workplace.write_project(FACTS + "profiles: {big: {training: {model: gpt2, epochs: 3}}}\n")
    spec = workplace.load(profile="big").spec
    assert (spec.model, spec.params, spec.epochs, spec.max_steps) == ("gpt2", None, 3, None)
    # One layer may say a fact in both ways.
    workplace.write_project("training: {model: config.json, params: 7e9, gpu: h100}\n")
    resolved = workplace.load({"gpu_mem_bytes": "20GiB"})
    assert resolved.notes == ()
    assert (resolved.spec.model, resolved.spec.params) == ("config.json", 7e9)
    assert (resolved.spec.gpu, resolved.spec.gpu_mem_bytes) == ("h100", 20 << 30)
