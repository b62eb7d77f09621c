"""The cells that run hold all pairs of values, and the table has a rule for each that does not."""

from __future__ import annotations

from tests.matrix.cells import ALL, AXES, RULES, Refused, Senseless, Trains, outcome
from tests.matrix.page import PAGE, page
from tests.matrix.pairs import covering, pairs, pairwise


def test_all_pairs_that_can_go_together_occur() -> None:
    chosen = pairwise()
    for kind, others in ((Trains, ()), (Refused, (Trains,))):
        those = [cell for cell in ALL if isinstance(outcome(cell), kind)]
        run = [cell for cell in chosen if isinstance(outcome(cell), (kind, *others))]
        assert pairs(those) <= pairs(run)
    assert not any(isinstance(outcome(cell), Senseless) for cell in chosen)
    assert len(chosen) < len(ALL) / 20
    assert covering(list(ALL), pairs(ALL)) == []


def test_each_rule_names_values_and_decides_some_cell() -> None:
    for rule in RULES:
        assert all(set(values) <= set(AXES[axis]) for axis, values in rule.values.items())
    assert {outcome(cell) for cell in ALL} == {rule.then for rule in RULES} | {Trains()}


def test_the_page_is_what_the_matrix_says() -> None:
    assert page() == PAGE.read_text(), "run python -m tests.matrix.page"
