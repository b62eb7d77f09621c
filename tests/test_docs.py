"""The pages under docs/ and the README: their commands run, their links lead somewhere.

Commands for a cluster: tests/cli/test_docs.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterrun.config.load import load_spec
from clusterrun.logformat.lines import Stream
from clusterrun.logs.views import _MARKS
from tests.checkout import listed
from tests.readme import BLOCK, ROOT, blocks, run, tour

PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *listed(ROOT / "examples")]
    if page.suffix == ".md"
)
KINDS = {"local", "slurm", "render", "logs", "config"}
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
    page = (ROOT / "docs/logs.md").read_text()
    marks = {"stderr": _MARKS[Stream.ERR], "lost output": _MARKS[Stream.GAP]}
    assert ", ".join(f"`{mark}` for {what}" for what, mark in marks.items()) in page
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_reference_is_what_the_code_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs/reference/generate.py", tmp_path], check=True)
    for page in tmp_path.iterdir():
        kept = (ROOT / "docs/reference" / page.name).read_text()
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
