"""Every mistake in a file has one clear message with its file, line and column."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clusterrun.config.document import MOST_HINTS, parse_document
from clusterrun.config.load import Given
from clusterrun.config.settings import Anchor, ConfigFile, Resolved
from clusterrun.errors import ConfigError, Exit, UsageError
from tests.config.conftest import Workplace

Load = Callable[[str], Resolved]

PAIRS = "the file must contain 'key: value' lines"
BROKEN = "this is not valid YAML"
# Text, place, message, hint ("": any).
MISTAKES = [
    ("nmae: x", "1:1", "unknown key 'nmae'", "use 'name'"),
    ("nodes: 2", "1:1", "unknown key 'nodes'", "write 'nodes' under 'slurm:'"),
    ("slurm.nodes: 2", "1:1", "unknown key 'slurm.nodes'", "write 'nodes' under 'slurm:'"),
    ("slurm:\n  gpus: 4", "2:3", "unknown key 'gpus' in section [slurm]", "use 'gpus_per_node'"),
    ("slurm: {job-name: x}", "1:9", "unknown key 'job-name' in section [slurm]",
     "write 'name' at the top level"),
    ("profiles: {a: {slurm: {nods: 2}}}", "1:24",
     "unknown key 'nods' in section [slurm] of profile 'a'", "use 'nodes'"),
    ("profiles: {a: {profiles: {}}}", "1:16", "unknown key 'profiles' of profile 'a'", ""),
    ("profiles: {a: {slurm: {nodes: 0}}}", "1:31", "slurm.nodes must be at least 1, not 0", ""),
    ("slurm: {nodes: 1.5}", "1:16", "slurm.nodes must be a whole number, not '1.5'", ""),
    ("slurm: {nodes: [1, 2]}", "1:16", "slurm.nodes must be a single value", ""),
    ("slurm: {exclusive: maybe}", "1:20", "slurm.exclusive must be true or false, not 'maybe'", ""),
    ("slurm: {time: UNLIMITED}", "1:15", "time limit 'UNLIMITED' means no limit",
     "give a limit: a job without one is never backfilled and waits longest"),
    ("training: {params: 8 billion}", "1:20", "training.params must be a number, not '8 billion'",
     "write 0.4, 8.03e9 or 8.03B"),
    ("training: {step_time: fast}", "1:23", "training.step_time must be a number, not 'fast'",
     "write 4.5 (seconds), 4.5s or 450ms"),
    ("training: {mfu: 0}", "1:17", "training.mfu must be a number above 0, not 0.0", ""),
    ("launch:\n  strategy: zero4\n", "2:13", "unknown strategy 'zero4'", "use 'zero3'"),
    ("launch: {mixed_precision: fp32}", "1:27", "unknown mixed precision 'fp32'", "use 'no'"),
    ("launch: {device: tpu}", "1:18", "unknown device 'tpu'", "use one of: auto, cuda, mps, cpu"),
    ("args: --steps 5", "1:7", "args must be a list", "write args: [first, second]"),
    ("args: [[a]]", "1:8", "an item must be a single value", ""),
    ("args:\n  -\n", "2:4", "an item has no value", "write '' for an empty string"),
    ('args: ["a\\0b"]', "1:7", "args contains a NUL byte", "remove it"),
    ("env: [A=1]", "1:6", "env must be a mapping", "write env: {A: 1}"),
    ("env:\n  A:\n", "2:5", "A has no value", "write '' for an empty string"),
    ("env: {A-B: 1}", "1:7", "env: 'A-B' is not a variable name", ""),
    ("pass_env: [A=1]", "1:11", "pass_env: 'A=1' is not a variable name", ""),
    ("name: ''", "1:7", "name is empty", "leave it out to use the default"),
    ('name: "a\\nb"', "1:7", "name contains a newline or control character: 'a\\nb'",
     "remove it: a Slurm directive is one line"),
    ("name: a\nname: b\n", "2:1", "key 'name' is given twice", "keep one; the first is on line 1"),
    ("slurm: 4", "1:8", "section [slurm] must contain 'key: value' lines", ""),
    ("- a", "1:1", PAIRS, ""),
    ("just words", "1:1", PAIRS, ""),
    ("profile: [a]", "1:10", "profile must be a single value", ""),
    ("profiles: [a]", "1:11", "profiles must be a mapping",
     "write profiles: {a100: {slurm: {partition: gpu}}}"),
    ("profiles: {a: gpu}", "1:15", "profile 'a' must be a mapping", ""),
    ("? [a]\n: b", "1:3", "a key must be a word", ""),
    ("args: [!!python/object/apply:os.system x]", "1:8",
     "the tag tag:yaml.org,2002:python/object/apply:os.system is not supported", ""),
    ("slurm:\n\tnodes: 2\n", "2:1", BROKEN, ""),
    ("name: 'open", "1:12", BROKEN, ""),
    ("a: 1\n---\nb: 2\n", "2:1", BROKEN, ""),
    ("name: a\x01b", "1", BROKEN, ""),
    ("name: x\nslurm: {<<: 3}", "2:13", BROKEN, ""),
    ("[" * 5000, "1:51", BROKEN, ""),
    (f"args: &a [{', '.join('abcdefgh' * 50)}]\n"
     f"profiles: {{{', '.join(f'p{n}: {{args: *a}}' for n in range(300))}}}",
     "1:761", "the file has more than 100,000 values", "use fewer aliases (*) and merges (<<)"),
]  # fmt: skip


def test_a_mistake_names_its_place_and_the_remedy(loaded: Load) -> None:
    for text, place, message, hint in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            loaded(text)
        error = caught.value
        assert (error.where, error.message) == (f"clusterrun.yaml:{place}", message)
        assert error.exit_code is Exit.USAGE
        assert error.hint.startswith(hint)


def test_the_first_of_several_mistakes_says_how_many_more_there_are(loaded: Load) -> None:
    with pytest.raises(ConfigError, match="unknown key 'x'") as caught:
        loaded("x: 1\ny: 2\nslurm: {nodes: 0}\n")
    assert caught.value.hints[-1] == "to list 2 more: clusterrun config validate"
    text = "\n".join(f"slurm_{n}: 1" for n in range(2 * MOST_HINTS))
    file = ConfigFile(shown="clusterrun.yaml", text=text, anchor=Anchor(), strict=True)
    last = parse_document(file).errors[-1]
    assert last.message == f"unknown key 'slurm_{2 * MOST_HINTS - 1}'"
    assert last.hints == ("use a known key",)  # a hint takes a search


def test_an_unknown_key_in_a_user_or_site_file_is_only_warned_of(workplace: Workplace) -> None:
    site = workplace.write_site("slurm: {gpus_per_nodes: 4, partition: gpu}")
    workplace.write_user("slurm: {gpus_per_nodes: 4, qos: x}")
    resolved = workplace.load()
    assert resolved.notes == tuple(
        f"{name}:1:9: unknown key 'gpus_per_nodes' in section [slurm] is ignored; "
        "use 'gpus_per_node'"
        for name in ("~/.config/clusterrun/config.yaml", site)
    )
    assert (resolved.spec.partition, resolved.spec.qos) == ("gpu", "x")
    workplace.write_site("slurm: {nodes: many}")
    with pytest.raises(ConfigError) as caught:
        workplace.load()
    assert caught.value.where == f"{site}:1:16"


@pytest.mark.parametrize(
    ("environ", "flags", "overrides", "message", "hint"),
    [
        ({"CLUSTERRUN_SLURM_NODES": "many"}, {}, (),
         "CLUSTERRUN_SLURM_NODES must be a whole number, not 'many'", "write a number, e.g. 4"),
        ({"CLUSTERRUN_PASS_ENV": "[A, B"}, {}, (),
         "CLUSTERRUN_PASS_ENV: this is not valid YAML",
         "write [first, second] or {NAME: value}, as in YAML"),
        ({}, {"nodes": Given(value="many", flag="-N")}, (),
         "-N must be a whole number, not 'many'", "write a number, e.g. 4"),
        ({}, {"env": Given(value=("HF_HOME",), flag="--env")}, (), "--env: 'HF_HOME' has no value",
         "write HF_HOME=VALUE, or --pass-env HF_HOME to pass your shell's value"),
        ({}, {}, ["slurm.nodes"], "--set 'slurm.nodes' has no value", "write --set slurm.nodes=2"),
        ({}, {}, ["slurm.partiton=x"], "unknown key 'slurm.partiton'", "use 'slurm.partition'"),
        ({}, {}, ["zzz=x"], "unknown key 'zzz'", "use one of: "),
    ],
)  # fmt: skip
def test_a_mistake_outside_a_file_names_its_source(
    workplace: Workplace,
    environ: dict[str, str],
    flags: dict[str, Any],
    overrides: list[str],
    message: str,
    hint: str,
) -> None:
    workplace.environ |= environ
    with pytest.raises(UsageError) as caught:
        workplace.load(flags, overrides=overrides)
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)
    assert str(caught.value.where).removeprefix("env ") in (*environ, "None")


def test_set_reaches_one_name_of_a_mapping(workplace: Workplace) -> None:
    resolved = workplace.load(overrides=["env.LOG_LEVEL=a=b", "slurm.nodes=2", "slurm.nodes=3"])
    assert (resolved.spec.env, resolved.spec.nodes) == ({"LOG_LEVEL": "a=b"}, 3)


def test_a_file_that_cannot_be_read(workplace: Workplace) -> None:
    path = workplace.project / "clusterrun.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"clusterrun\.yaml is not UTF-8 text"):
        workplace.load()
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read jobs/x\.yaml") as caught:
        workplace.load(config_file="jobs/x.yaml")
    assert caught.value.cause == "No such file or directory"
    workplace.environ["CLUSTERRUN_SITE_CONFIG"] = "/nowhere/site.yaml"
    with pytest.raises(ConfigError, match=r"cannot read /nowhere/site\.yaml"):
        workplace.load()


SECRETS: list[tuple[str, dict[str, Any], str]] = [
    ("env: {WANDB_API_KEY: hunter2}", {}, "WANDB_API_KEY"),
    ("network: {env: {MY_TOKEN: hunter2}}", {}, "MY_TOKEN"),
    ("env: {PROXY: 'http://me:hunter2@proxy'}", {}, "PROXY"),
    ("launch: {setup: ['export HF_TOKEN=hunter2']}", {}, "HF_TOKEN"),
    ("profiles: {a: {env: {DB_PASSWORD: hunter2}}}", {}, "DB_PASSWORD"),
    ("", {"env": Given(value=("AWS_SECRET_ACCESS_KEY=hunter2",), flag="--env")}, "AWS_SECRET"),
]


def test_a_secret_is_refused_without_being_repeated(workplace: Workplace) -> None:
    for text, flags, name in SECRETS:
        workplace.write_project(text)
        with pytest.raises(UsageError, match=f"{name}.* looks like a secret") as caught:
            workplace.load(flags)
        assert f"pass_env: [{name}" in caught.value.hints[0]
        assert "hunter2" not in repr((caught.value.message, caught.value.hints, caught.value.cause))
    line = 'export HF_TOKEN="$(cat ~/.token)"'
    workplace.write_project(f"launch:\n  setup:\n  - '{line}'\n")
    assert workplace.load().spec.setup == (line,)
