"""What is weighed: progress, the end of the training, explanations, strength, then time."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterable, Sequence

import pytest

from clusterrun.diagnosis import scan
from clusterrun.diagnosis.kinds import Certainty, Retry
from clusterrun.diagnosis.lines import read_line
from clusterrun.diagnosis.scan import Scanner
from clusterrun.diagnosis.table import Role, Table, built_in, parse
from clusterrun.diagnosis.weigh import Verdict, verdict_of
from clusterrun.verbs.diagnose import STDIN, diagnose_logs

TABLE = """
- {id: fire, means: Fire., explains: [smoke], signs: ['^FIRE']}
- {id: smoke, means: Smoke., signs: ['^SMOKE']}
- id: killed
  signs: [{text: 'over its limit'}, {text: ' Killed$', role: confirmation}]
- {id: cut, role: either, means: Cut., signs: ['^CUT']}
- {id: gone, role: confirmation, means: Gone., signs: ['^GONE']}
- {id: over, domain: policy, means: Over., explains: [later], signs: ['^OVER']}
- {id: lost, means: Lost., explains: [everything], signs: ['^LOST']}
- {id: starved, means: Starved., explains: [over], signs: ['^STARVED']}
- id: early
  signs:
    - {text: '^OOM', before_steps: true, near: 'barrier'}
- id: late
  signs:
    - {text: '^OOM', unless: 'barrier'}
