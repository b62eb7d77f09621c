"""The configurations of docs/environments.md are valid, and what the page says of each is so."""

from __future__ import annotations

from pathlib import Path

from clusterrun.config.environments import read_step
from clusterrun.config.load import load_spec
from tests.readme import BLOCK, ROOT

PAGE = (ROOT / "docs/environments.md").read_text()
CONFIGS = [text for name, _, text in BLOCK.findall(PAGE) if name == "config"]


def test_each_profile_names_its_environment(tmp_path: Path) -> None:
    (tmp_path / "clusterrun.yaml").write_text(CONFIGS[0])
    tools: dict[str, list[str | None]] = {
        **{"conda": ["conda"], "venv": ["venv"], "uv": ["venv"], "modules": ["modules"]},
        "mixed": ["modules", "conda", None],
    }
    for profile, expected in tools.items():
        resolved = load_spec({}, environ={"HOME": "/home/ada"}, cwd=tmp_path, profile=profile)
        assert [step.tool for step in map(read_step, resolved.spec.setup)] == expected
        assert resolved.notes == ()


def test_the_toolkit_comes_after_the_environment(tmp_path: Path) -> None:
    (tmp_path / "clusterrun.yaml").write_text(CONFIGS[1])
    resolved = load_spec({}, environ={}, cwd=tmp_path)
    assert resolved.spec.setup == ("conda: llm", 'export CUDA_HOME="$CONDA_PREFIX"')
    assert len(CONFIGS) == 2


def test_the_options_of_the_page_are_understood(tmp_path: Path) -> None:
    for word, line in {
        "conda:llm": "conda:llm",
        "venv:~/venvs/llm": "venv: /home/ada/venvs/llm",
        "modules: cuda/12.4 gcc/12": "modules: cuda/12.4 gcc/12",
    }.items():
        assert f"`--setup {word}`" in PAGE.replace("'", "")
        spec = load_spec({"setup": (word,)}, environ={"HOME": "/home/ada"}, cwd=tmp_path).spec
        assert spec.setup == (line,)
        assert read_step(line).tool is not None
