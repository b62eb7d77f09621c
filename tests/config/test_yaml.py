"""What stands in a file is what arrives in the spec, and what is written is read back."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config import environments
from clusterrun.config.choices import MixedPrecision, Strategy
from clusterrun.config.document import ConfigFile, parse_document
from clusterrun.config.environments import Tool, read_step
from clusterrun.config.fields import Kind
from clusterrun.config.files import FoundFiles
from clusterrun.config.load import Given, resolve
from clusterrun.config.secrets import is_secret
from clusterrun.config.settings import Anchor, Resolved, yaml_text
from clusterrun.config.spec import FIELDS, JobSpec
from clusterrun.errors import ConfigError
from tests.config.conftest import Workplace

Load = Callable[[str], Resolved]
HERE = Path("/work dir")


def test_a_scalar_is_not_what_yaml_guesses(loaded: Load) -> None:
    for text, name, value in (
        *((f"launch: {{mixed_precision: {no}}}", "mixed_precision", "no") for no in ("no", "'No'")),
        ("slurm: {time: 1:30:00}", "time_minutes", 90),
        ("slurm: {time: '1-12:00:00'}", "time_minutes", 2160),
        *((f"slurm: {{comment: {x}}}", "comment", x) for x in ("012", "1e3", "on", "2026-01-01")),
        *((f"args: [{x}]", "args", (x,)) for x in ("012", "0x1F", "1_000")),
        *((f"slurm: {{exclusive: {yes}}}", "exclusive", True) for yes in ("yes", "on", "True", 1)),
    ):
        assert getattr(loaded(text).spec, name) == value
    for nothing in ("", "# x\n", "---\n", "\ufeff# bom\n", "slurm: ~", "slurm: {partition: }"):
        assert loaded(f"{nothing}\nprofiles:\n").spec == JobSpec()


def test_a_file_with_a_byte_order_mark_and_windows_lines(loaded: Load) -> None:
    resolved = loaded("\ufeffname: x\r\nslurm:\r\n  nodes: 2\r\n")
    assert (resolved.spec.name, resolved.spec.nodes) == ("x", 2)
    assert str(resolved.origins["slurm.nodes"]) == "./clusterrun.yaml:3"


def test_anchors_and_merges_share_profiles(loaded: Load) -> None:
    resolved = loaded(
        "profile: b\n"
        "profiles:\n"
        "  a: &a\n"
        "    slurm: &slurm {partition: gpu, time: 60}\n"
        "  b:\n"
        "    <<: *a\n"
        "    slurm: &more\n"
        "      <<: *slurm\n"
        "      time: 90\n"
        "  c: {slurm: *more}\n"
    )
    assert (resolved.spec.partition, resolved.spec.time_minutes) == ("gpu", 90)
    assert str(resolved.origins["slurm.time"]) == "./clusterrun.yaml:9 (profile b)"


def test_a_merge_of_merges_has_each_key_once(loaded: Load) -> None:
    merges = [
        f"p{n}: &p{n} {{<<: [{', '.join([f'*p{n - 1}'] * 9)}], env: {{A: b}}}}"
        for n in range(1, 10)
    ]
    text = ", ".join(["p0: &p0 {slurm: {nodes: 2}}", *merges])
    assert loaded(f"profile: p9\nprofiles: {{{text}}}").spec.nodes == 2


@pytest.mark.parametrize("text", ["a: &a {<<: *a}", "profiles: &p {x: *p}", "args: &a [*a]"])
def test_a_file_that_holds_itself_ends(loaded: Load, text: str) -> None:
    with pytest.raises(Exception, match=r"unknown key|single value"):
        loaded(text)


def test_a_line_is_the_line_of_the_key_and_the_column_that_of_the_value(loaded: Load) -> None:
    origin = loaded("# one\nlaunch:\n  setup:\n  - module load a\n").origins["launch.setup"]
    assert (origin.text, origin.where) == ("./clusterrun.yaml:3", "clusterrun.yaml:4:3")


def test_resolved_yaml_shows_values_with_their_origins(workplace: Workplace) -> None:
    workplace.write_project(
        "script: train.py\nargs: [--steps, '5']\nprofile: a100\n"
        "profiles:\n  a100:\n    slurm: {partition: gpu}\n    env: {B: 'x y'}\n"
    )
    text = workplace.load({"time_minutes": Given(value="90", flag="-t")}).to_yaml()
    lines = text.splitlines()
    assert lines[:2] == [
        f"# The configuration, with origins. Relative paths are relative to {workplace.project}",
        "# profile a100",
    ]
    for line in (
        "{script: train.py,  # ./clusterrun.yaml:1",
        '  args: ["--steps", "5"],  # ./clusterrun.yaml:2',
        '  env: {B: "x y"},  # ./clusterrun.yaml:7 (profile a100)',
        '  time: "01:30:00",  # command line (-t)',
        "  partition: gpu,  # ./clusterrun.yaml:6 (profile a100)",
    ):
        assert line in lines, text
    assert re.search(r"launch: {.* strategy: ddp,.*,  # built-in\n", text)
    assert text == workplace.load({"time_minutes": Given(value="90", flag="-t")}).to_yaml()


def load_text(text: str) -> JobSpec:
    file = ConfigFile(shown="clusterrun.yaml", text=text, anchor=Anchor(), strict=True)
    return resolve(FoundFiles(files=(file,), project_dir=HERE), {}, environ={}, cwd=HERE).spec


def resolve_flags(flags: dict[str, Any]) -> Resolved:
    return resolve(FoundFiles(files=(), project_dir=HERE), flags, environ={}, cwd=HERE)


words = st.text(st.characters(exclude_categories=["Cc"]), min_size=1)
any_text = st.text(st.characters(exclude_characters="\x00", exclude_categories=[]))
# Not any text is one of theirs.
CHECKED = ("clusters", "mem", "mem_per_gpu", "mem_per_cpu", "name", "port_range", "stage_dir")
TEXT_FIELDS = [
    field.name
    for field in FIELDS
    if field.kind in (Kind.TEXT, Kind.PATH) and field.name not in ("module", *CHECKED)
]


@given(st.dictionaries(st.sampled_from(TEXT_FIELDS), words))
def test_any_text_in_a_text_field_is_read_back_from_resolved_yaml(texts: dict[str, str]) -> None:
    resolved = resolve_flags(texts)
    assert {name: getattr(resolved.spec, name) for name in texts} == texts
    assert load_text(resolved.to_yaml()) == resolved.spec


@given(st.lists(any_text), st.dictionaries(st.from_regex(r"\A[A-Z_]{1,9}\Z"), any_text))
def test_any_argument_and_variable_is_read_back_from_resolved_yaml(
    args: list[str], env: dict[str, str]
) -> None:
    safe = {n: t for n, t in env.items() if not is_secret(n, t)}
    resolved = resolve_flags({"args": tuple(args), "setup": tuple(args), "env": safe})
    assert resolved.spec.args == tuple(args)
    assert load_text(resolved.to_yaml()) == resolved.spec


@given(any_text)
def test_every_yaml_reader_takes_a_written_text_for_that_text(text: str) -> None:
    assert yaml.safe_load(yaml_text(text)) == text
    assert "\n" not in yaml_text(text)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "nodes": st.integers(1, 65_533),
            "time_minutes": st.integers(1, 10**6),
            "timeout_s": st.integers(1, 10**6),
            "exclusive": st.booleans(),
            "requeue": st.booleans(),
            "strategy": st.sampled_from(Strategy),
            "mixed_precision": st.sampled_from(MixedPrecision),
        },
    )
)
def test_every_kind_of_value_is_read_back_from_resolved_yaml(values: dict[str, Any]) -> None:
    assert load_text(resolve_flags(values).to_yaml()) == JobSpec(**values)


@given(st.text() | st.text("{}[]:,&*!|>'\"%@`-# \n\tab<?~0"))
def test_any_text_as_a_file_is_settings_or_mistakes_with_a_place(text: str) -> None:
    document = parse_document(ConfigFile(shown="f", text=text, anchor=Anchor(), strict=True))
    assert all(error.where and error.where.startswith("f:") for error in document.errors)


# Environments by name in `setup`


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("{modules: [cuda/12.4, nccl], venv: /my venv}",
         ("modules: cuda/12.4 nccl", "venv: /my venv")),
        ("[{modules: cuda/12.4}, {conda: /envs/llm}, 'export X=1']",
         ("modules: cuda/12.4", "conda: /envs/llm", "export X=1")),
        ("[conda: llm]", ("conda: llm",)),
        ("{uv: /src/llm}", ("uv: /src/llm",)),
    ],
)  # fmt: skip
def test_a_mapping_names_environments_in_its_order(
    workplace: Workplace, written: str, lines: tuple[str, ...]
) -> None:
    workplace.write_project(f"launch: {{setup: {written}}}")
    resolved = workplace.load()
    assert resolved.spec.setup == lines
    assert workplace.load(overrides=[f"launch.setup={written}"]).spec.setup == lines
    workplace.write_project(resolved.to_yaml())
    assert workplace.load().spec.setup == lines


def test_a_directory_counts_from_its_file_and_a_name_does_not(workplace: Workplace) -> None:
    workplace.write_project(
        "launch: {setup: [{venv: env}, {uv: ~/llm}, {conda: llm}, {conda: ./c}]}"
    )
    below = workplace.project / "below"
    below.mkdir()
    assert workplace.load(cwd=below).spec.setup == (
        f"venv: {workplace.project}/env",
        f"uv: {workplace.root}/home/llm",
        "conda: llm",
        f"conda: {workplace.project}/c",
    )


@pytest.mark.parametrize(
    ("launch", "hint"),
    [
        *(
            (f"setup: [{written}]", "write conda: NAME, venv: DIR")
            for written in ("{nix: a}", "{conda: [a, b]}", "{conda: -n}", "{modules: []}")
        ),
        ('setup: [{venv: "a\\nb"}]', "write conda: NAME, venv: DIR"),
        ("setup: llm", "write setup: [first, second], or an environment as setup: {conda: NAME}"),
        ("conda: llm", "write it under 'launch:' as setup: {conda: ...}"),
    ],
)
def test_what_names_no_environment_is_refused_at_its_line(
    workplace: Workplace, launch: str, hint: str
) -> None:
    workplace.write_project(f"launch:\n  {launch}")
    with pytest.raises(ConfigError) as caught:
        workplace.load()
    assert str(caught.value.where).startswith("clusterrun.yaml:2:")
    assert caught.value.hints[0].startswith(hint)


def test_bash_stays_bash() -> None:
    for line in ("conda activate llm", "module load cuda", "source venv/bin/activate", "venv=1"):
        assert read_step(line).tool is None
    assert read_step("conda:llm").tool is Tool.CONDA
    assert doctest.testmod(environments).failed == 0
