"""Make run directories as 1,000 nodes of 8 ranks leave them, in the format of the agents.

All nodes print the same text, except for times and ranks: it is made once, with a placeholder
byte for each digit that differs, and translated for each node.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterrun.config.choices import Cluster
from clusterrun.logformat.symptoms import Classifier
from clusterrun.rundir import record as records
from clusterrun.rundir.attempt import amend_attempt
from clusterrun.rundir.paths import RunPaths
from clusterrun.rundir.record import JobRecord
from clusterrun.shared.state import JobId

FORMAT = 3  # of the corpus: one of another format is replaced
JOBS = "jobs-"  # directories of runs that were interrupted
RANKS = 8
STEP_S = 6
MOST_NODES = 1250  # ranks have four digits

# Bytes that are neither in the text nor in UTF-8 stand for digits that differ between nodes.
_FREE = [b for b in range(1, 256) if (b < 32 and b not in b"\t\n\r\x1b") or b in (0xC0, 0xC1)]
_FREE += range(0xF5, 0x100)
_RANK = [bytes(_FREE[4 * rank : 4 * rank + 4]) for rank in range(RANKS)]
_JITTER = bytes(_FREE[32:36])
_NODE = bytes(_FREE[36:40])


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A run of many nodes that has failed; times in epoch seconds."""

    run_dir: str
    nodes: int
    size_bytes: int
    lines: int
    begin: int
    end: int

    @property
    def files(self) -> list[str]:
        """The logs of all nodes."""
        paths = RunPaths(root=Path(self.run_dir))
        return [str(paths.log(1, node_name(n))) for n in range(self.nodes)]


def node_name(number: int) -> str:
    return f"node{number:04}"


def find_or_make(directory: Path, name: str, *, nodes: int, size_bytes: int) -> Corpus:
    """Return the corpus that an earlier run left in the directory, or make it.

    Raises SystemExit if the disk is too small.
    """
    told = directory / f"{name}.json"
    wanted = {"format": FORMAT, "nodes": nodes, "size_bytes": size_bytes}
    if told.exists():
        data = json.loads(told.read_text())
        if data.get("wanted") == wanted:
            return Corpus(**data["made"])
        told.unlink()
    root = directory / "runs" / name
    shutil.rmtree(root, ignore_errors=True)
    _check_space(directory, size_bytes)
    corpus = _make(root / "1121-103252-k3fq", nodes=nodes, size_bytes=size_bytes)
    told.write_text(json.dumps({"wanted": wanted, "made": asdict(corpus)}))
    return corpus


