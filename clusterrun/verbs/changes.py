"""The configuration to resume a run with: its old one and the command line's changes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.backends.environment import working_directory
from clusterrun.backends.evidence import bad_nodes
from clusterrun.config.choices import Strategy
from clusterrun.config.load import Given, load_again
from clusterrun.config.parallel import FIELDS
from clusterrun.config.settings import Resolved
from clusterrun.errors import ClusterrunError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir.record import JobRecord
from clusterrun.shared import files
from clusterrun.shared.checkpoint_files import Checkpoint
from clusterrun.shared.hostlist import fold_hosts, parse_hostlist

_SIZES = tuple(f"launch.{field}" for field in FIELDS.values())


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting before and after; None if it is unset."""

    key: str
    old: str | None
    new: str | None


@dataclass(frozen=True, kw_only=True)
class Changed:
    """A run's new configuration and its changes; `excluded` are nodes found to be bad."""

    resolved: Resolved
    changes: tuple[Change, ...]
    excluded: tuple[str, ...] = ()


def change(
    record: JobRecord,
    flags: Mapping[str, Any],
    overrides: Sequence[str],
    *,
    exclude_bad: bool = False,
) -> Changed:
    """Read resolved.yaml of a run and apply the command line's settings.

    With `exclude_bad` also exclude the nodes that its outcomes blame.
    Raises UsageError for an invalid value, ClusterrunError if the file is gone.
    """
    frozen = configuration(record)
    new = configuration(record, flags, overrides)
    bad = bad_nodes(record.paths) if exclude_bad and record.cluster.scheduler.can_lose_node else ()
    if bad:
        known = parse_hostlist(new.spec.exclude) if new.spec.exclude else []
        nodes = fold_hosts((*known, *bad))
        flags = {**flags, "exclude": Given(value=nodes, flag="--exclude-bad")}
        new = configuration(record, flags, overrides)
    return Changed(resolved=new, changes=differences(frozen, new), excluded=bad)


def configuration(
    record: JobRecord, flags: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> Resolved:
    """Read the configuration of a run. Raises ClusterrunError if the file is gone."""
    path, project = record.paths.resolved, record.paths.project
    try:
        text = files.read_whole(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterrunError(
            f"cannot read {path}", cause=str(error), hint="start a new run: clusterrun submit"
        ) from error
    return load_again(
        text,
        flags or {},
        shown=str(path),
        environ=os.environ,
        cwd=project if project.is_dir() else Path(record.workdir),
        typed_in=working_directory(os.environ),
        overrides=overrides,
    )


def differences(old: Resolved, new: Resolved) -> tuple[Change, ...]:
    """List the settings that differ, in the order of the fields."""
    before = {row.key: row.text for row in old.rows()}
    after = {row.key: row.text for row in new.rows()}
    return tuple(
        Change(key=key, old=before.get(key), new=after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def refuse_other_world(
    checkpoint: Checkpoint, record: JobRecord, plan: Plan, changes: Sequence[Change] = ()
) -> None:
    """Refuse shards saved by another world, strategy or parallel size. Raises UsageError."""
    sizes = [change for change in changes if change.key in _SIZES]
    if sizes:
        raise UsageError(
            f"{checkpoint.path.name} was saved with {sizes[0].key} {sizes[0].old or 'not set'}",
            hint="keep the parallel sizes, or start over with --from scratch",
        )
    saved_by = str(checkpoint.settings.get("strategy") or record.strategy)
    sharded = {strategy.value for strategy in Strategy if strategy.stage > 0}
    is_same = checkpoint.world_size in (0, plan.world_size) and saved_by == plan.strategy.value
    if is_same or sharded.isdisjoint((saved_by, plan.strategy.value)):  # perhaps the script's own
        return
    raise UsageError(
        f"{checkpoint.path.name} was saved by {checkpoint.world_size} ranks with {saved_by}; its "
        f"shards can't be read by {plan.world_size} with {plan.strategy.value}",
        hint="keep nodes, ranks and strategy, or start over with --from scratch",
    )
