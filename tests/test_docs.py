"""The pages under docs/ and the README: their commands run, their links lead somewhere.

Commands for a cluster: tests/cli/test_render.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.config.environments import read_step
from clusterrun.config.load import load_spec
from clusterrun.diagnosis import table
from clusterrun.logformat.lines import Stream
from clusterrun.logs.views import _MARKS
from clusterrun.shared import checkpoint_files
from tests.checkout import EXAMPLES, copy_listed, listed
from tests.patience import finished
from tests.readme import BLOCK, ROOT, blocks, run, tour

PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *listed(ROOT / "examples")]
    if page.suffix == ".md"
)
KINDS = {"local", "slurm", "render", "logs", "config", "hydra"}
ENDED_RUN = (
    "cd examples; clusterrun submit --cluster local --nodes 2 --gpus-per-node 2 --device cpu "
    "--wait train_lm.py --max-steps 40"
)


def pages_with(kind: str) -> list[str]:
    return [page for page in PAGES if page.startswith("docs/") and blocks(kind, page)]


def test_every_shell_block_is_one_that_a_test_runs() -> None:
    for page in (page for page in PAGES if not page.startswith("examples/")):
        text = (ROOT / page).read_text().replace("```bash\nmake demo\nmake test\n```", "")
        shells = len(re.findall(r"^```bash$", text, re.MULTILINE))
        marked = [kind for kind, language, _ in BLOCK.findall(text) if language == "bash"]
        assert (len(marked), set(marked) - KINDS) == (shells, set()), page


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            found = (ROOT / page).parent / path if path else ROOT / page
            assert found.exists(), (page, target)
            assert not anchor or anchor in anchors(found.read_text()), (page, target)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = (
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head)) for head in heads
    )
    return {each.strip().lower().replace(" ", "-") for each in words}


def test_the_site_lists_each_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    shown = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", text, re.MULTILINE)
    results = [str(p.relative_to(ROOT)) for p in listed(ROOT / "benchmarks") if p.suffix == ".md"]
    assert sorted(shown) == sorted([*PAGES, *results])


def test_messages_of_ours_that_troubleshooting_quotes_exist() -> None:
    """Check the fragments in the tables of `clusterrun's message`, as one string literal each."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    tables = re.findall(r"^\| clusterrun's message \|.*\n\|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [row.split("|")[1] for table in tables for row in table.splitlines()]
    quoted = [words for cell in cells for words in re.findall(r"`([^`]+)`", cell)]
    sources = [*(ROOT / "clusterrun").rglob("*.py"), *(ROOT / "templates").iterdir()]
    texts = [path.read_text() for path in sources]
    parts = [part.strip() for words in quoted for part in words.split("…")]
    assert len(tables) == 2
    assert len(quoted) >= len(cells) > 0
    assert [part for part in parts if not any(part in text for text in texts)] == []
    rows = re.findall(r"^\| (1[3-9]\d)(.*?) \| SIG", page, re.MULTILINE)
    assert len(rows) == 6
    assert all(rest == f", or signal {int(status) - 128}" for status, rest in rows)


def test_the_marks_of_log_lines_are_explained() -> None:
    page = (ROOT / "docs/watching.md").read_text()
    marks = {"stderr": _MARKS[Stream.ERR], "lost output": _MARKS[Stream.GAP]}
    assert ", ".join(f"`{mark}` for {what}" for what, mark in marks.items()) in page
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_reference_is_what_the_code_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs/reference/generate.py", tmp_path], check=True)
    for page in tmp_path.iterdir():
        place = {".1": ROOT / "man", ".json": table.CAUSES}.get(
            page.suffix, ROOT / "docs/reference"
        )
        kept = (place / page.name).read_text()
        assert kept == page.read_text(), "run docs/reference/generate.py"


@pytest.mark.parametrize("page", pages_with("config"))
def test_configurations_are_valid(page: str, tmp_path: Path) -> None:
    for text in blocks("config", page):
        (tmp_path / "clusterrun.yaml").write_text(text)
        assert load_spec({}, environ={"HOME": str(tmp_path)}, cwd=tmp_path).notes == ()


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("page", pages_with("local"))
def test_commands_for_a_laptop_run(page: str, tmp_path: Path) -> None:
    run(tour("local", page), tmp_path)


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("page", pages_with("logs"))
def test_commands_for_a_run_that_ended_run(page: str, tmp_path: Path) -> None:
    """In the directory of a project that has a run."""
    run("\n".join([ENDED_RUN, *blocks("logs", page)]), tmp_path)


# docs/environments.md


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
    assert len(CONFIGS) == 4


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


