"""Error lines are found and named, and nothing else is."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.logformat.symptoms import Classifier, may_hold_errors

# What real runs died with (public post-mortems and issue threads), and what programs say of errors.
NAMED = {
    "severe": [
        "RuntimeError: CUDA error: out of memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 55.88 GiB.",
        "[rank3]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "Killed",
        "srun: error: node3: task 12: Killed",
        "./run.sh: line 12: 4711 Killed                  python train.py",
        "RuntimeError: DataLoader worker (pid 41) is killed by signal: Killed.",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks",
        "srun: error: node3: task 0: Out Of Memory",
        "[1234.5] Out of memory: Killed process 123 (python) total-vm:1kB",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        "MemoryError",
        "r11i6n2:486514:486651 [1] include/socket.h:403 NCCL WARN Connect to 10.1.2.3<5> failed",
        "node-2:5776:5902 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer",
        "nid006365:180142:180163 [0] net.cc:626 NCCL WARN Error: network AWS Libfabric not found.",
        "ncclSystemError: System call (socket, malloc, munmap, etc) failed.",
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:825, unhandled system error",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=",
        " - [0] Timeout at collective: ALLREDUCE, #3",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275",
        "[rank0]:[E816 10:11:12.1 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective",
        "RuntimeError: NCCL communicator was aborted on rank 149.",
        "RuntimeError: transform: cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
        "[default3]:  what():  CUDA error: unknown error",
        "RuntimeError: CUDA error: device-side assert triggered",
        "/pytorch/Indexing.cu:1 block: [0,0,0], thread: [1,0,0] Assertion `i < n` failed.",
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping",
        "ip-26 kernel: [680111.6] NVRM: Xid (PCI:0000:10:1c): 64, pid=1850, Row Remapper",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`, error",
        "640: [nid007306:244443:0:244443] Caught signal 11 (Segmentation fault: address not mapped",
        "srun: error: nid007306: task 640: Segmentation fault",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient",
        "RuntimeError: DataLoader worker (pid 30882) is killed by signal: Bus error.",
        "terminate called after throwing an instance of 'c10::CUDAError'",
        "Fatal Python error: Segmentation fault",
        "Aborted (core dumped)",
        "Aborted",
        "traceback : Signal 6 (SIGABRT) received by PID 4711",
    ],
    "error": [
        "srun: error: Unable to create step for job 1930: Invalid generic resource specification",
        "slurmstepd: error: *** STEP 1943824.0 ON iam17 CANCELLED AT 2023-03-06T03:17:51 DUE",
        "0: slurmstepd: error: pyxis: couldn't start container",
        "error: cannot open the file",
        "error: rank 3 on node18: killed by SIGKILL",
        "clusterrun: error: the world contract is broken: 2 ranks are on one GPU",
        "Error: Failed to suspend process",
        "fatal: not a git repository",
        "main.cu(12): error: identifier is undefined",
        "make: *** [Makefile:3: all] Error 2",
        "RuntimeError: shapes do not fit",
        "[rank7]: ValueError: no such column",
        "KeyError: 3",
        "\x1b[31mERROR\x1b[0m: no such column",
        "ERROR:root:no such column",
        "CRITICAL:trainer:no such column",
        "2024-01-01 12:00:00,123 - trainer - ERROR - no such column",
        "2024-01-01 12:00:00.123 | ERROR    | trainer:fit:12 - no such column",
        "2024-01-01 12:00:00 ERROR no such column",
        "[2021-08-12 08:19:28,225] [ERROR] [engine.py:22:fit] no such column",
        "[2024-01-01 00:00:00,000] torch.distributed.elastic.multiprocessing.api: [ERROR] failed",
        "E0801 12:00:00.123456 140 trainer.py:12] no such column",
        "wandb: ERROR Run initialization has timed out",
        'time="2024-01-01" level=error msg="no such column"',
        '{"level": "error", "msg": "no such column"}',
        "Exception raised from query at ../aten/src/ATen/cuda/CUDAEvent.h:95",
        "train: main.c:12: main: Assertion `n > 0' failed.",
        " 50%|█████     | 5/10\rValueError: no such column",
    ],
}
ORDINARY = [
    "",
    "step 4118  loss 1.812  lr 2.9e-05  7.2k tok/s/gpu  mem 61.2 GiB",
    " iteration     8738/  159576 | lm loss: 3.317482E+00 | number of nan iterations:   0 |",
    "time (ms) | forward-compute: 29733.63 | backward-params-all-reduce: 27.34",
    "\r 50%|█████     | 500/1000 [00:10<00:10, 49.50it/s, loss=2.1]",
    "{'loss': 2.11, 'grad_norm': 1.2, 'learning_rate': 3e-05, 'epoch': 0.12}",
    "0 errors, 3 warnings",
    "0 errors",
    "no errors found",
    "error_rate=0.1",
    "error_rate: 0.1",
    "eval/error: 0.3",
    "error: 0.31",
    "val error: 0.31",
    "epoch 3: error: 0.31, loss: 2.0",
    "MeanAbsoluteError: 0.2",
    "relative error 1e-6",
    "/opt/x/train.py:12: UserWarning: the error of this estimate is large",
    "a.py:3: FutureWarning: `torch.cuda.amp` raises RuntimeError: soon",
    "a.py:3: DeprecationWarning: CUDA error codes are old",
    "[2021-08-12 08:19:28,225] [WARNING] [engine.py:22:fit] errors: none so far, ERROR: no",
    "WARNING:root:falling back after ValueError: x",
    "writing /data/run/error/logs.txt and /data/errors/ERROR.txt",
    "loading checkpoint from /scratch/Error: none/ckpt",
    "set the log level to ERROR",
    "NCCL_DEBUG=WARN NCCL_ASYNC_ERROR_HANDLING=1 level=info",
    "node:1:2 [0] NCCL INFO comm 0x1 rank 30 nranks 64 - Init COMPLETE",
    "Killing subprocess 4946",
    "Main process received SIGTERM, exiting",
    "srun: Job step aborted: Waiting up to 62 seconds for job step to finish.",
    "allocated memory 3.2 GiB of memory, max 5",
    "Epoch 3 done",
    "[Epoch 3] done",
    "exceptional results",
    "loss of signal in channel 3",
]
_CASES = [(kind, line) for kind, lines in NAMED.items() for line in lines]


def kind_of(line: str) -> str:
    return Classifier().classify(0, line.encode())


def test_error_lines_are_named_and_found_among_ordinary_ones() -> None:
    block = "step 12 loss 2.5\n" * 3000
    for kind, line in _CASES:
        assert (kind_of(line), line) == (kind, line)
        assert may_hold_errors(f"{block}{line}\n{block}".encode()), line


def test_an_ordinary_line_has_no_kind() -> None:
    assert [line for line in ORDINARY if kind_of(line)] == []
    lines = "step 12 loss 2.5 lr 3e-5\nEpoch 3\n\r 50%|███| 5/10 [00:10<00:10]\n[INFO] saved\n"
    assert not may_hold_errors(lines.encode() * 1000)


def kinds(text: str) -> list[str]:
    classifier = Classifier()
    return [classifier.classify(0, line.encode()) for line in text.split("\n")]


@pytest.mark.parametrize("prefix", ["", "[rank3]: ", "[default3]:", "12: ", "(W pid=3, ip=1.2) "])
def test_a_traceback_goes_to_what_was_raised(prefix: str) -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/a/train.py", line 12, in <module>',
        "    loss = net(x)",
        "           ^^^^^^",
        "my.own.Failure: shapes do not fit",
        "and here is more of it",
    ]
    expected = ["traceback"] * 4 + ["exception", ""]
    assert kinds("\n".join(prefix + line for line in lines)) == expected


def test_chained_exceptions_are_named_to_the_end() -> None:
    text = """Traceback (most recent call last):
  File "a.py", line 1
