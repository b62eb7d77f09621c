"""The parser of host lists and rank sets, against Slurm's own where scontrol is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterrun.errors import UsageError
from clusterrun.shared.hostlist import (
    fold_hostlist,
    fold_hosts,
    fold_ranks,
    parse_hostlist,
    parse_ranks,
)
from tests.patience import finished

HOSTS = {  # of each list
    "della-i14g2": "della-i14g2",
    "a[001-003,7]-ib": "a001-ib a002-ib a003-ib a7-ib",
    "r[0-1]n[2-3],login": "r0n2 r0n3 r1n2 r1n3 login",
    "a[9-11]": "a9 a10 a11",
    "a[098-101]": "a098 a099 a100 a101",
    "a[3,1],b2": "a3 a1 b2",
    "a[1][2-3]": "a12 a13",
    "[1-2].cluster.example": "1.cluster.example 2.cluster.example",
    "a1, a2\n": "a1 a2",
}
BAD = {  # why, and where
    "a[1-3": ("'[' is unmatched", 2),
    "a1,b2]": ("']' is unmatched", 6),
    "a[[1]]": ("'[' is unmatched", 2),
    "a[]": ("'' is neither a number nor a range", 3),
    "a[1,,2]": ("'' is neither a number nor a range", 5),
    "a[1,2-]": ("'2-' is neither a number nor a range", 5),
    "a[1-2-3]": ("'1-2-3' is neither a number nor a range", 3),
    "a[٣]": ("'٣' is neither a number nor a range", 3),
    "n1,a[5-3]": ("range '5-3' runs backwards", 6),
    "a[0-99999]": ("more than 65,536 hosts", 3),
    "a[0-999][0-999]": ("more than 65,536 hosts", 9),
    "a[" + "9" * 5000 + "]": ("is neither a number nor a range", 3),
}
FOLDED = {
    "n1 n2 n3 n5": "n[1-3,5]",
    "n09 n10 n099 n100": "n[09-10,099-100]",
    "a1-ib a2-ib": "a[1-2]-ib",
    "r0n0 r0n1 r1n0 r1n1": "r0n[0-1],r1n[0-1]",
    "n1 n1": "n[1,1]",
    "": "",
}
SETS = {
    "n2 n1 n2": "n[1-2]",
    "n10 login n9 n2": "login,n[2,9-10]",
    "r1n0 r0n1 r0n0": "r0n[0-1],r1n0",
    "n" + "9" * 30 + " n1": "n1,n" + "9" * 30,
    "": "",
}
RANKS = {
    "0,8-15": {0, *range(8, 16)},
    "::8": {0, 8, 16, 24},
    "30:": {30, 31},
    ":2, 5": {0, 1, 5},
    "0:9999": set(range(32)),
}
NO_RANKS = {
    "32": "rank 32 does not exist; the ranks are 0-31",
    "0-9000": "rank 9000 does not exist",
    "40:": "selects none",
    "::0": "the step of '::0' is 0",
    "5-3": "run backwards",
    **dict.fromkeys(("", "0,,1", "-1", "0-", "all", "٣", "9" * 5000), "is not a rank"),
}


def refusal(parse: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        parse()
    return caught.value.message


def test_lists_of_every_shape_are_expanded_and_folded() -> None:
    assert {text: " ".join(parse_hostlist(text)) for text in HOSTS} == HOSTS
    assert {text: fold_hostlist(text.split()) for text in FOLDED} == FOLDED
    assert {text: fold_hosts(text.split()) for text in SETS} == SETS


def test_what_cannot_be_read_is_refused_with_its_position() -> None:
    for text, (reason, position) in BAD.items():
        message = refusal(lambda text=text: parse_hostlist(text))  # type: ignore[misc]
        assert message.endswith(f"{reason} at position {position}"), message
    for text in ("", "  ", ",", ", ,"):
        assert "empty" in refusal(lambda text=text: parse_hostlist(text))  # type: ignore[misc]
    for name in ("", "a b", "a,b", "a[1]", "a\n"):
        with pytest.raises(UsageError, match="not a host name"):
            fold_hostlist([name])


_numbers = st.integers(0, 1200).map(str) | st.integers(0, 130).map(lambda n: f"{n:03}")
_names = st.lists(
    st.builds(
        "{}{}{}{}".format,
        st.sampled_from(["n", "gpu-a", "r1-", "1", "é"]),
        _numbers,
        st.sampled_from(["", "-ib", ".example", "x"]),
        st.sampled_from(["", "0", "7"]),
    ),
    min_size=1,
    max_size=40,
)


@given(_names)
def test_parsing_gives_back_what_was_folded(names: list[str]) -> None:
    assert parse_hostlist(fold_hostlist(names)) == names


@given(st.text())
def test_any_text_is_read_or_refused_with_a_usage_error(text: str) -> None:
    try:
        hosts = parse_hostlist(text)
    except UsageError:
        return
    assert hosts
    assert all(hosts)


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give scontrol the least it wants to read before it expands names; no daemon runs."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n"
    )
    return path


# Slurm 22.05 takes no text after a bracket and orders three brackets in a way of its own.
_bracket = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(0, 4)).map(
        lambda r: f"{r[0]:0{r[2]}}-{r[0] + r[1]}" if r[1] else f"{r[0]:0{r[2]}}"
    ),
    min_size=1,
    max_size=3,
).map(lambda ranges: f"[{','.join(ranges)}]")
_item = st.one_of(
    st.sampled_from(["login", "della-i14g2", "n7", "n007"]),
    st.builds("{}{}".format, st.sampled_from(["n", "gpu-a", "a1-"]), _bracket),
    st.builds("r{}n{}".format, _bracket, _bracket),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_item, min_size=1, max_size=3).map(",".join))
def test_hosts_are_those_that_slurm_names(slurm_conf: Path, text: str) -> None:
    env = {**os.environ, "SLURM_CONF": str(slurm_conf)}
    told = finished(["scontrol", "show", "hostnames", text], check=True, env=env).stdout
    assert parse_hostlist(text) == told.split()


def test_sets_of_ranks_are_read_or_refused() -> None:
    assert {text: set(parse_ranks(text, 32)) for text in RANKS} == RANKS
    for text, message in NO_RANKS.items():
        found = refusal(lambda text=text: parse_ranks(text, 32))  # type: ignore[misc]
        assert message in found, found


@given(st.sets(st.integers(0, 9999), min_size=1))
def test_ranks_are_read_back_as_folded(ranks: set[int]) -> None:
    assert parse_ranks(fold_ranks(ranks), 10_000) == ranks
