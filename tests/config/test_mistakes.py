"""Every mistake in a file has one clear message with its file, line and column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clusterrun.config import Given, Resolved
from clusterrun.config.document import HINTS, parse_document
from clusterrun.config.settings import Anchor, ConfigFile
from clusterrun.errors import ConfigError, Exit, UsageError
from tests.config.conftest import Workplace

Load = Callable[[str], Resolved]

MISTAKES = [
    (
        "slurm:\n  gpus_per_nodes: 4\n",
        "unknown key 'gpus_per_nodes' in section [slurm]",
        "2:3",
        "use 'gpus_per_node'",
    ),
    ("nmae: x", "unknown key 'nmae'", "1:1", "use 'name'"),
    ("nodes: 2", "unknown key 'nodes'", "1:1", "write 'nodes' under 'slurm:'"),
    (
        "launch: {partition: gpu}",
        "unknown key 'partition' in section [launch]",
        "1:10",
        "write 'partition' under 'slurm:'",
    ),
    (
        "slurm: {job-name: x}",
        "unknown key 'job-name' in section [slurm]",
        "1:9",
        "write 'name' at the top level",
    ),
    ("slurm: {gpus: 4}", "unknown key 'gpus' in section [slurm]", "1:9", "use 'gpus_per_node'"),
    ("slurm.nodes: 2", "unknown key 'slurm.nodes'", "1:1", "write 'nodes' under 'slurm:'"),
    (
        "profiles: {a: {slurm: {nods: 2}}}",
        "unknown key 'nods' in section [slurm] of profile 'a'",
        "1:24",
        "use 'nodes'",
    ),
    (
        "profiles: {a: {profiles: {}}}",
        "unknown key 'profiles' of profile 'a'",
        "1:16",
        None,
    ),
    ("slurm: {nodes: four}", "slurm.nodes must be a whole number, not 'four'", "1:16", None),
    ("slurm: {nodes: 1.5}", "slurm.nodes must be a whole number, not '1.5'", "1:16", None),
    ("slurm: {nodes: 0}", "slurm.nodes must be at least 1, not 0", "1:16", None),
    (
        "training: {params: 8 billion}",
        "training.params must be a number, not '8 billion'",
        "1:20",
        "write 0.4, 8.03e9 or 8.03B",
    ),
    (
        "training: {step_time: fast}",
        "training.step_time must be a number, not 'fast'",
        "1:23",
        "write 4.5 (seconds), 4.5s or 450ms",
    ),
    ("training: {mfu: 0}", "training.mfu must be a number above 0, not 0.0", "1:17", None),
    (
        "slurm: {nodes: 2-4}",
        "slurm.nodes must be one number, not '2-4'",
        "1:16",
        "write one number; a run has a fixed number of nodes",
    ),
    (
        "slurm: {nodes: [1, 2]}",
        "slurm.nodes must be a single value",
        "1:16",
        "write one value, not several",
    ),
    (
        "slurm: {exclusive: maybe}",
        "slurm.exclusive must be true or false, not 'maybe'",
        "1:20",
        None,
    ),
    (
        "slurm: {time: UNLIMITED}",
        "time limit 'UNLIMITED' means no limit",
        "1:15",
        "give a limit: a job without one is never backfilled and waits longest",
    ),
    ("launch:\n  strategy: zero4\n", "unknown strategy 'zero4'", "2:13", "use 'zero3'"),
    ("launch: {mixed_precision: fp32}", "unknown mixed precision 'fp32'", "1:27", "use 'no'"),
    (
        "launch: {device: tpu}",
        "unknown device 'tpu'",
        "1:18",
        "use one of: auto, cuda, mps, cpu",
    ),
    (
        "network: {preset: xyz}",
        "unknown network 'xyz'",
        "1:19",
        "use one of: auto, ethernet, infiniband, efa",
    ),
    ("args: --steps 5", "args must be a list", "1:7", "write args: ['--steps', '5']"),
    ("args: [[a]]", "an item must be a single value", "1:8", None),
    ("args: [a, ]\npass_env: [,]", "this is not valid YAML", "2:12", None),
    ("args:\n  -\n", "an item has no value", "2:4", "write '' for an empty string"),
    ("env: [A=1]", "env must be a mapping", "1:6", "write env: {A: 1}"),
    ("env:\n  A:\n", "A has no value", "2:5", "write '' for an empty string"),
    (
        "env: {A-B: 1}",
        "env: 'A-B' is not a variable name",
        "1:7",
        None,
    ),
    (
        "pass_env: [A=1]",
        "pass_env: 'A=1' is not a variable name",
        "1:11",
        "list names of variables of your shell, without values",
    ),
    ("name: ''", "name is empty", "1:7", "leave it out to use the default"),
    (
        'name: "a\\nb"',
        "name contains a newline or control character: 'a\\nb'",
        "1:7",
        "remove it: a Slurm directive is one line",
    ),
    ('args: ["a\\0b"]', "args contains a NUL byte", "1:7", "remove it"),
    ("name: a\nname: b\n", "key 'name' is given twice", "2:1", "keep one; the first is on line 1"),
    ("env: {A: 1, A: 2}", "key 'A' is given twice", "1:13", "keep one; the first is on line 1"),
    ("slurm: 4", "[slurm] must contain 'key: value' lines", "1:8", None),
    ("- a", "the file must contain 'key: value' lines", "1:1", None),
    ("just words", "the file must contain 'key: value' lines", "1:1", None),
    ("profile: [a]", "profile must be a single name", "1:10", None),
    (
        "profiles: [a]",
        "profiles must be a mapping",
        "1:11",
        "write profiles: {a100: {slurm: {partition: gpu}}}",
    ),
    ("profiles: {a: gpu}", "profile 'a' must be a mapping", "1:15", None),
    ("? [a]\n: b", "a key must be a word", "1:3", None),
    ("name: !!python/name:os.system x", None, "1:7", None),
    ("slurm:\n\tnodes: 2\n", "this is not valid YAML", "2:1", "indent with spaces"),
    ("name: 'open", "this is not valid YAML", "1:12", None),
    ("a: 1\n---\nb: 2\n", "this is not valid YAML", "2:1", None),
    ("name: a\x01b", "this is not valid YAML", "1", None),
    ("name: x\nslurm: {<<: 3}", "this is not valid YAML", "2:13", None),
    ("[" * 99, "this is not valid YAML", "1:51", None),
    (
        f"args: &a [{', '.join('abcdefgh' * 50)}]\n"
        f"profiles: {{{', '.join(f'p{n}: {{args: *a}}' for n in range(300))}}}",
        "the file has more than 100,000 values",
        "1:761",
        "repeat less of the file with << and *",
    ),
]


@pytest.mark.parametrize(("text", "message", "place", "hint"), MISTAKES)
def test_a_mistake_names_its_place_and_the_remedy(
    loaded: Load, text: str, message: str | None, place: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(text)
    error = caught.value
    assert error.where == f"clusterrun.yaml:{place}"
    assert error.exit_code is Exit.USAGE
    if message is not None:
        assert error.message == message
    if hint is not None:
        assert error.hints[0] == hint


def test_yaml_that_names_python_objects_is_not_obeyed(loaded: Load) -> None:
    with pytest.raises(ConfigError, match="python/object/apply:os"):
        loaded("args: [!!python/object/apply:os.system 'touch x']")


def test_the_first_of_several_mistakes_says_how_many_more_there_are(loaded: Load) -> None:
    with pytest.raises(ConfigError, match="unknown key 'x'") as caught:
        loaded("x: 1\ny: 2\nslurm: {nodes: 0}\n")
    assert caught.value.hints[-1] == "to list 2 more: clusterrun config validate"


@pytest.mark.parametrize("who", ["user", "site"])
def test_an_unknown_key_in_a_user_or_site_file_is_only_warned_of(
    workplace: Workplace, who: str
) -> None:
    text = "slurm: {gpus_per_nodes: 4, partition: gpu}"
    (workplace.write_user if who == "user" else workplace.write_site)(text)
    resolved = workplace.load()
    name = "~/.config/clusterrun/config.yaml" if who == "user" else f"{workplace.root}/site.yaml"
    assert resolved.notes == (
        f"{name}:1:9: unknown key 'gpus_per_nodes' in section [slurm] is ignored; "
        "use 'gpus_per_node'",
    )
    assert resolved.spec.partition == "gpu"


def test_a_wrong_value_in_a_site_file_is_an_error(workplace: Workplace) -> None:
    workplace.write_site("slurm: {nodes: many}")
    with pytest.raises(ConfigError) as caught:
        workplace.load()
    assert caught.value.where == f"{workplace.root}/site.yaml:1:16"


def test_a_mistake_in_a_profile_that_nobody_chose_is_found(loaded: Load) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.nodes must be at least 1"):
        loaded("profiles: {a: {slurm: {nodes: 0}}}")


def test_a_mistake_in_a_variable_names_the_variable(workplace: Workplace) -> None:
    workplace.environ["CLUSTERRUN_SLURM_NODES"] = "many"
    with pytest.raises(ConfigError) as caught:
        workplace.load()
    assert caught.value.message == "CLUSTERRUN_SLURM_NODES must be a whole number, not 'many'"
    assert caught.value.where == "env CLUSTERRUN_SLURM_NODES"


def test_a_broken_list_in_a_variable_shows_the_form(workplace: Workplace) -> None:
    workplace.environ["CLUSTERRUN_PASS_ENV"] = "[A, B"
    with pytest.raises(UsageError, match="CLUSTERRUN_PASS_ENV: this is not valid YAML") as caught:
        workplace.load()
    assert caught.value.hints == ("write [first, second] or {NAME: value}, as in YAML",)


def test_a_mistake_on_the_command_line_names_the_option_and_no_file(workplace: Workplace) -> None:
    with pytest.raises(UsageError) as caught:
        workplace.load({"nodes": Given(value="many", flag="-N")})
    assert (caught.value.message, caught.value.where) == (
        "-N must be a whole number, not 'many'",
        None,
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("slurm.nodes", "--set 'slurm.nodes' has no value", "write --set slurm.nodes=2"),
        ("slurm.partiton=x", "unknown key 'slurm.partiton'", "use 'slurm.partition'"),
        ("profile=x", "unknown key 'profile'", "use --profile NAME"),
        ("zzz=x", "unknown key 'zzz'", None),
        ("slurm.nodes=0", "slurm.nodes must be at least 1, not 0", None),
    ],
)
def test_a_mistake_in_set(workplace: Workplace, text: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        workplace.load(overrides=[text])
    assert caught.value.message == message
    if hint is not None:
        assert caught.value.hints == (hint,)


def test_set_reaches_one_name_of_a_mapping(workplace: Workplace) -> None:
    resolved = workplace.load(overrides=["env.LOG_LEVEL=a=b", "slurm.nodes=2", "slurm.nodes=3"])
    assert (resolved.spec.env, resolved.spec.nodes) == ({"LOG_LEVEL": "a=b"}, 3)


def test_a_variable_without_a_value_points_to_pass_env(workplace: Workplace) -> None:
    with pytest.raises(UsageError, match="'HF_HOME' has no value") as caught:
        workplace.load({"env": Given(value=("HF_HOME",), flag="--env")})
    assert "--pass-env HF_HOME" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"name: \xff\xfe", "is not UTF-8 text"), (None, "cannot read clusterrun.yaml")],
)
def test_a_file_that_cannot_be_read(
    workplace: Workplace, content: bytes | None, message: str
) -> None:
    path = workplace.project / "clusterrun.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        workplace.load()
    assert caught.value.cause


def test_a_job_file_that_is_missing(workplace: Workplace) -> None:
    with pytest.raises(ConfigError, match=r"cannot read jobs/x\.yaml") as caught:
        workplace.load(config_file="jobs/x.yaml")
    assert caught.value.cause == "No such file or directory"


def test_deep_nesting_is_refused_and_does_not_crash(loaded: Load) -> None:
    with pytest.raises(ConfigError):
        loaded("args: " + "[" * 5000)


SECRETS: list[tuple[str, dict[str, Any], str]] = [
    ("env: {WANDB_API_KEY: hunter2}", {}, "WANDB_API_KEY"),
    ("network: {env: {MY_TOKEN: hunter2}}", {}, "MY_TOKEN"),
    ("env: {PROXY: 'http://me:hunter2@proxy'}", {}, "PROXY"),
    ("launch: {setup: ['export HF_TOKEN=hunter2']}", {}, "HF_TOKEN"),
    ("profiles: {a: {env: {DB_PASSWORD: hunter2}}}", {}, "DB_PASSWORD"),
    ("", {"env": Given(value=("AWS_SECRET_ACCESS_KEY=hunter2",), flag="--env")}, "AWS_SECRET"),
]


@pytest.mark.parametrize(("text", "flags", "name"), SECRETS)
def test_a_secret_is_refused_without_being_repeated(
    workplace: Workplace, text: str, flags: dict[str, Any], name: str
) -> None:
    workplace.write_project(text)
    with pytest.raises(UsageError, match="looks like a secret") as caught:
        workplace.load(flags)
    assert name in caught.value.message
    assert f"pass_env: [{name}" in caught.value.hints[0]
    assert "hunter2" not in repr((caught.value.message, caught.value.hints, caught.value.cause))


def test_a_setup_line_that_reads_a_secret_is_not_refused(loaded: Load) -> None:
    line = 'export HF_TOKEN="$(cat ~/.token)"'
    assert loaded(f"launch:\n  setup:\n  - '{line}'\n").spec.setup == (line,)


def test_only_the_first_mistakes_get_a_hint_of_their_own() -> None:
    text = "\n".join(f"slurm_{n}: 1" for n in range(2 * HINTS))
    file = ConfigFile(shown="clusterrun.yaml", text=text, anchor=Anchor(), strict=True)
    last = parse_document(file).errors[-1]
    assert last.message == f"unknown key 'slurm_{2 * HINTS - 1}'"
    assert last.hints == ("use a known key",)
