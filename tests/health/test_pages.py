"""Each check has a page, whose numbers are those of the code."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from pathlib import Path
from typing import Final

import pytest

from clusterrun.backends.slurm import site as slurm
from clusterrun.cli.doctor import pages as explained
from clusterrun.health import checks, examine, gpus, machine, node, paths, toolchain, trial
from clusterrun.health.checks import clock
from clusterrun.health.node import Needs, all_checks, pages, quick_checks
from clusterrun.shared import files
from clusterrun.verbs import doctor
from tests.checkout import ROOT

SOURCES = [*Path(machine.__file__).parent.rglob("*.py"), Path(slurm.__file__)]
OF_THIS_MACHINE = [x for x in pages() if next(doctor.places(x)).startswith("this machine")]


def size(number: int) -> str:
    return f"{number >> 30} GiB" if number >= 1 << 30 else f"{number >> 20} MiB"


def share(part: float) -> str:
    return f"{part:.0%}".replace("%", " %")


def seconds(number: float) -> str:
    return f"{number:g} s"


LEAST: Final = inspect.signature(trial.slow).parameters["least"].default
# What the pages say of the numbers, and words with digits in them that are no limits of ours.
NUMBERS: Final = {
    "cuda.driver": [
        seconds(toolchain.ANSWER_S),
        *(
            f"CUDA {major} needs {first}.{second}"
            for major, (first, second) in toolchain._OLDEST.items()
        ),
    ],
    "cuda.toolkit": ["DS_SKIP_CUDA_CHECK=1"],
    "gpu.count": [seconds(gpus.ANSWER_S), seconds(gpus.LONG_S)],
    "gpu.foreign": [share(gpus.HELD), size(gpus.FEW_BYTES)],
    "gpu.xid": ["570 and newer"],
    "path.runs": [
        *(place.rstrip("/") for place in paths.PLACES_OF_ONE_MACHINE),
        *(seconds(limit) for limit in (doctor.DEADLINE_S, paths.SLOW_S)),
    ],
    "path.disk": [size(paths.LEAST_BYTES), size(paths.FEW_BYTES)],
    "path.inodes": [f"{paths.LEAST_INODES:,} inodes", f"{paths.FEW_INODES:,} inodes"],
    "node.shm": [size(machine.LEAST_SHM_BYTES), size(machine.SHM_BYTES)],
    "node.memory": [size(machine.LEAST_BYTES_OF_RANK), size(machine.BYTES_OF_RANK)],
    "node.files": [
        f"{machine.FEWEST_FILES} files",
        f"{machine.LEAST_FILES:,}",
        f"{machine.FILES_OF_RANK} for each rank",
        f"{files.SPARE} above",
    ],
    "node.tmp": [
        f"{size(paths.SCRATCH_BYTES[0])} or {paths.SCRATCH_INODES[0]} inodes",
        f"{size(paths.SCRATCH_BYTES[1])} or {paths.SCRATCH_INODES[1]:,} inodes",
    ],
    "node.clock": [seconds(clock.CLOCK_S)],
    "node.compute": [seconds(trial.COMPUTE_S), share(LEAST)],
    "net.reduce": [seconds(trial.TIMEOUT_S)],
    "same.hardware": [share(examine._CLOSE)],
}


def test_the_numbers_of_a_page_are_those_of_the_code() -> None:
    """No other number is in it."""
    wrong = {}
    for name, page in pages().items():
        text = f"{page.fails}; {page.notes}"
        for words in NUMBERS.get(name, []):
            text, found = re.subn(rf"(?<![\w.,]){re.escape(words)}(?!\w)", "", text)
            wrong.update({} if found else {name: words})
        wrong.update({name: text} if re.search(r"\d", text) else {})
    assert wrong == {}


def test_each_check_of_nodes_has_a_page() -> None:
    """The code has the ids as literals, but for those of compared facts."""
    trees = (ast.parse(path.read_text()) for path in SOURCES)
    texts = {
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    }
    domains = "|".join({name.partition(".")[0] for name in pages()})
    of_code = {x for x in texts if isinstance(x, str) and re.fullmatch(rf"({domains})\.\w+", x)}
    assert of_code - set(pages()) == set()
    of_code |= {f"same.{group}" for group in examine.HINTS}
    assert set(pages()) - set(OF_THIS_MACHINE) == of_code - set(OF_THIS_MACHINE)


def test_each_page_is_complete() -> None:
    wrong = []
    for name, page in pages().items():
        texts = [page.looks_at, page.fails, page.notes, page.why, *page.fix]
        is_whole = (page.fails or page.notes) and page.fix and page.why.endswith(".")
        has_place = list(doctor.places(name))
        are_parts = not any(text.endswith(".") for text in texts[:3])
        is_plain = all(text == " ".join(text.split()) for text in texts)
        wrong += [] if is_whole and has_place and are_parts and is_plain else [name]
    assert wrong == []


def test_a_file_adds_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run by doctor, on nodes and in the preflight, and is explained and documented."""
    (tmp_path / "mine.py").write_text(
        "from clusterrun.health.node import CheckPage, check\n"
        "from clusterrun.shared.finding import fail\n\n"
        'page = CheckPage(looks_at="a thing", fails="it is bad", why="It ends.", fix=["mend it"])\n'
        '@check("node.mine", page, is_quick=True)\n'
        "def mine(needs):\n"
        '    return fail("node.mine", f"bad in {needs.runs}", "mend it")\n'
    )
    monkeypatch.setattr(node, "_CHECKS", dict(node.own_checks()))
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path)])
    needs = Needs(runs=tmp_path)
    for looks in (quick_checks(needs), all_checks(needs)):
        assert str(looks["node.mine"]()) == f"node.mine: bad in {tmp_path}; hint: mend it"
    assert len(list(doctor.places("node.mine"))) == 3
    summary, rows = explained()["node.mine"]
    assert (summary, rows[0]) == ("looks at a thing", ("FAIL if", "it is bad"))
    generate = runpy.run_path(str(ROOT / "docs" / "reference" / "generate.py"))
    assert "## node.mine" in "\n".join(generate["_checks"]())
