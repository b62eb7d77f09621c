"""The command line of the test cluster; runs as root."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster import packages
from tests.cluster.cluster import Cluster
from tests.cluster.newer import NewerSlurm
from tests.cluster.shape import Shape, default_state_dir, own_slot
from tests.namespaces import ClusterError


def _install(_: Shape) -> int:
    if packages.missing_programs(packages.ALL):
        _need_root()
    asked = packages.install()
    newer = NewerSlurm.default()
    if newer.install():
        asked.append(str(newer.prefix))
    print(f"installed {' '.join(asked)}" if asked else "everything is installed")
    return 0


def _up(shape: Shape) -> int:
    _need_root()
    begin = time.monotonic()
    if Cluster(shape=shape).up():
        print(f"{shape.nodes} nodes up in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    else:
        print("already up", file=sys.stderr)
    print(f"export SLURM_CONF={shape.slurm_conf}")
    if shape.newer:
        print(f"export PATH={shape.newer.programs}:$PATH")
    print(NEXT)
    return 0


def _down(shape: Shape) -> int:
    _need_root()
    (Cluster.existing(shape.state_dir) or Cluster(shape=shape)).down()
    return 0


def _need_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("the test cluster needs root")


# The last line of `up`, a comment to the shell that evaluates them.
NEXT = '# to use it in this shell: eval "$(python -m tests.cluster up)"; then: sinfo'

VERBS: dict[str, Callable[[Shape], int]] = {"install": _install, "up": _up, "down": _down}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus-per-node", type=int, default=4)
    parser.add_argument("--cpus-per-node", type=int, default=64)
    parser.add_argument("--no-accounting", dest="accounting", action="store_false")
    newer = NewerSlurm.default().prefix
    parser.add_argument("--newer-slurm", action="store_const", const=newer, help="Slurm 24.11")
    parser.add_argument(
        "--slot", type=int, default=own_slot(), help="another: another cluster beside"
    )
    parser.add_argument("--state-dir", type=Path, help="default: $CLUSTERRUN_CLUSTER_DIR or /tmp")
    return parser


def main() -> int:
    """Run one verb; return the exit status."""
    asked = vars(_parser().parse_args())
    verb = VERBS[asked.pop("verb")]
    asked["state_dir"] = (asked["state_dir"] or default_state_dir(asked["slot"])).absolute()
    try:
        return verb(Shape(**asked))
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
