"""Numbers are said in one way."""

from __future__ import annotations

import doctest

from clusterrun.shared import wording


def test_a_number_stands_with_its_noun() -> None:
    result = doctest.testmod(wording)
    assert result.failed == 0
    assert result.attempted >= 3
    assert wording.count(0, "node") == "0 nodes"