KeyError: 1

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3
RuntimeError: CUDA out of memory"""
    first = ["traceback", "traceback", "exception", ""]
    assert kinds(text) == [*first, "traceback", "", "traceback", "traceback", "severe"]


def test_sources_have_tracebacks_of_their_own() -> None:
    classifier = Classifier()
    classifier.classify("a", b"Traceback (most recent call last):")
    assert classifier.is_in_traceback("a")
    assert not classifier.is_in_traceback("b")
    assert classifier.classify("b", b"  indented") == ""
    assert classifier.classify("a", b"  indented") == "traceback"


@given(st.lists(st.binary(max_size=60)))
def test_any_bytes_can_be_classified(lines: list[bytes]) -> None:
    classifier = Classifier()
    known = {*NAMED, "", "traceback", "exception"}
    assert {classifier.classify(0, line) for line in lines} <= known


@given(st.from_regex(r"(step|epoch) [0-9]{1,6} ([a-z/_]{1,12}[=:] ?[0-9]{1,3}\.[0-9]{1,5} ?){1,5}"))
def test_a_line_of_metrics_is_no_error(line: str) -> None:
    assert kind_of(line.replace("\n", "")) == ""


def test_a_line_of_glog_behind_a_prefix_or_a_stamp_is_found_in_a_block() -> None:
    line = "E0801 12:00:00.123456 140 trainer.py:12] no such column"
    for prefix in ("[rank0]: ", "[default3]:", "1700000000000000 3 e "):
        assert may_hold_errors(f"step 12 loss 2.5\n{prefix}{line}\nstep 13\n".encode())
    assert kind_of(f"[rank0]: {line}") == "error"


# Lines that make a pattern try again and again. They would take minutes, so that a bound of some
# seconds says nothing of this machine.
HOSTILE = ["(a pid=", "(a pid=1 pid=1", "[rank0]: ", "*** ", "block: [", "ERROR: ", ":a.A_", "0"]
HOSTILE += [" ", 'File "', "Error", "\x1b[", "1: ", "- ", "task 0,", "\r"]
SECONDS = 5.0


@pytest.mark.parametrize("start", HOSTILE)
def test_a_hostile_line_takes_no_longer_than_others(start: str) -> None:
    since = time.process_time()
    for end in ("0", " pid=1", " ", ""):
        line = (start + (end or start) * (1 << 16))[: 1 << 16]
        kinds(f"Traceback (most recent call last):\n{line}\n{line} Error\nError {line}")
        assert time.process_time() - since < SECONDS