def _check_space(directory: Path, size_bytes: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    need, free = int(size_bytes * 1.1) + (64 << 20), shutil.disk_usage(directory).free
    if need > free:
        sys.exit(
            f"error: the corpus needs {need / 1e9:.1f} GB and {directory} has {free / 1e9:.1f} GB "
            "free; name another --dir, or a smaller --scale"
        )


def _make(root: Path, *, nodes: int, size_bytes: int) -> Corpus:
    if not 1 <= nodes <= MOST_NODES:
        sys.exit(f"error: the corpus has 1 to {MOST_NODES} nodes")
    end = int(time.time())
    paths = RunPaths(root=root)
    text = _Text(node_bytes=size_bytes // nodes, nodes=nodes, end=end)
    _write_run(paths, nodes=nodes, end=end)
    size, lines = 0, 0
    for number in range(nodes):
        node = text.node(number)
        stem = paths.log(1, node_name(number))
        stem.write_bytes(node.log)
        stem.with_suffix(".err").write_bytes(node.errors)
        size, lines = size + len(node.log), lines + node.lines
    return Corpus(
        run_dir=str(root), nodes=nodes, size_bytes=size, lines=lines, begin=text.begin, end=end
    )


def _write_run(paths: RunPaths, *, nodes: int, end: int) -> None:
    """Write the files that the command needs in addition to the logs."""
    for directory in (paths.log(1, "any").parent, paths.attempt(1), paths.events_dir):
        directory.mkdir(parents=True)
    amend_attempt(paths, 1, nodes=tuple(map(node_name, range(nodes))), procs_per_node=RANKS)
    over = {"schema": "clusterrun.end/1", "state": "FAILED", "exit_code": 1, "ended_at": end}
    paths.end.write_text(json.dumps(over))
    record = JobRecord(
        job_id=JobId("L1"),
        cluster=Cluster.LOCAL,
        slurm_cluster=None,
        name=paths.root.parent.name,
        run_id=paths.root.name,
        run_dir=str(paths.root),
        submitted_at=end - 60.0,
        argv=(),
        nodes=nodes,
        procs_per_node=RANKS,
        gpus_per_node=RANKS,
        world_size=nodes * RANKS,
        strategy="ddp",
        device="cpu",
        workdir=str(paths.root),
        time_minutes=0,
        versions={},
        user="me",
    )
    records.write(record)
    records.link_job(paths, record.job_id)


# The text


@dataclass(frozen=True, kw_only=True)
class _Node:
    log: bytes
    errors: bytes
    lines: int


class _Text:
    """The text of all nodes, with placeholders."""

    def __init__(self, *, node_bytes: int, nodes: int, end: int) -> None:
        group = len(_text(_step(0, end)))
        steps = max(node_bytes // group, 1)
        self.begin = end - (steps + 2) * STEP_S
        groups = [_start(self.begin)]
        groups += [_step(n, self.begin + (n + 1) * STEP_S) for n in range(steps)]
        self._common = [line for group in groups for line in group]
        self._root = nodes * 6 // 10
        self._end = end
        self._masters: dict[bool, tuple[list[bytes], bytes]] = {}
        self._sides: dict[tuple[bool, tuple[int, ...]], bytes] = {}

    def node(self, number: int) -> _Node:
        """Return the files of one node."""
        is_root = number == self._root
        lines, master = self._master(is_root=is_root)
        table, left_out = _digits(number)
        log = master.translate(table, left_out)
        widths = tuple(len(str(RANKS * number + rank)) for rank in range(RANKS))
        side = self._sides.get((is_root, widths))
        if side is None:
            side = self._sides[is_root, widths] = _side(lines, log)
        return _Node(log=log, errors=side.translate(table, left_out), lines=len(lines))

    def _master(self, *, is_root: bool) -> tuple[list[bytes], bytes]:
        if is_root not in self._masters:
            lines = self._common + _failure(self._end - 3, is_root=is_root)
            self._masters[is_root] = lines, _text(lines)
        return self._masters[is_root]


def _digits(number: int) -> tuple[bytes, bytes]:
    """Return each placeholder's digit on a node, and those without one."""
    jitter = number * 7919 % 10_000
    table, left_out = bytearray(range(256)), bytearray()
    fixed = [(_JITTER, f"{jitter:04}"), (_NODE, f"{number:04}")]
    for local_rank, places in enumerate(_RANK):
        rank = str(RANKS * number + local_rank)
        left_out += places[: 4 - len(rank)]
        fixed.append((places[4 - len(rank) :], rank))
    for places, digits in fixed:
        for place, digit in zip(places, digits.encode(), strict=True):
            table[place] = digit
    return bytes(table), bytes(left_out)


def _side(lines: list[bytes], log: bytes) -> bytes:
    """Make the side file of errors of a text, as a node writes it, with placeholders."""
    errors: list[bytes] = []
    classifier = Classifier()
    offset = 0
    for line, real in zip(lines, log.split(b"\n")[:-1], strict=True):
        if kind := _kind(classifier, real):
            *head, text = line.split(b" ", 3)
            errors.append(b" ".join([*head, kind, b"%d" % offset, text]))
        offset += len(real) + 1
    return b"".join(errors)


def _kind(classifier: Classifier, line: bytes) -> bytes:
    """Return the class of a line in the side file; empty if it is not there."""
    _, rank, stream, text = line.split(b" ", 3)
    if rank == b"-":
        return b"-"
    return classifier.classify((rank, stream.lower()), text).encode()


def _text(lines: list[bytes]) -> bytes:
    return b"".join(lines)


def _line(second: int, place: int, who: int | None, stream: str, text: str) -> bytes:
    """Write a line; `place` orders the lines of a second."""
    rank = b"-" if who is None else _RANK[who]
    head = f"{second}{place:02}".encode() + _JITTER + b" " + rank + f" {stream} ".encode()
    return head + text.encode().replace(b"@@@@", _NODE) + b"\n"


def _start(second: int) -> list[bytes]:
    return [
        _line(second, 0, None, "a", "1000 nodes x 8 ranks meet at node0000:29500 over ib0"),
        *(_line(second, 1 + rank, rank, "e", WARNING) for rank in range(RANKS)),
        *(_line(second, 20 + rank, rank, "o", BANNER) for rank in range(RANKS)),
    ]


def _step(step: int, second: int) -> list[bytes]:
    """Return what all ranks of a node print in one step."""
    lines = [_line(second, rank, rank, "o", _measures(step, rank)) for rank in range(RANKS)]
    if step % 10 == 0:
        lines.append(_line(second, 30, 0, "E", f"\r{step % 1000 / 10:3.0f}%|{_bar(step):10}| it/s"))
    if step % 50 == 49:
        lines += [_line(second, 40 + rank, rank, "e", WARNING) for rank in range(RANKS)]
    return lines


def _measures(step: int, rank: int) -> str:
    """Give each rank its own loss, or the reader would fold the lines."""
    loss, speed = 10.8 / (1 + step / 400), 7200 + (step * 37 + rank * 11) % 400
    loss_digits = f"{loss:5.2f}{rank}@@@@"
    return f"step {step:06} | loss {loss_digits} | lr 2.900e-05 | {speed} tok/s/gpu | mem 61.2 GiB"


def _bar(step: int) -> str:
    return "█" * (step % 1000 // 100)


WARNING = (
    "/opt/train/lib/python3.11/site-packages/torch/utils/checkpoint.py:429: UserWarning: "
    "the use_reentrant parameter should be passed explicitly."
)
BANNER = "***** Running training on node@@@@: 1,200,000 samples, 46,880 steps, micro-batch 4 *****"
ROOT = """Traceback (most recent call last):
  File "/home/me/train.py", line 412, in <module>
    main()
  File "/home/me/train.py", line 371, in main
    loss = model(**batch).loss
  File "/opt/train/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward
    return F.linear(input, self.weight, self.bias)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3 has 79.15 GiB."""
CASCADE = """Traceback (most recent call last):
  File "/home/me/train.py", line 412, in <module>
    main()
  File "/home/me/train.py", line 375, in main
    dist.all_reduce(norm)
torch.distributed.DistBackendError: NCCL error: remote process exited or a network error"""


def _failure(second: int, *, is_root: bool) -> list[bytes]:
    """Return the lines when one rank runs out of memory and the others lose it."""
    lines = []
    if is_root:
        lines += [_line(second, n, 3, "e", text) for n, text in enumerate(ROOT.splitlines())]
    told = CASCADE.splitlines()
    for rank in range(RANKS):
        if not (is_root and rank == 3):
            places = enumerate(told, start=rank * len(told))
            lines += [_line(second + 2, place, rank, "e", text) for place, text in places]
    lines.append(_line(second + 3, 0, None, "a", "a rank failed on another node; leaving"))
    lines.append(_line(second + 3, 1, None, "z", "1 the job failed"))
    return lines


# The same run in another tool's files


def find_or_make_replicas(directory: Path, corpus: Corpus) -> Path:
    """Write one file per rank without stamps, named as torchx does on Slurm."""
    target = directory / "replicas" / Path(corpus.run_dir).parent.name
    done = target / "done"
    if done.exists() and done.read_text() == corpus.run_dir + str(corpus.end):
        return target
    shutil.rmtree(target, ignore_errors=True)
    _check_space(directory, corpus.size_bytes)
    target.mkdir(parents=True)
    for file in corpus.files:
        for rank, text in _by_rank(Path(file)):
            (target / f"slurm-1-train-{rank}.err").write_bytes(text)
    done.write_text(corpus.run_dir + str(corpus.end))
    return target


def _by_rank(path: Path) -> Iterator[tuple[int, bytes]]:
    texts: dict[bytes, list[bytes]] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        _, rank, stream, text = line.split(b" ", 3)
        texts.setdefault(rank, []).append(text + b"\n" if stream.islower() else text)
    for rank, parts in texts.items():
        if rank != b"-":
            yield int(rank), b"".join(parts)


def remove(directory: Path) -> None:
    """Remove everything made in a directory, and the directory if it is then empty."""
    for part in (directory / "runs", directory / "replicas", *directory.glob(f"{JOBS}*")):
        shutil.rmtree(part, ignore_errors=True)
    for told in directory.glob("*.json"):
        told.unlink()
    if directory.exists() and not os.listdir(directory):
        directory.rmdir()
