"""The matrix of matrix.yaml: its cells, and what must come of each."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path

import yaml

DATA = yaml.safe_load(Path(__file__).with_name("matrix.yaml").read_text())


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of script; matrix.yaml says what the fields mean."""

    title: str
    argv: str
    note: str
    runs: str = "unchanged"
    engine: str = ""
    proves: str = ""
    spawns: int = 0
    needs: str = "torch"


@dataclass(frozen=True)
class Cell:
    """One combination of values."""

    kind: str
    strategy: str
    launcher: str
    cluster: str
    world: str

    def __str__(self) -> str:
        return " ".join(astuple(self))

    @property
    def size(self) -> tuple[int, int]:
        """The nodes, and the ranks of each."""
        nodes, ranks = self.world.split("x")
        return int(nodes), int(ranks)


@dataclass(frozen=True)
class Trains:
    """All ranks prove one world and the engine, and the job completes."""


@dataclass(frozen=True)
class Refused:
    """The command ends with a status, a message and a hint."""

    code: int
    message: str
    hint: str


@dataclass(frozen=True)
class Senseless:
    """Nobody runs this."""

    why: str


Outcome = Trains | Refused | Senseless


@dataclass(frozen=True)
class Rule:
    """What comes of the cells that have one of the values on each axis."""

    about: str
    values: dict[str, list[str]]
    then: Outcome


def _rule(about: str, values: dict[str, list[str]], **then: dict[str, str] | str) -> Rule:
    refused = then.get("refused")
    return Rule(about, values, Refused(**refused) if refused else Senseless(then["senseless"]))


KINDS = {name: Kind(**about) for name, about in DATA["kinds"].items()}
RULES = tuple(_rule(**rule) for rule in DATA["rules"])
AXES = {"kind": list(KINDS), **DATA["axes"]}
ALL = tuple(Cell(**dict(zip(AXES, values, strict=True))) for values in product(*AXES.values()))


def outcome(cell: Cell) -> Outcome:
    """Return what must come of a cell."""
    own = asdict(cell)
    fits = (r.then for r in RULES if all(own[axis] in r.values[axis] for axis in r.values))
    return next(fits, Trains())


def proofs(cell: Cell) -> list[str]:
    """Return the lines that the ranks of a cell must print, sorted."""
    kind, (nodes, ranks) = KINDS[cell.kind], cell.size
    world = kind.spawns or nodes * ranks
    sharded = cell.strategy if cell.strategy.startswith("zero") else "ddp" if world > 1 else "alone"
    greeting = None if cell.cluster == "ssh" else "hello"
    more = [kind.proves.format(local=rank % ranks, greeting=greeting) for rank in range(world)]
    return [
        f"PROOF {rank}/{world} sum {2**world - 1} {kind.engine or sharded} {more[rank]}".strip()
        for rank in range(world)
    ]
