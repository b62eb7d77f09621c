"""A build that was killed keeps no other waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import builds


def test_the_lock_of_a_build_is_removed_once_nobody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    held, left = tmp_path / "held" / "lock", tmp_path / "left" / "lock"
    for lock in (held, left):
        lock.parent.mkdir()
        lock.touch()
    with held.open():
        builds.remove_abandoned_locks()
        assert (held.exists(), left.exists()) == (True, False)
    builds.remove_abandoned_locks()
    assert not held.exists()
