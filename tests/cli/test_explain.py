"""`explain` has a page for each id."""

from __future__ import annotations

import pytest

from clusterrun.diagnosis.table import built_in
from clusterrun.health.checks import pages
from clusterrun.linting.rule import rules
from clusterrun.verbs import doctor
from tests.checkout import ROOT
from tests.cli.conftest import CommandLine


def test_each_id_is_listed(here: CommandLine) -> None:
    listed = [line.split()[0] for line in here("explain", "all").out.splitlines()[1:]]
    assert listed == [*built_in(), *pages(), *rules()]
    of_gpus = here("explain", "gpu.").out.splitlines()[1:]
    assert [line.split()[0] for line in of_gpus] == [x for x in pages() if x.startswith("gpu.")]


def test_the_page_of_a_check_is_whole(here: CommandLine) -> None:
    page = pages()["node.shm"]
    said = here("explain", "node.shm").out
    texts = [page.looks_at, page.fails, page.notes, page.why, *page.fix, *doctor.places("node.shm")]
    assert [text for text in texts if text not in " ".join(said.split())] == []
    assert said in (ROOT / "docs" / "doctor.md").read_text()


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("cuda_oom", "cuda_oom  A GPU ran out of memory."),
        ("node.tmp", "node.tmp  looks at "),
        ("fixed-port", "fixed-port  two jobs"),
    ],
)
def test_an_id_of_each_kind_is_explained(here: CommandLine, name: str, title: str) -> None:
    assert here("explain", name).out.startswith(title)
    wrong = here("explain", f"{name}e")
    assert (wrong.code, f"hint: use '{name}'" in wrong.err) == (2, True)


@pytest.mark.parametrize("verb", ["diagnose", "doctor", "check"])
def test_the_verbs_that_print_ids_explain_them(here: CommandLine, verb: str) -> None:
    said = here(verb, "--explain", "fixed-port")
    assert (said.code, said.out) == (0, here("explain", "fixed-port").out)


def test_an_unknown_id_leads_to_the_list(here: CommandLine) -> None:
    wrong = here("explain", "nosuch")
    assert wrong.code == 2
    assert "hint: list the ids with: clusterrun explain all" in wrong.err
