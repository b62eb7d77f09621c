"""The division of a job's ranks: the sizes of accelerate's ParallelismConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from clusterrun.config.choices import Strategy

if TYPE_CHECKING:
    from clusterrun.config.spec import JobSpec

# By accelerate's names, in the order of its mesh, except tp, which is innermost.
SIZES: Final[Mapping[str, str]] = {
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "cp": "context",
    "sp": "sequence",
    "tp": "tensor",
}
# The fields of a JobSpec.
FIELDS: Final[Mapping[str, str]] = {
    **{name: f"data_parallel_{name}" for name in ("replicate", "shard")},
    **{name: f"{name}_parallel" for name in ("context", "sequence", "tensor")},
}


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The requested sizes; 0 leaves one to the strategy and the number of ranks."""

    replicate: int = 0
    shard: int = 0
    context: int = 1
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, spec: JobSpec) -> Parallel:
        """Read the sizes of a spec."""
        given = {name: getattr(spec, field) for name, field in FIELDS.items()}
        return cls(**{name: size for name, size in given.items() if size})

    @property
    def model(self) -> int:
        """Return how many ranks work on the same samples."""
        return self.tensor * self.context * self.sequence

    @property
    def total(self) -> int:
        """Return the product of all sizes."""
        return self.replicate * self.shard * self.model

    def data(self, world: int) -> int:
        """Return the data-parallel size: the number of groups of ranks with different samples.

        >>> Parallel(tensor=4, context=2).data(64)
        8
        """
        return max(1, world // self.model)

    def decided(self, strategy: Strategy, *, nodes: int, world: int) -> Parallel:
        """Return all sizes; their product is the world unless they can't multiply to it.

        >>> Parallel(tensor=2).decided(Strategy.FSDP_HYBRID, nodes=2, world=16)
        Parallel(replicate=2, shard=4, context=1, sequence=1, tensor=2)
        """
        data, replicate, shard = self.data(world), self.replicate, self.shard
        if not strategy.stage:
            shard = shard or 1
        elif not shard:
            replicate = replicate or (min(nodes, data) if strategy.is_hybrid else 1)
        shard = shard or max(1, data // replicate)
        replicate = replicate or max(1, data // shard)
        return dataclasses.replace(self, replicate=replicate, shard=shard)
