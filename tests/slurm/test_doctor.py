"""`doctor` on a real Slurm: nothing fails on a healthy one, and a stopped part is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.road import Project, project

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

TWO = ("--only", "slurm", "-N2", "--gpus-per-node", "2")


@pytest.fixture(name="here")
def _here(tmp_path: Path) -> Project:
    return project(tmp_path / "project", tmp_path / "state")


def looked(here: Project, *args: str) -> dict[str, dict[str, Any]]:
    done = here.cli("doctor", "--json", *TWO, *args, "fail.py")
    return {each["id"]: each for each in json.loads(done.stdout)["checks"]}


def test_a_healthy_site(cluster: Cluster, here: Project) -> None:
    del cluster
    found = looked(here)
    assert {each["status"] for each in found.values()} == {"ok"}, found
    assert "nodes" in found["slurm.submit"]["text"]


def test_a_request_that_slurm_would_refuse(cluster: Cluster, here: Project) -> None:
    del cluster
    found = looked(here, "-N", "900")
    failed = {name for name, each in found.items() if each["status"] == "fail"}
    assert failed == {"slurm.limits", "slurm.submit"}


def test_a_site_without_accounting(cluster_no_accounting: Cluster, here: Project) -> None:
    del cluster_no_accounting
    found = looked(here)
    skipped = {name for name, each in found.items() if each["status"] == "skip"}
    assert skipped == {"slurm.accounting", "slurm.account"}
    assert {each["status"] for each in found.values()} == {"ok", "skip"}, found


def test_slurmdbd_that_does_not_answer(cluster_slurmdbd_stopped: Cluster, here: Project) -> None:
    del cluster_slurmdbd_stopped
    found = looked(here)
    assert found["slurm.accounting"]["status"] == "note", found
    assert "fail" not in {each["status"] for each in found.values()}
