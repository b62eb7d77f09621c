"""`plan` of a config.json: transformers counts it, in the job's Python, once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from clusterrun.advice import count
from clusterrun.estimates.models import BUILT_IN
from clusterrun.shared import shell
from tests.cli.conftest import CommandLine, Said

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256},
}
# A family whose default config is a model of the table.
DEFAULTS = {
    **{"gpt2": "gpt2", "llama": "llama-2-7b", "mistral": "mistral-7b", "vit": "vit-base"},
    **{"mixtral": "mixtral-8x7b", "gpt_oss": "gpt-oss-120b", "phi3": "phi-3-mini"},
    **{"deepseek_v3": "deepseek-v3", "bert": "bert-base-uncased", "t5": "t5-small"},
}


def _plan(here: CommandLine, config: dict[str, Any], *argv: str) -> Said:
    (here.path / "config.json").write_text(json.dumps(config))
    return here("plan", "--model", "config.json", "--seq-len", "128", *argv)


@pytest.mark.torch
def test_transformers_counts_what_the_table_has() -> None:
    transformers = pytest.importorskip("transformers")
    for family, name in DEFAULTS.items():
        told = count.counted({"model_type": family}, transformers)
        known = dataclasses.asdict(BUILT_IN[name])
        numbers = {key for key, value in told.items() if not isinstance(value, str)}
        for key in numbers - {"head_dim", "positions"}:
            assert told[key] == pytest.approx(known[key], rel=0.01), (family, key)


@pytest.mark.torch
def test_images_are_counted_beside_the_words() -> None:
    transformers = pytest.importorskip("transformers")
    vision = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    parts = {"text_config": {**LLAMA, "model_type": "gemma3_text"}, "vision_config": vision}
    told = count.counted({"model_type": "gemma3", **parts}, transformers)
    alone = count.counted(parts["text_config"], transformers)
    assert told["params"] > alone["params"]
    same = ("layers", "hidden", "block", "linear_params", "family", "vocab")
    assert [told[key] for key in same] == [alone[key] for key in same]


@pytest.mark.torch
def test_a_config_json_of_the_project_is_counted_once_and_runs_nothing_of_the_project(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    (here.path / "json.py").write_text("raise SystemExit('a module of the project ran')\n")
    foreign = {"auto_map": {"AutoConfig": "mine.Config"}, "quantization_config": {"bits": 4}}
    said = _plan(here, {**LLAMA, **foreign}, "--json")
    model = json.loads(said.out)["inputs"]["model"]
    assert (model["params"], model["layers"], model["family"]) == (115_008, 2, "llama")
    assert "are assumed to be" not in said.err

    snapshot = here.path / "hub" / "models--my--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (here.path / "config.json").rename(snapshot / "config.json")
    monkeypatch.setenv("HF_HUB_CACHE", str(here.path / "hub"))
    monkeypatch.delattr(shell, "run_once")  # the answer is known
    again = json.loads(here("plan", "--model", "my/model", "--json").out)["inputs"]["model"]
    assert again == {**model, "name": "my/model"}


@pytest.mark.torch
def test_a_model_that_transformers_lacks_is_refused_with_what_helps(here: CommandLine) -> None:
    pytest.importorskip("transformers")
    said = _plan(here, {"model_type": "mine", "num_experts": 16})
    assert said.code == 2
    assert "cannot count the parameters of 'config.json'" in said.err
    assert "has no models of type 'mine'" in said.err
    assert "pass only --params and --active-params" in said.err


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ('echo \'{"missing": "No module named torch"}\'', "No module named torch"),
        ('echo \'{"wrong": "ValueError: odd"}\'', "ValueError: odd"),
        ("echo '{\"params\": 1e300}'", "a value is of type float, not int"),
        ("echo '{\"params\": 99999999999999999999}'", "a number is out of range"),
        ("echo odd; echo Killed >&2; exit 1", "Killed"),
        ("for _ in {1..20000}; do echo 1234567; done", "the job's Python printed no numbers"),
    ],
)
def test_an_interpreter_that_cannot_count_is_an_error_in_one_line(
    here: CommandLine, answer: str, cause: str
) -> None:
    python = here.program("python3.99", answer)
    said = _plan(here, LLAMA, "--python", str(python))
    assert (said.code, said.out) == (2, "")
    assert cause in said.err
    assert "pass --params" in said.err
    assert "Traceback" not in said.err
    assert not list((here.path.parent / "cache").rglob("models/*"))


def test_an_interpreter_that_only_the_project_names_is_not_run(
    here: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = here.program("python3.99", "exit 1")
    (here.path / "clusterrun.yaml").write_text(f"launch: {{python: {python}}}\n")
    asked: list[str] = []

    def run_once(argv: Sequence[str], *_: Any, **__: Any) -> shell.Completed:
        asked.append(argv[0])
        return shell.Completed(0, '{"missing": "torch"}', "")

    monkeypatch.setattr(shell, "run_once", run_once)
    assert _plan(here, LLAMA).code == 2
    assert _plan(here, LLAMA, "--python", str(python)).code == 2
    assert asked[0] != str(python) == asked[1]
