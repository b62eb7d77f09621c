"""The fixtures that give tests a real Slurm; a conftest imports the ones that its tests need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster import network, packages
from tests.cluster.cluster import Cluster
from tests.cluster.newer import NewerSlurm
from tests.cluster.shape import Shape, default_state_dir, own_slot

NO_ACCOUNTING = 1
NEWER = 4


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Give a healthy cluster of at least 4 nodes × 4 GPUs, and SLURM_CONF for the whole session.

    One that a person brought up is used and left; else one is brought up and taken down, in the
    place of what an earlier session left that was killed.
    """
    _need_a_fit_machine()
    slot = own_slot()
    wanted = Cluster(shape=Shape(state_dir=default_state_dir(slot), slot=slot))
    found = Cluster.running(wanted.shape.state_dir)
    if found is not None and not _serves(found.shape, wanted.shape):
        pytest.fail(f"the cluster that is up is too small for the tests: {found.shape}")
    used = found or wanted
    if found is None:
        used.up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(used.shape.slurm_conf))
        used.heal()
        yield used
    if found is None:
        used.down()


@contextmanager
def another(number: int, **shape: Any) -> Iterator[Cluster]:
    """Bring up a cluster of another shape beside the shared one."""
    _need_a_fit_machine()
    slot = own_slot(number)
    brought = Cluster(shape=Shape(state_dir=default_state_dir(slot), slot=slot, **shape))
    brought.up()
    yield brought
    brought.down()


@pytest.fixture(scope="session")
def newer_slurm_cluster() -> Iterator[Cluster]:
    """Bring up a cluster of a newer Slurm than the system's."""
    newer = NewerSlurm.default()
    if not newer.installed:
        pytest.skip(f"missing {newer.prefix}: python -m tests.cluster install")
    with another(NEWER, newer_slurm=newer.prefix) as third:
        yield third


@pytest.fixture
def newer_cluster(newer_slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Point SLURM_CONF and PATH at the cluster of the newer Slurm, for one test."""
    monkeypatch.setenv("SLURM_CONF", str(newer_slurm_cluster.shape.slurm_conf))
    monkeypatch.setenv("PATH", newer_slurm_cluster.shape.path(os.environ["PATH"]))
    return newer_slurm_cluster


@pytest.fixture
def cluster_no_accounting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Point SLURM_CONF, for one test, at a small cluster without accounts: `sacct` fails there."""
    with another(NO_ACCOUNTING, nodes=2, accounting=False) as second:
        monkeypatch.setenv("SLURM_CONF", str(second.shape.slurm_conf))
        yield second


def _serves(found: Shape, wanted: Shape) -> bool:
    return (
        found.nodes >= wanted.nodes
        and found.gpus_per_node >= wanted.gpus_per_node
        and found.accounting
        and found.newer_slurm == wanted.newer_slurm
    )


def _need_a_fit_machine() -> None:
    if os.geteuid() != 0:
        pytest.skip("the test cluster needs root")
    if missing := packages.missing_programs():
        pytest.skip(f"missing {', '.join(missing)}: python -m tests.cluster install")
    if refused := network.refusal():
        pytest.skip(f"no network namespaces here: {refused}")
