"""Decide the hosts of a job that runs without a queue, and what starts processes on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from clusterrun.config.choices import Cluster, Starter
from clusterrun.config.hosts import (
    HostList,
    check_distinct,
    parse_hostfile,
    parse_named,
)
from clusterrun.config.spec import JobSpec
from clusterrun.errors import UsageError
from clusterrun.launch.facts import Facts
from clusterrun.shared.host_specs import node_names, parse_host
from clusterrun.shared.hostlist import parse_hostlist
from clusterrun.shared.wording import count

# The variables of schedulers that lead to an allocation's hosts: by a file, by their names, or as a
# sign that FLUX_HOSTS answers.
NODE_FILES: Final = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
FLUX: Final = "FLUX_URI"
SOURCES: Final = (*NODE_FILES, "SLURM_JOB_NODELIST", FLUX)
FLUX_HOSTS: Final = ("flux", "getattr", "hostlist")
# The variable that a job has, and the program that starts processes on its nodes.
_STARTERS: Final = (
    ("LSB_JOBID", Starter.BLAUNCH),
    ("SLURM_JOB_ID", Starter.SRUN),
    (FLUX, Starter.FLUX),
)


def allocation_source(environ: Mapping[str, str]) -> str:
    """Return the first variable that is set. Raises UsageError if none is."""
    found = next(filter(environ.get, SOURCES), None)
    if found is None:
        names = ", ".join(f"${source}" for source in SOURCES)
        raise UsageError(
            f"this shell is in no allocation: none of {names} is set",
            hint="run this inside the allocation, or name its nodes with --hosts or --hostfile",
        )
    return found


def allocation_hosts(source: str, text: str) -> HostList:
    """Return the hosts in the file, the variable or the answer of `source`. Raises UsageError."""
    read = parse_hostfile if source in NODE_FILES else parse_named
    return read(text, shown=f"${source}")


def choose_starter(
    spec: JobSpec, cluster: Cluster, environ: Mapping[str, str], has: Callable[[str], bool]
) -> Starter:
    """Return what starts processes on the hosts; `has` looks for a program.

    Raises UsageError if the starter that was asked for is missing, or can't be used.
    """
    asked = spec.starter
    if cluster.scheduler.outlives_shell and asked not in (Starter.AUTO, Starter.SSH):
        raise UsageError(
            f"starter {asked.value} needs an allocation; --cluster ssh starts with ssh",
            hint="pass --cluster allocation, or drop starter",
        )
    own = [starter for name, starter in _STARTERS if environ.get(name) and has(starter.value)]
    auto = own[0] if own and not cluster.scheduler.outlives_shell else Starter.SSH
    chosen = auto if asked is Starter.AUTO else asked
    if asked is not Starter.AUTO and not has(chosen.value):
        raise UsageError(
            f"{chosen.value} was not found on this machine",
            hint="put it on PATH, or choose another program: --set starter=NAME",
        )
    return chosen


def without_excluded(listed: HostList, exclude: str) -> HostList:
    """Return the list without the hosts that --exclude names. Raises UsageError if none is left."""
    excluded = parse_hostlist(exclude)
    names = zip(node_names(listed.hosts), listed.hosts, listed.slots, strict=True)
    left = [row[1:] for row in names if not {*row[:2], parse_host(row[1]).host} & {*excluded}]
    if not left:
        raise UsageError(f"--exclude {exclude} leaves none of the hosts", hint="list more hosts")
    hosts, slots = zip(*left, strict=True)
    return HostList(hosts=hosts, slots=slots, source=f"{listed.source} without --exclude")


def check_hosts(spec: JobSpec, facts: Facts) -> tuple[str, ...]:
    """Refuse hosts that can't be used as requested; return notes on settings without effect.

    Raises UsageError.
    """
    if not facts.cluster.scheduler.has_hosts:
        place = facts.cluster.scheduler.title
        given = "--hosts" if spec.hosts else "--hostfile" if spec.hostfile else ""
        if given and not spec.cluster.scheduler.is_this_machine:
            raise UsageError(
                f"{given} is given, but the job would run on {place}",
                hint="pass --cluster ssh (or allocation), or drop the hosts",
            )
        return (f"{given} has no effect on {place}",) if given else ()
    check_distinct(facts.hosts)
    listed, spares = len(facts.hosts.hosts), spec.spare_nodes
    if spares >= listed or (spec.nodes or 1) + spares > listed:
        wanted = f"{count(spec.nodes or 1, 'node')} and {count(spares, 'spare node')} requested"
        raise UsageError(
            f"{wanted}, but {facts.hosts.source} lists {count(listed, 'host')}",
            hint="list more hosts, or lower --nodes and slurm.spare_nodes",
        )
    unused = listed - (spec.nodes or listed - spares) - spares
    left = ", ".join(facts.hosts.hosts[listed - unused :])
    return (f"not used: {left} (--nodes {spec.nodes})",) if unused else ()


def host_settings(spec: JobSpec, facts: Facts, nodes: int) -> dict[str, Any]:
    """Return the fields of a plan about its hosts; none for a job elsewhere."""
    if not facts.cluster.scheduler.has_hosts:
        return {}
    return {
        "hosts": facts.hosts.hosts[: nodes + spec.spare_nodes],
        "wait_for_hosts_s": spec.wait_for_hosts_s,
        "hosts_dir": spec.hosts_dir,
        "starter": facts.starter.value,
    }
