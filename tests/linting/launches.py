"""Jobs that scripts without a pitfall are checked for."""

from __future__ import annotations

from clusterrun.linting.rule import Launch

LAUNCHES = {
    "ddp": Launch(nodes=2, ranks_per_node=4),
    "zero3": Launch(nodes=2, ranks_per_node=4, strategy="zero3"),
    "fsdp": Launch(nodes=2, ranks_per_node=8, strategy="fsdp", max_restarts=3),
    "cpu": Launch(nodes=4, ranks_per_node=2, has_gpus=False),
}
