"""Write, as one rank, what a test can make again byte by byte; needs no torch.

    chatter.py bytes SEED      every kind of bytes, in every way in which a process can write
    chatter.py lines COUNT     lines that carry their rank, stream and number
    chatter.py endless END     lines until it is ended; a later attempt writes 200, then rank 0
                               ends the job with status END
    chatter.py torn VICTIM     the same, the victim's without any newline after a while
    chatter.py burst COUNT     waits for the file `go`, writes lines as fast as it can, then waits
                               for the file `leave`
    chatter.py turns COUNT     ranks take turns, a second apart

How many bytes went to stdout stands in `said/<attempt>-<rank>`, which is right even after SIGKILL;
`said/<attempt>-<rank>.done` holds how many seconds it took.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

LATER_LINES = 200
TORN_AFTER = 50
LINES_AT_ONCE = 500
FILLER = b"the quick brown fox jumps over the lazy dog; " * 3
DESCRIPTORS = {"out": 1, "err": 2}


def line(rank: int, number: int, stream: str = "out") -> bytes:
    """Make a line that tells where it belongs, of a length that differs from the next one's."""
    filler = FILLER[: number * 7919 % 120]
    return b"chatter %d %s %07d %s\n" % (rank, stream.encode(), number, filler)


def lines(rank: int, stream: str, amount: int) -> list[bytes]:
    """Make the lines of one rank and stream; some are longer than what a log takes in one piece."""
    made = [line(rank, number, stream) for number in range(amount)]
    return [
        text[:-1] + b"x" * 100_000 + b"\n" if n % 100 == 57 else text for n, text in enumerate(made)
    ]


def endless(rank: int, *, torn: bool = False) -> Iterator[bytes]:
    """Make lines for ever; torn ones lose their newlines after a while."""
    for number in count():
        text = line(rank, number)
        yield text[:-1] if torn and number >= TORN_AFTER else text


def beginning(rank: int, size: int, *, torn: bool = False) -> bytes:
    """Make the first bytes of what is endless."""
    made = bytearray()
    for text in endless(rank, torn=torn):
        if len(made) >= size:
            break
        made += text
    return bytes(made[:size])


def burst(rank: int, amount: int) -> Iterator[bytes]:
    """Make many lines, many at once."""
    texts = islice(endless(rank), amount)
    while some := b"".join(islice(texts, LINES_AT_ONCE)):
        yield some


class Piece(NamedTuple):
    """One act of writing, and the pause after it."""

    stream: str
    way: str
    data: bytes
    pause_s: float = 0.0


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: rng.randbytes(rng.randrange(5000)),
    lambda rng: rng.randbytes(rng.choice((65_535, 65_536, 65_537, 200_000))).replace(b"\n", b"\0"),
    lambda rng: ("é" * rng.randrange(65_500, 65_600) + "\n").encode(),
    lambda rng: b"\n" * rng.randrange(1, 50),
    lambda rng: b"".join(b"\r%3d%%|%s" % (n, b"#" * n) for n in range(0, 101, 5)) + b"\r\n",
    lambda rng: b"caf\xe9 \xff\xfe \xc3( \xe2\x82\n\0\0\n",
    lambda rng: b"\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\n",
    lambda rng: b"1764000000000000 0 g o 5 lost\n1764000000000000 - z 0 the end\n0 e x\n",
    lambda rng: b"no end in sight",
)


def pieces(seed: int, rank: int) -> list[Piece]:
    """Decide what a rank writes, in which way, and where it takes its time."""
    rng = random.Random(f"{seed}/{rank}")
    made = [Piece(stream, "fd", bytes(range(256)), 0.0) for stream in DESCRIPTORS]
    for number in range(120):
        stream, way = rng.choice(tuple(DESCRIPTORS)), rng.choice(("buffer", "fd", "print", "child"))
        data = (
            b"Zeile \xc3\xa4 \xe7\x81\xab\r\tand on" if way == "print" else rng.choice(KINDS)(rng)
        )
        at = rng.randrange(len(data) + 1) if way != "print" else len(data)
        pause_s = 1.3 if number in (10, 60) else rng.choice((0.0, 0.0, 0.02))
        made += [Piece(stream, way, data[:at], pause_s), Piece(stream, way, data[at:])]
    return made


def written(seed: int, rank: int, stream: str) -> bytes:
    """Make all that a rank writes to one stream."""
    return b"".join(piece.data for piece in pieces(seed, rank) if piece.stream == stream)