# README


START = "docs/getting-started.md"


@pytest.mark.torch
def test_the_tour_on_this_machine(tmp_path: Path) -> None:
    out = run(tour("local"), tmp_path)
    assert "Submitted batch job L1" in out
    assert "held-out loss" in out
    assert "COMPLETED" in out
    assert "llama-3.1-8b" in out


@pytest.mark.torch
@pytest.mark.parametrize("steps", [5, pytest.param(150, marks=pytest.mark.long)])
def test_the_demo_trains_on_a_machine_without_slurm(tmp_path: Path, steps: int) -> None:
    """`make demo`, shorter first, with the environment of the tests instead of a new one."""
    copy_listed(EXAMPLES, tmp_path / "examples")
    recipes = (ROOT / "Makefile").read_text()
    assert "--max-steps 150" in recipes
    (tmp_path / "Makefile").write_text(recipes.replace("--max-steps 150", f"--max-steps {steps}"))
    venv = Path(sys.executable).parents[1]
    argv = ["make", "-o", f"{venv}/.train", f"VENV={venv}", "demo"]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = finished(argv, timeout_s=200, cwd=tmp_path, env=environ)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"step {steps}/{steps}" in done.stdout
    assert "held-out loss" in done.stdout
    assert "rank 0/4 on local0" in done.stdout


def test_the_configuration_is_valid(tmp_path: Path) -> None:
    (text,) = blocks("config")
    (tmp_path / "clusterrun.yaml").write_text(text)
    resolved = load_spec({}, environ={}, cwd=tmp_path)
    assert resolved.spec.partition == "gpu"
    assert resolved.spec.time_minutes == 24 * 60
    assert resolved.notes == ()


def test_the_python_lines_run_outside_a_run() -> None:
    for kind, start in (("runtime", "None\n"), ("api", "#!/bin/bash\n")):
        (text,) = blocks(kind, START)
        argv = [sys.executable, "-c", text]
        done = subprocess.run(argv, cwd=ROOT / "examples", capture_output=True, text=True)
        assert (done.returncode, done.stdout[: len(start)]) == (0, start), done.stderr


@pytest.mark.parametrize(
    ("kind", "page", "said"),
    [
        ("handle", START, ["L1 COMPLETED 0", "trained"]),
        ("jobs", "docs/reference/python.md", ["L1 COMPLETED", "L2 COMPLETED", *["trained"] * 2]),
    ],
)
def test_the_lines_about_a_handle_run(
    tmp_path: Path, kind: str, page: str, said: list[str]
) -> None:
    (text,) = blocks(kind, page)
    (tmp_path / "clusterrun.yaml").write_text("cluster: local\n")
    for script in ("train_lm.py", "train.py"):
        (tmp_path / script).write_text("")
    (tmp_path / "templates").mkdir()
    write = 'mkdir -p "$1/logs/a1"; echo "1700000000000100 0 o trained" > "$1/logs/a1/n0.log"'
    (tmp_path / "templates/node.sh.j2").write_text(f"#!/bin/bash\n{write}\n")
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    argv = [sys.executable, "-c", text]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == said


# docs/checkpoints.md


SCRIPTS = {
    name: text for name, _, text in BLOCK.findall((ROOT / "docs/checkpoints.md").read_text())
}


def test_every_script_has_a_name() -> None:
    assert (ROOT / "docs/checkpoints.md").read_text().count("```python") == len(SCRIPTS) == 3


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "trainer" else ())
        for name in SCRIPTS  # tests/rank/test_hf.py has the Trainer too
    ],
)
def test_a_script_saves_and_goes_on_from_what_it_saved(tmp_path: Path, name: str) -> None:
    own = tmp_path / "own"
    run_python(SCRIPTS[name], tmp_path, own)
    assert [step for step, _ in checkpoint_files.listed(own)] == [40, 20]
    newest, older = (checkpoint_files.read(path).path for _, path in checkpoint_files.listed(own))
    (newest / ".complete").unlink()
    marked = (older / ".complete").read_bytes()
    said = run_python(SCRIPTS[name], tmp_path, own)
    assert f"checkpoint {newest.name} is incomplete and was skipped" in said
    assert (newest / ".complete").exists()
    assert (older / ".complete").read_bytes() == marked, "it began anew"


def run_python(script: str, cwd: Path, own: Path) -> str:
    environ = {**os.environ, "CLUSTERRUN_CHECKPOINT_DIR": str(own), "HF_HUB_OFFLINE": "1"}
    done = finished([sys.executable, "-c", script], timeout_s=200, cwd=cwd, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stderr
