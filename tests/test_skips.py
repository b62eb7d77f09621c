"""Where everything is required, as in CI, a skip is a failure, unless only a GPU is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import builds
from tests.checkout import ROOT
from tests.namespaces import run

TESTS = {
    "test_module.py": "import pytest\npytest.importorskip('no_such_package')\n",
    "test_function.py": "import pytest\ndef test_it(): pytest.importorskip('no_such_package')\n"
    "@pytest.mark.gpu\ndef test_gpu(): pytest.skip('no GPU')\n",
}


@pytest.mark.parametrize(
    ("required", "outcome"), [("", "3 skipped"), ("1", "1 failed, 1 skipped, 1 error")]
)
def test_a_skip_is_a_failure_where_all_is_required(
    tmp_path: Path, required: str, outcome: str
) -> None:
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    words = ["-q", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    argv = [*words, "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    env = {"PYTHONPATH": str(ROOT), "CLUSTERRUN_REQUIRE_ALL": required}
    said = run([sys.executable, "-m", "pytest", *argv], env=env, check=False).stdout
    assert said.splitlines()[-1].startswith(outcome), said
    assert ("CLUSTERRUN_REQUIRE_ALL makes a skip a failure" in said) is bool(required)


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