- {id: noise, role: noise, signs: ['^NOISE', '^NOISE']}
- {id: hit, signs: [{text: '^HIT ', of_victim: true}, '^HITS']}
- {id: user_code_exception, generic: true, means: Bug.}
- {id: loss_nan, role: either, means: NaN.}
- {id: loss_divergence, role: either, means: Diverged.}
- {id: hang_no_timeout, role: either, means: Stuck.}
"""
STEPS = [f"step {n} loss 2.{n}" for n in range(1, 5)]


@pytest.fixture(scope="module")
def table() -> Table:
    """Read the table above."""
    return parse([TABLE])


def verdict(table: Table, lines: Sequence[str]) -> Verdict | None:
    """Return the verdict on a log."""
    scanner = Scanner(table=table)
    for number, text in enumerate(lines, 1):
        scanner.feed(read_line(text, number=number, file=""))
    return verdict_of(scanner)


TRACEBACK = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "KeyError: 3"]


MARKS = {
    "$steps": STEPS,
    "$raised": TRACEBACK,
    "$frames": TRACEBACK[:2],
    "$ranks": [f"[rank{n}]: step 1 loss 2.{n}" for n in range(4)],
    "$box": ["╭─── Traceback (most recent call last) ───╮", "│ /a.py:3 in f │", "╰─╯"],
    "$chained": ["During handling of the above exception, another exception occurred:"],
}
VERDICTS = """\
- (nothing): hello
- (noise is no cause): NOISE
fire (explained, though earlier): SMOKE | FIRE
- (the training went on): FIRE | $steps
fire (other ranks' last steps): FIRE | step 1 loss 2.1 | step 2 loss 2.2
fire (one step): FIRE | step 1 loss 2.1 | step 1 loss 2.1 | step 1 loss 2.1 | step 1 loss 2.1
fire (all ranks' step): FIRE | $ranks
fire (a compilation): FIRE | [0/3] c++ -MMD | [1/3] c++ -MMD | [2/3] c++ -MMD | [3/3] c++ -MMD
- (after the end): $steps | Training completed | FIRE
- (its sums): {'train_runtime': 8.1, 'train_loss': 2.0, 'epoch': 3.0} | FIRE
- (done): $steps | done | FIRE
fire (done with something else): done | FIRE
fire (before another end): Training completed | step 1 loss 2.1 | FIRE
fire (a root is stronger than either): CUT | FIRE
cut (either is stronger than a confirmation): GONE | CUT
gone (a confirmation alone): GONE
fire (it failed before its time was over): FIRE | OVER
over (its end broke the rest): OVER | FIRE
starved (later, but it explains the end): OVER | STARVED
cut (it was stuck when its time was over): CUT | OVER
lost (a lost node explains everything): FIRE | OVER | LOST
user_code_exception (an unknown exception): $raised | CUT
fire (a known message is stronger): $raised | FIRE
user_code_exception (an exception without traceback): KeyError: 3
- (without traceback, before steps): KeyError: 3 | $steps
cut (without traceback, and a known message): KeyError: 3 | CUT
- (a warning with its traceback): WARNING: cannot read the file | $raised
- (it was caught): Could not read: an error, retrying | $raised
- (all of a caught chain): WARNING: Failed to read | $raised |  | $chained |  | $raised
user_code_exception (processes that print at once): $frames | another process | KeyError: 3
user_code_exception (frames alone):   File "a.py", line 3, in f | KeyError: 3
user_code_exception (an odd name): $frames | pkg.errors.Odd: reason
user_code_exception (an exception in a box): $box | KeyError: 3
early (a message whose surroundings fit): $frames | OOMError: in barrier() | CUT
user_code_exception: step 1 loss 2.1 | $frames | OOMError: in barrier()
- (an ignored exception): Exception ignored in: <function f> | $raised
early (near is before): in barrier() | OOM
early (near is after): OOM | in barrier()
- (near, but after a step): step 1 loss 2.1 | in barrier() | OOM
late (unless is absent): OOM
loss_nan (a loss of NaN): step 1 loss 2.0 | step 2 loss nan
- (a NaN that passed): step 1 loss nan | $steps
loss_divergence (a jump): $steps | step 5 loss 7.1 | step 6 loss 7.3
- (a noisy loss): step 1 loss 0.5 | step 2 loss 0.9 | step 3 loss 0.6
hang_no_timeout (silence): [2026-01-01 10:00:00] step 1 loss 2 | [2026-01-01 12:00:00] heartbeat
"""


def test_the_verdict(table: Table) -> None:
    wrong = []
    for row in VERDICTS.splitlines():
        name, _, log = row.partition(": ")
        texts = [text for part in log.split(" | ") for text in MARKS.get(part, [part])]
        found = verdict(table, texts)
        is_right = (found.cause.id if found else "-") == name.partition(" ")[0]
        wrong += [] if is_right else [(row, found)]
    assert not wrong


def test_what_a_verdict_holds(table: Table) -> None:
    found = verdict(
        table,
        [
            "[rank2]: FIRE one",
            "[rank5]: FIRE two",
            "[rank1]: SMOKE",
            "srun: error: node7: task 2: SMOKE",
            "NOISE",
        ],
    )
    assert found is not None
    assert (found.ranks, found.status) == ((2, 5), Certainty.ESTABLISHED)
    assert [each.line.text for each in found.evidence] == ["FIRE one", "FIRE two"]
    assert [(each.cause.id, each.count, each.ranks) for each in found.consequences] == [
        ("smoke", 1, (1,))
    ]


def test_an_exception_may_show_that_another_try_fails_too() -> None:
    table = {
        "ModuleNotFoundError: No module named 'flash_attn'": Retry.NO,
        "TypeError: f() got an unexpected keyword argument 'x'": Retry.NO,
        "AttributeError: 'NoneType' object has no attribute 'json'": Retry.MAYBE,
        "TypeError: 'NoneType' object is not subscriptable": Retry.MAYBE,
        "KeyError: 3": Retry.MAYBE,
    }
    for text, retry in table.items():
        found = verdict(built_in(), [*TRACEBACK[:2], text])
        assert found is not None
        assert found.retry is retry, text


def test_what_all_ranks_raise_at_one_line_they_raise_again() -> None:
    table = (  # ranks that raise, that print, at which line
        ((0, 1), (0, 1), (3, 3), Retry.NO),
        ((0, 1), (0, 1, 2), (3, 3), Retry.MAYBE),
        ((0, 1), (0, 1), (3, 4), Retry.MAYBE),
        ((0,), (0,), (3,), Retry.MAYBE),
    )
    for raising, printing, line, retry in table:
        lines = [f"[rank{rank}]: hello" for rank in printing]
        for rank, number in zip(raising, line, strict=True):
            texts = (TRACEBACK[0], f'  File "a.py", line {number}, in f', f"KeyError: {rank}")
            lines += [f"[rank{rank}]: {text}" for text in texts]
        found = verdict(built_in(), lines)
        assert found is not None
        assert found.retry is retry, (raising, printing, line)


def test_weaker_signs_blame_no_other_node(table: Table) -> None:
    killed = [f"srun: error: n{number}: task {number - 1}: Killed" for number in (1, 2)]
    for lines, nodes in (
        (["slurmstepd-n2: error: over its limit", *killed], ("n2",)),
        (["slurmstepd: error: over its limit", *killed], ()),
        (["over its limit", killed[1]], ("n2",)),
        (killed, ("n1", "n2")),
    ):
        found = verdict(table, lines)
        assert found is not None
        assert found.nodes == nodes, lines
        assert {each.line.node for each in found.evidence} <= {"", *nodes}


def test_an_exception_shows_its_frames_and_only_its_like(table: Table) -> None:
    found = verdict(table, [*TRACEBACK, TRACEBACK[0], '  File "b.py", line 1, in g', "OSError: x"])
    assert found is not None
    assert found.first.frames == ('File "a.py", line 3, in f',)
    assert [each.line.text for each in found.evidence] == ["KeyError: 3"]
    assert found.status is Certainty.LIKELY


def test_all_ranks_are_named_however_many_they_are(table: Table) -> None:
    fires = [f"[rank{rank}]: FIRE" for rank in range(100)]
    raised = [f"[rank{rank}]: {text}" for rank in range(100) for text in TRACEBACK]
    passed = [*fires, *STEPS, "[rank5]: FIRE"]
    for lines, ranks in ((fires, range(100)), (passed, [5]), (raised, range(100))):
        found = verdict(table, lines)
        assert found is not None
        assert found.ranks == tuple(ranks)


def test_the_exception_of_another_process_counts_where_it_was_raised(table: Table) -> None:
    again = [
        "ValueError: Caught KeyError in worker 1.",
        "Original Traceback (most recent call last):",
    ]
    inner = ['  File "data.py", line 8, in get', "KeyError: 5"]
    found = verdict(table, [*TRACEBACK[:2], *again, *inner])
    assert found is not None
    assert (found.first.line.text, found.first.frames) == ("KeyError: 5", (inner[0].strip(),))


def test_the_rank_that_suffers_is_not_blamed(table: Table) -> None:
    many = [f"[rank{n}]: HIT by it" for n in range(3, 99)]  # more than are kept
    for more, ranks in (([], ()), (["[rank2]: HITS another"], (2,)), (many, ())):
        found = verdict(table, ["[rank1]: HIT by another size", *more])
        assert found is not None
        assert (found.cause.id, found.ranks, found.first.line.rank) == ("hit", ranks, 1)


def test_consequences_neither_repeat_nor_contradict(table: Table) -> None:
    logs: dict[str, dict[str, int]] = {
        "FIRE | SMOKE | SMOKE": {"smoke": 2},
        "CUT | GONE": {"gone": 1},  # the cause names no rank
        "[rank1]: CUT | [rank2]: GONE": {"gone": 1},
        "[rank1]: CUT | [rank1]: GONE": {},  # the same end, guessed
        "[rank1]: CUT | GONE": {},
        "FIRE its end is over its limit": {},
    }
    for log, after in logs.items():
        found = verdict(table, log.split(" | "))
        assert found is not None
        assert {each.cause.id: each.count for each in found.consequences} == after, log


def test_numbers_before_a_colon_are_not_remembered_forever(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "_MOST_PROCESSES", 9)
    scanner = Scanner(table=table)
    lines = [*(f"{n}: loss 2.{n}" for n in range(50)), "50: OOM", *(f"{n}: a" for n in range(99))]
    for number, text in enumerate(lines, 1):
        scanner.feed(read_line(text, number=number, file=""))
    assert len(scanner._processes) == 9
    found = verdict_of(scanner)
    assert found is not None
    assert found.cause.id == "late"  # though its surroundings are not complete


def test_a_sign_that_is_in_no_log(table: Table) -> None:
    scanner = Scanner(table=table)
    scanner.add("cut", Role.EITHER, read_line("its state", number=0, file="", rank=4))
    found = verdict_of(scanner)
    assert found is not None
    assert (found.cause.id, found.ranks) == ("cut", (4,))


LAUNCH = "srun: error: Task launch for StepId=4.0 failed on node n7: Unspecified error"
PREFIXES: list[tuple[str, int | None, str, str]] = [  # the rest "" is the whole line
    ("[rank3]: hello", 3, "", "hello"),
    ("[rank3]:[E1123 07:00:00.1 x.cpp:3] hello", 3, "", "[E1123 07:00:00.1 x.cpp:3] hello"),
    ("[default1]:hello", None, "", "hello"),
    ("[1]:hello", None, "", "hello"),
    ("12: hello", 12, "", "hello"),
    ("[1,7]<stderr>:hello", 7, "", "hello"),
    ("(TrainWorker pid=77, ip=10.0.0.1) hello", None, "", "hello"),
    ("2026-01-01 10:00:00,123 hello", None, "", "hello"),
    (f"node7: {TRACEBACK[0]}", None, "node7", TRACEBACK[0]),
    ("n7:1:2 [3] NCCL WARN x", None, "n7", ""),
    (LAUNCH, None, "n7", ""),
    ("slurmstepd-n7: error: full", None, "n7", ""),
    ("slurmstepd: error: *** JOB 4 ON n1 CANCELLED", None, "", ""),
    ("slurmstepd-n1: error: *** JOB 4 ON n1 CANCELLED", None, "", ""),
    ("srun: error: node7: task 3: Killed", None, "node7", ""),
    ("\x1b[31mred\x1b[0m", None, "", "red"),
    ("old\rnew", None, "", "new"),
    ("50%|\r" * 4000 + "srun: error", None, "", "srun: error"),
    ("1767261600000000 5 e hello", 5, "", "hello"),
]


def test_prefixes_are_read() -> None:
    for text, rank, node, rest in PREFIXES:
        line = read_line(text, number=1, file="")
        assert (line.rank, line.node, line.text) == (rank, node, rest or text)


# A log of any size and shape takes a bounded memory


OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
MIB = 1 << 20


class Blocks(io.RawIOBase):
    """A file whose blocks come one by one, as from a pipe."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks, self._rest = iter(blocks), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._rest = self._rest or next(self._blocks, b"")
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


@pytest.mark.parametrize("filler", [b"x", b"10%\r", b"\r", b"\x1b[1m"])
def test_a_line_of_any_length_takes_little_memory(filler: bytes) -> None:
    built_in()  # they stay in memory
    block = (filler * MIB)[:MIB]
    blocks = [*[block] * 16, b"\n", OOM + b"\n", *[block] * 4]
    tracemalloc.start()
    try:
        found = diagnose_logs([STDIN], stdin=io.BufferedReader(Blocks(blocks)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.verdict is not None
    assert found.verdict.cause.id == "cuda_oom"
    assert peak < 4 * MIB