def is_of(text: bytes, rank: int, stream: str = "out") -> bool:
    """Say whether a line claims to be of this rank and stream."""
    return text.startswith(b"chatter %d %s " % (rank, stream.encode()))


def difference(read: bytes, expected: bytes) -> str:
    """Say where two texts begin to differ, in words that fit on a page; empty for equal ones."""
    if read == expected:
        return ""
    pairs = enumerate(zip(read, expected, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(read), len(expected)))
    sizes = f"{len(read)} bytes read, {len(expected)} expected, the same up to {at}"
    return f"{sizes}: {read[max(at - 40, 0) : at + 80]!r} for {expected[at : at + 80]!r}"


class Rank:
    """This process, as a writer that keeps account."""

    def __init__(self) -> None:
        self.number = int(os.environ.get("RANK", "0"))
        self.attempt = int(os.environ.get("CLUSTERRUN_ATTEMPT", "1"))
        self._home = Path(__file__).resolve().parent
        (self._home / "said").mkdir(exist_ok=True)
        self._account = os.open(self._name(""), os.O_WRONLY | os.O_CREAT, 0o600)
        self._written = 0

    def _name(self, ending: str, rank: int | None = None) -> Path:
        number = self.number if rank is None else rank
        return self._home / "said" / f"{self.attempt}-{number}{ending}"

    def write(self, data: bytes, stream: str = "out") -> None:
        """Write to the descriptor, and count what goes to stdout."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(DESCRIPTORS[stream], rest) :]
        if stream == "out":
            self._written += len(data)
            os.pwrite(self._account, struct.pack("<Q", self._written), 0)

    def done(self, took_s: float) -> None:
        """Leave word that everything was written."""
        temporary = self._name(".tmp")
        temporary.write_text(f"{took_s:.3f}")
        temporary.rename(self._name(".done"))

    def wait_for_others(self) -> None:
        """Wait until every rank of this attempt has left word."""
        for other in range(int(os.environ.get("WORLD_SIZE", "1"))):
            while not self._name(".done", other).exists():
                time.sleep(0.05)

    def wait_for(self, name: str) -> None:
        """Wait for a file that the test makes."""
        while not (self._home / name).exists():
            time.sleep(0.02)

    def take_turns(self, amount: int) -> None:
        """Write the lines that are this rank's turn, each a second after the one before."""
        size = int(os.environ["WORLD_SIZE"])
        for number in range(amount):
            if number % size == self.number:
                if number:
                    self.wait_for(f"said/turn-{number - 1}")
                time.sleep(1)
                self.write(line(self.number, number))
                (self._home / "said" / f"turn-{number}").touch()

    def act(self, piece: Piece) -> None:
        """Write a piece in its own way."""
        descriptor = DESCRIPTORS[piece.stream]
        file = sys.stdout if piece.stream == "out" else sys.stderr
        match piece.way:
            case "fd":
                self.write(piece.data, piece.stream)
            case "buffer":
                file.buffer.write(piece.data)
                file.buffer.flush()
            case "print":
                print(piece.data.decode(), end="", file=file, flush=True)
            case _:
                subprocess.run(["cat"], input=piece.data, stdout=descriptor, check=True)
        time.sleep(piece.pause_s)


def main(mode: str, argument: int) -> None:
    rank, since = Rank(), time.monotonic()
    if mode == "bytes":
        for piece in pieces(argument, rank.number):
            rank.act(piece)
    elif mode == "lines":
        both = zip(*(lines(rank.number, stream, argument) for stream in DESCRIPTORS), strict=True)
        for out, err in both:
            rank.write(out, "out")
            rank.write(err, "err")
    elif mode == "turns":
        rank.take_turns(argument)
    elif mode == "burst":
        rank.wait_for("go")
        since = time.monotonic()
        for some in burst(rank.number, argument):
            rank.write(some)
        rank.done(time.monotonic() - since)
        rank.wait_for("leave")
    elif mode == "endless" and rank.attempt > 1:
        for text in islice(endless(rank.number), LATER_LINES):
            rank.write(text)
        rank.done(time.monotonic() - since)
        if rank.number == 0 and argument:
            rank.wait_for_others()
            sys.exit(argument)
    else:
        for text in endless(rank.number, torn=mode == "torn" and rank.number == argument):
            rank.write(text)
            time.sleep(0.005)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
