"""A directory is measured within its time, and judged by what all nodes measured."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clusterrun.health import storage
from clusterrun.health.storage import StorageRates, mark, measure, rates, unseen, visible
from tests.patience import patience

ALONE = StorageRates(metadata=6000, read=800)
NODES = [f"n{number}" for number in range(4)]


def test_a_directory_is_measured_in_time_and_left_empty(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = measure(tmp_path, 0.1)
    assert time.monotonic() - begin < 1.0 * patience()
    assert found.metadata is not None
    assert found.metadata > 0
    assert found.read is not None
    assert found.read > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert (measure(tmp_path, 0.05).read or 0) > 1


def test_a_directory_that_cannot_be_written() -> None:
    with pytest.raises(OSError, match="proc"):
        measure(Path("/proc/self"), 0.01)


def test_a_server_that_breaks_under_load_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rename takes as long as there are clients, squared, as on a server that thrashes."""
    clients, real = 12, os.rename

    def thrashing(*args: Any) -> None:
        time.sleep(0.002 * clients**2)
        real(*args)

    monkeypatch.setattr(os, "rename", thrashing)
    together: dict[str, StorageRates] = {}

    def node(name: str) -> None:
        together[name] = measure(tmp_path, 0.1)

    threads = [threading.Thread(target=node, args=(f"n{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = rates(StorageRates(metadata=1000), together)
    assert (found.id, found.severity.value) == ("path.rate", "note")
    assert "breaks under this load" in found.text
    assert "disk of the node" in found.fix


@pytest.mark.parametrize(
    ("rate", "status"),
    [(6000, "ok"), (1500, "ok"), (400, "ok"), (360, "note"), (3, "note")],
)
def test_sharing_is_no_fault_and_a_collapse_is(rate: float, status: str) -> None:
    """Four nodes that get a quarter of the rate of one still get all of it together."""
    found = rates(ALONE, {node: StorageRates(metadata=rate, read=300) for node in NODES})
    assert found.severity.value == status
    if status == "ok":
        numbers = f"6,000 operations/s on one node alone, {rate:,} on each of 4 nodes at once"
        assert found.text == (
            f"metadata: {numbers}; "
            "reading: 800 MB/s on one node alone, 300 on each of 4 nodes at once"
        )


def test_a_node_that_is_slower_than_the_others() -> None:
    together = {node: StorageRates(metadata=2000, read=300) for node in NODES}
    together["n2"] = StorageRates(metadata=2000, read=30)
    found = rates(ALONE, together)
    assert found.severity.value == "note"
    assert found.text.startswith("reading: n2 at most 10% of the median of the others; reading: 8")
    assert "--exclude n2" in found.fix
    assert rates(ALONE, {}).severity.value == "skip"
    assert rates(StorageRates(), together).severity.value == "skip"


def test_nodes_see_each_others_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SEEN_S", 0.0)
    for node in (*NODES[:3], NODES[0]):
        mark(tmp_path, node)
    assert unseen(tmp_path, NODES) == ["n3"]
    assert unseen(tmp_path, NODES[:3]) == []


def test_a_listing_that_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in NODES:
        mark(tmp_path, node)
    monkeypatch.setattr(os, "listdir", lambda _: [])
    assert unseen(tmp_path, NODES) == []


def test_a_node_whose_file_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSE_S", 0.01)
    late = threading.Timer(0.05, mark, (tmp_path, "n1"))
    late.start()
    assert unseen(tmp_path, ["n1"]) == []
    late.join()


ALL = "n0 n1 n2 n3"


@pytest.mark.parametrize(
    ("missed", "failed"),
    [
        ({"n0": "", "n1": "", "n2": "", "n3": ""}, ""),
        ({"n0": "n2", "n1": "n2", "n2": "n0 n1 n3", "n3": "n2"}, "n2"),  # a directory of its own
        ({"n0": "n2", "n1": "n2", "n2": "", "n3": "n2"}, "n2"),  # it writes to another directory
        ({"n0": "n2", "n1": "n2"}, "n2"),  # and has not answered
        ({"n0": "", "n1": "", "n2": "n0 n1 n3", "n3": ""}, "n2"),  # an old cache
        ({"n0": "n2", "n1": "", "n2": "", "n3": ""}, "n0"),
        ({"n0": "n1 n2 n3", "n1": "n0 n2 n3", "n2": "n0 n1 n3", "n3": "n0 n1 n2"}, ALL),
    ],
)
def test_the_node_that_the_others_do_not_see_is_at_fault(
    missed: dict[str, str], failed: str
) -> None:
    found = visible({node: names.split() for node, names in missed.items()}, 4)
    fails = {node for node, each in found.items() if each.severity.value == "fail"}
    assert fails == set(failed.split())
    assert all("--run-dir" in found[node].fix for node in fails)
    blind = {node for node, names in missed.items() if len(names.split()) > 1}
    assert {node for node, each in found.items() if "does not see" in each.text} >= blind


def test_one_of_three_or_two_nodes_has_a_directory_of_its_own() -> None:
    found = visible({"n0": ["n2"], "n1": ["n2"], "n2": ["n0", "n1"]}, 3)
    assert [each.severity.value for each in found.values()] == ["ok", "ok", "fail"]
    assert found["n2"].text == "it does not see what n[0-1] wrote in the directory of the runs"
    found = visible({"n0": ["n1"], "n1": ["n0"]}, 2)
    assert [each.severity.value for each in found.values()] == ["fail", "fail"]
