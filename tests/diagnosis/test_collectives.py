"""Who is to blame in a hang, by generated flight recorder dumps of all ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any

from clusterrun.diagnosis.collectives import Recordings, Stuck, StuckKind, wording

LINES = {"all_reduce": 88, "broadcast": 61}


def entry(number: int, op: str = "all_reduce", **other: Any) -> dict[str, Any]:
    """Return a call, as torch 2.13 dumps it."""
    frames = [
        {"name": op, "filename": "/env/site-packages/torch/distributed/c10d.py", "line": 1},
        {"name": "step", "filename": "/home/me/train.py", "line": LINES.get(op, 5)},
    ]
    return {
        "frames": frames,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"gloo:{op}",
        "time_created_ns": int(time.time() * 1e9),
        "input_sizes": [[7]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "is_p2p": False,
        **other,
    }


def dump(calls: Iterable[dict[str, Any]], ranks: str = "") -> bytes:
    config = {name: {"ranks": ranks} for name in ("0", "1")} if ranks else {}
    return pickle.dumps({"version": "2.10", "entries": list(calls), "pg_config": config})


def history(last: int, *, is_done: bool = False, first: int = 1) -> list[dict[str, Any]]:
    return [*[entry(number) for number in range(first, last)], entry(last, retired=is_done)]


def found(dumps: dict[int, bytes], world: int = 4, waiting: Iterable[int] = ()) -> Stuck | None:
    recordings = Recordings(world, waiting)
    for rank, data in dumps.items():
        assert recordings.add(rank, data)
    return recordings.stuck()


def blamed(stuck: Stuck | None) -> tuple[StuckKind, tuple[int, ...], tuple[int, ...], int]:
    assert stuck is not None
    return stuck.kind, stuck.odd, stuck.waiting, stuck.number


def test_the_rank_that_did_not_enter_is_named_with_its_last_call() -> None:
    dumps = {rank: dump(history(12)) for rank in (0, 1, 3)} | {2: dump(history(11, is_done=True))}
    stuck = found(dumps)
    assert blamed(stuck) == (StuckKind.MISSING, (2,), (0, 1, 3), 12)
    assert stuck is not None
    where = "at /home/me/train.py:88 in step"
    assert wording(stuck) == f"3 ranks wait in all_reduce #12 [[7]] Float {where}"
    assert stuck.others == {2: f"all_reduce #11 [[7]] Float {where}"}


def test_a_missing_dump_is_the_clue_unless_its_stack_waits() -> None:
    dumps = {rank: dump(history(12)) for rank in (0, 1)}
    assert blamed(found(dumps))[:2] == (StuckKind.MISSING, (2, 3))
    assert blamed(found(dumps, waiting=[3]))[:2] == (StuckKind.MISSING, (2,))


def test_a_collective_that_all_entered_blames_nobody() -> None:
    stuck = found({rank: dump(history(12)) for rank in range(4)})
    assert blamed(stuck) == (StuckKind.UNFINISHED, (), (0, 1, 2, 3), 12)
    assert found({rank: dump(history(12, is_done=True)) for rank in range(4)}) is None


def test_the_minority_that_called_something_else_is_odd() -> None:
    others: list[dict[str, Any]] = [{"op": "broadcast"}, {"input_sizes": [[9]]}]
    for other in (*others, {"input_dtypes": ["Half"]}):
        odd = dump([*history(11, is_done=True), entry(12, retired=False, **other)])
        dumps = {rank: dump(history(12)) for rank in (0, 1, 2)} | {3: odd}
        assert blamed(found(dumps)) == (StuckKind.MISMATCH, (3,), (0, 1, 2), 12)
        halves = found({**dumps, 1: odd, 2: odd, 3: dumps[0]})  # that of rank 0 is right
        assert blamed(halves)[1] == (1, 2)


def test_sizes_may_differ_where_torch_allows_it_and_where_training_went_on() -> None:
    uneven = {r: dump([entry(1, "all_to_all", input_sizes=[[r]])]) for r in range(4)}
    assert found(uneven) is None
    old = {r: dump([entry(1, input_sizes=[[r]]), *history(40, first=2)]) for r in range(4)}
    assert blamed(found(old))[0] is StuckKind.UNFINISHED


def test_a_rank_that_waits_in_another_group_is_a_victim() -> None:
    def pair(number: int, **other: Any) -> dict[str, Any]:
        return entry(number, process_group=("1", "tensor_parallel"), **other)

    # Rank 1 waits for rank 0 in the pair; all others wait for both in the world.
    config = {"0": {"ranks": "[0, 1, 2, 3]"}, "1": {"ranks": "[0, 1]"}}
    world = history(11, is_done=True)
    calls = {
        0: [*world, pair(4)],
        1: [*world, pair(4), pair(5, retired=False)],
        **dict.fromkeys((2, 3), history(12)),
    }
    dumps = {r: pickle.dumps({"entries": each, "pg_config": config}) for r, each in calls.items()}
    assert blamed(found(dumps)) == (StuckKind.MISSING, (0,), (1,), 5)


def _pairs(**second: Any) -> dict[int, bytes]:
    """Return two pairs of ranks, of which ranks 1 and 3 do not enter the last collective."""
    config = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[2, 3]"}}

    def calls(group: str, last: int, **other: Any) -> list[dict[str, Any]]:
        about = {"process_group": (group, f"pair {group}")}
        ends = {**about, "retired": False, **other}
        return [*(entry(n, **about) for n in range(1, last)), entry(last, **ends)]

    dumps = {
        0: calls("1", 5, time_created_ns=20 * 10**9),
        1: calls("1", 4, retired=True),
        2: calls("2", 5, time_created_ns=10 * 10**9),
        3: calls("2", 4, retired=True)
        + [entry(5, process_group=("2", "pair 2"), **second)] * bool(second),
    }
    return {r: pickle.dumps({"entries": e, "pg_config": config}) for r, e in dumps.items()}


def test_of_two_groups_the_one_that_waited_first_is_named() -> None:
    stuck = found(_pairs())
    assert blamed(stuck) == (StuckKind.MISSING, (3,), (2,), 5)
    assert stuck is not None
    assert stuck.since == 10.0


def test_a_mismatch_is_clearer_than_a_wait() -> None:
    late = {"time_created_ns": 90 * 10**9, "retired": False}
    assert blamed(found(_pairs(op="broadcast", **late)))[:2] == (StuckKind.MISMATCH, (3,))
    all_entered = found(_pairs(**late))  # in the second pair
    assert blamed(all_entered)[:2] == (StuckKind.MISSING, (1,))


def test_the_parts_of_a_coalesced_call_have_one_number() -> None:
    parts = [entry(1), entry(2), entry(2), entry(3)]
    dumps = {0: dump([*parts, entry(4, retired=False)]), 1: dump(parts)}
    assert blamed(found(dumps, 2)) == (StuckKind.MISSING, (1,), (0,), 4)


def test_a_dump_that_would_execute_code_is_not_read() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return exec, ("raise SystemExit",)

    recordings = Recordings(1)
    assert not recordings.add(0, pickle.dumps({"entries": [Evil()]}))
    assert not recordings.add(0, b"torn")
    assert recordings.stuck() is None
