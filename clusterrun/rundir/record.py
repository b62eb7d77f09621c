"""The record of a run, job.json, how to find a run by any name, and what a user's runs were."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import heapq
import json
import os
import platform
import pwd
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterrun.config.choices import Cluster
from clusterrun.errors import ClusterrunError, JobNotFoundError, NotAdoptedError, UsageError
from clusterrun.launch.plan import Plan
from clusterrun.rundir import reading
from clusterrun.rundir.paths import RunPaths, RunsDir, directory_name
from clusterrun.rundir.reading import read_plan
from clusterrun.shared import files, typed
from clusterrun.shared.installed import installed_version
from clusterrun.shared.locks import locked
from clusterrun.shared.state import JobId
from clusterrun.shared.wording import count

SCHEMA = "clusterrun.job/1"
HOME_SCHEMA = "clusterrun.home/1"
REMEMBERED_ROOTS = 50
CLOCK_SKEW_S = 3600.0  # between a file server and the machines that submit
LIBRARIES = ("clusterrun", "torch", "accelerate", "deepspeed", "transformers", "submitit")
SHAPE = (  # fields that a plan of the run decides, the newest one of a resumed run
    *("nodes", "procs_per_node", "gpus_per_node", "world_size"),
    *("strategy", "device", "time_minutes"),
)

# 4711, L3, H4; array tasks, components of heterogeneous jobs and steps belong to their job.
_JOB_ID = r"([LH]?[0-9]{1,15})(?:[_+.][0-9A-Za-z_+.\[\]-]*)?(?:;(\S+))?\Z"


@dataclass(frozen=True, kw_only=True)
class Home:
    """A run directory on another host: the host as ssh knows it, and the Python that reads it."""

    host: str
    run_dir: str
    python: str


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Contents of job.json: where a run was submitted and what was requested, never its state."""

    job_id: JobId  # of the newest job, or of the next one of a chain; "" until it is assigned
    cluster: Cluster
    slurm_cluster: str | None
    name: str
    run_id: str
    run_dir: str
    submitted_at: float  # epoch seconds
    argv: tuple[str, ...]
    nodes: int
    procs_per_node: int
    gpus_per_node: int
    world_size: int
    strategy: str
    device: str
    workdir: str
    time_minutes: int  # 0 without a limit
    versions: Mapping[str, str]
    user: str
    earlier_job_ids: tuple[JobId, ...] = ()
    chained_job_ids: tuple[JobId, ...] = ()  # those that follow `job_id`
    chain_length: int = 0  # 0 without a chain
    resumed_at: float = 0.0  # when it was last resumed by hand, in epoch seconds; 0 if never
    is_smoke: bool = False  # the job checks nodes and trains nothing
    home: Home | None = None  # if set, the run is there, and here is little more than the record

    @property
    def is_damaged(self) -> bool:
        """Return whether job.json can't be read: every other one names its user."""
        return not self.user

    @property
    def age_key(self) -> tuple[float, str]:
        """Sorts runs by when they were last submitted or resumed."""
        return max(self.submitted_at, self.resumed_at), self.run_id

    @property
    def job_ids(self) -> tuple[JobId, ...]:
        """All jobs of the run, past and future, in order."""
        return (*filter(None, (*self.earlier_job_ids, self.job_id, *self.chained_job_ids)),)

    @property
    def paths(self) -> RunPaths:
        """The layout of the run's directory."""
        return RunPaths(root=Path(self.run_dir))


def new_record(plan: Plan, paths: RunPaths, *, argv: Sequence[str], now: float) -> JobRecord:
    """Return the record of a run before its submission by command `argv`, without a job id."""
    versions = {library: installed_version(library) for library in LIBRARIES}
    return JobRecord(
        job_id=JobId(),
        cluster=plan.cluster,
        slurm_cluster=None,
        name=plan.name,
        run_id=paths.root.name,
        run_dir=str(paths.root),
        submitted_at=now,
        argv=tuple(argv),
        workdir=plan.workdir,
        versions={"python": platform.python_version(), **{k: v for k, v in versions.items() if v}},
        user=current_user(),
        is_smoke=plan.is_smoke,
        **shape(plan),
    )


def shape(plan: Plan) -> dict[str, Any]:
    """Return the fields of a record that the newest plan of the run decides."""
    found = {name: getattr(plan, name) for name in SHAPE}
    return {**found, "strategy": plan.strategy.value, "device": plan.device.value}


def submitted_as(
    record: JobRecord, job_id: JobId, slurm_cluster: str | None, home: Home | None = None
) -> JobRecord:
    """Return a record with what a submission returned; `home`: where the run is, if not here."""
    # The job may have recorded itself already, and a later one may have continued the run.
    current = record.job_id if job_id in record.job_ids else job_id
    return dataclasses.replace(record, job_id=current, slurm_cluster=slurm_cluster, home=home)


def chained_by(record: JobRecord, job_id: JobId) -> JobRecord:
    """Return a record with one more job in its chain; the job may have recorded itself already."""
    if job_id in record.job_ids:
        return record
    return dataclasses.replace(record, chained_job_ids=(*record.chained_job_ids, job_id))


def continued_by(record: JobRecord, job_id: JobId) -> JobRecord:
    """Return a record whose current job is another one; all jobs of the chain before it ended."""
    ids = record.job_ids
    if job_id in (record.job_id, *record.earlier_job_ids):
        return record
    # A job that was not in the chain comes after all of it.
    position = ids.index(job_id) if job_id in record.chained_job_ids else len(ids)
    return dataclasses.replace(
        record, job_id=job_id, earlier_job_ids=ids[:position], chained_job_ids=ids[position + 1 :]
    )


def current_user() -> str:
    """Return the name of the current user, or the number if there is no name."""
    return user_name(os.getuid())


def user_name(user_id: int) -> str:
    """Return a user's name, or the number: users in containers may have no name."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def other_owner(root: Path) -> str:
    """Return the name of another user whom a run directory belongs to; "" if it is this user's."""
    owner = os.getuid()
    with contextlib.suppress(OSError):
        owner = root.stat().st_uid
    return "" if owner == os.getuid() else user_name(owner)


# job.json


def write(record: JobRecord) -> None:
    """Write job.json atomically, readable by its owner only."""
    files.write_whole(record.paths.record, reading.as_text(record, SCHEMA))


def update(paths: RunPaths, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
    """Change job.json, one process at a time. Raises ClusterrunError, OSError."""
    with locked(paths.record_lock):
        old = read(paths)
        new = change(old)
        if new != old:
            write(new)
    return new


def read(paths: RunPaths) -> JobRecord:
    """Read job.json; `run_dir` and `run_id` are where it is now. Raises ClusterrunError."""
    try:
        data = files.parse_object(files.read_whole(paths.record))
        if data is None:
            raise ValueError("it is not a JSON object")
        place = {"run_dir": str(paths.root.absolute()), "run_id": paths.root.name}
        return typed.of_schema(JobRecord, {**data, **place}, SCHEMA)
    except (OSError, ValueError) as error:
        owner = other_owner(paths.root)
        access = f"ask its owner, {owner}, for access"
        hint = access if owner else "choose a run that this version of clusterrun wrote"
        raise ClusterrunError(f"cannot read {paths.record}", cause=str(error), hint=hint) from error


def read_again(record: JobRecord) -> JobRecord:
    """Read a record again: another job may have continued the run."""
    return readable(record.paths.root) or record


def _placeholder(root: Path, written_at: float) -> JobRecord:
    """Stand in for a damaged job.json in a list of runs: its place and time, and blank fields."""
    fields: dict[str, Any] = {
        field.name: 0 if field.type == "int" else ""
        for field in dataclasses.fields(JobRecord)
        if field.type in ("int", "str")  # this module's annotations are strings
    }
    fields |= {"job_id": JobId(), "cluster": Cluster.LOCAL, "slurm_cluster": None}
    fields |= {"name": root.parent.name, "run_id": root.name, "run_dir": str(root.absolute())}
    fields |= {"argv": (), "versions": {}, "workdir": str(root.parent.parent.parent)}  # by default
    return JobRecord(**fields, submitted_at=written_at)


def link_job(paths: RunPaths, job_id: JobId) -> None:
    """Link by-job/<job id> to the run; replace the link of an older run with the same id."""
    paths.runs_dir.by_job.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.replacing(paths.runs_dir.job_link(job_id)) as temporary:
        temporary.symlink_to(link_target(paths))


def link_target(paths: RunPaths) -> str:
    """Return the run's path relative to by-job/, so that all runs can be moved together."""
    return os.path.relpath(paths.root, paths.runs_dir.by_job)


def register_run(run_dir: Path, environ: Mapping[str, str]) -> JobRecord:
    """Record a job from inside it: the run may have been submitted by hand.

    Keep an existing record; add the job id if it has none. A job that continues the run becomes
    its current one.
    """
    paths = RunPaths(root=run_dir.absolute())
    plan = read_plan(paths)
    with locked(paths.record_lock):
        if not paths.record.exists():
            write(new_record(plan, paths, argv=(), now=time.time()))
    job_id = job_id_in(environ)
    record = update(paths, lambda old: continued_by(old, job_id) if job_id else old)
    if record.job_id:
        link_job(paths, record.job_id)
    return record


def job_id_in(environ: Mapping[str, str]) -> JobId:
    """Return the id of the job that an environment belongs to; "" for none."""
    names = ("CLUSTERRUN_HOSTS_JOB_ID", "SLURM_JOB_ID", "CLUSTERRUN_LOCAL_JOB_ID")
    return next(filter(None, (JobId.read(environ.get(name)) for name in names)), JobId())


# Finding runs again


def list_records(
    runs_dir: RunsDir,
    limit: int | None = None,
    *,
    name: str | None = None,
    of: Callable[[JobRecord], bool] = bool,
    with_damaged: bool = False,
) -> list[JobRecord]:
    """Return the readable records of a directory of runs, the last submitted or resumed first.

    With a `limit`, stop at files that are too old to be among so many newest records: a file is
    written after the times in it, apart from clock skew. `of` says which records count (all by
    default); `name` looks only where runs of that name are. `with_damaged` adds placeholders.
    """
    found: list[JobRecord] = []
    for written_at, root in sorted(_record_files(runs_dir, name), reverse=True):
        newest_times = heapq.nlargest(limit or 0, (record.age_key[0] for record in found))
        if limit and len(newest_times) == limit and written_at + CLOCK_SKEW_S < newest_times[-1]:
            break
        record = readable(Path(root))
        if record is None and with_damaged:
            record = _placeholder(Path(root), written_at)
        if record is not None and of(record):
            found.append(record)
    return sorted(found, key=lambda record: record.age_key, reverse=True)[:limit]


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return list(entries)
    return []


def _record_files(runs_dir: RunsDir, name: str | None) -> Iterator[tuple[float, str]]:
    """Yield when each record was written, and its run's directory; this costs a stat for each."""
    file = RunPaths(root=Path()).record.name
    if name is None:
        names = [each.name for each in _entries(runs_dir.root) if each.name != runs_dir.by_job.name]
    else:
        names = [directory_name(name)]
    for directory in names:
        for run in _entries(runs_dir.root / directory):
            with contextlib.suppress(OSError):
                yield os.lstat(os.path.join(run.path, file)).st_mtime, run.path


def readable(root: Path) -> JobRecord | None:
    """Return the record of a run directory; None if it can't be read."""
    try:
        return read(RunPaths(root=root))
    except ClusterrunError:
        return None


def resolve_job(text: str | None, runs_dirs: Sequence[RunsDir]) -> JobRecord:
    """Find a run by job id, name, run id or a path in it; None means the newest of this project.

    The first of `runs_dirs` is this project's. Return the newest of several runs with a name.
    Raises JobNotFoundError.
    """
    if text is None:
        for place in runs_dirs[:1]:  # at most one place, and at most one record in it
            for newest in list_records(place, 1, of=lambda x: not x.is_smoke, with_damaged=True):
                return _checked(newest)
        raise _not_found("no run yet", runs_dirs[:1])
    for find in (_by_job_id, _by_path, _by_name):
        record = find(text, runs_dirs)
        if record is not None:
            return record
    raise _not_found(f"no job or run '{text}'", runs_dirs)


def _by_job_id(text: str, runs_dirs: Sequence[RunsDir]) -> JobRecord | None:
    """Return the run of a job id; None for other text. Raises UsageError for several runs."""
    match = re.match(_JOB_ID, text)
    if match is None:
        return None
    job_id, slurm_cluster = JobId(match[1]), match[2]  # "tuxA" of 4711;tuxA, or None
    for places in (runs_dirs[:1], runs_dirs[1:]):  # own project first: others may reuse ids
        records = (_job_in(place, job_id, slurm_cluster) for place in places)
        found = [record for record in records if record is not None]
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} jobs have the id {text}, but none of them is in {runs_dirs[0].root}",
                hint=tuple(f"choose one by its directory: {each.run_dir}" for each in found[:5]),
            )
        if found:
            return found[0]
    return None


def _job_in(runs_dir: RunsDir, job_id: JobId, slurm_cluster: str | None) -> JobRecord | None:
    """Return the newest run with a job, by the id's link or, if need be, by all records."""
    linked = RunPaths(root=_followed(runs_dir.job_link(job_id)))
    candidates = [read(linked)] if os.path.exists(linked.record) else []  # False if closed to us
    if slurm_cluster or not candidates:  # the link may point to a run on another cluster
        candidates += list_records(runs_dir)
    for record in candidates:
        if job_id in record.job_ids and slurm_cluster in (None, record.slurm_cluster):
            return record
    return None


def _by_path(text: str, runs_dirs: Sequence[RunsDir]) -> JobRecord | None:
    """Return the run that contains a path. Raises ClusterrunError for one that can't be read."""
    path = Path(os.path.abspath(text))
    if not text or not os.path.lexists(path):
        return None
    for directory in (path, *path.parents):
        is_closed = os.path.isdir(directory) and not os.access(directory, os.X_OK)
        if is_closed or os.path.exists(RunPaths(root=directory).record):  # closed: read() raises
            return read(RunPaths(root=_followed(directory)))
    return None


def _followed(link: Path) -> Path:
    """Follow a link to a run, but no other link: keep the path as the user spelled it."""
    try:
        return Path(os.path.normpath(link.parent / os.readlink(link)))
    except OSError:
        return link


def _by_name(text: str, runs_dirs: Sequence[RunsDir]) -> JobRecord | None:
    """Return the newest run of a name, or the one with a run id or NAME/RUN_ID."""
    for runs_dir in runs_dirs:
        if newest := list_records(runs_dir, 1, name=text, of=lambda record: record.name == text):
            return newest[0]
        for record in list_records(runs_dir, with_damaged=True):  # also finds damaged ones by name
            if text in (record.name, record.run_id, f"{record.name}/{record.run_id}"):
                return _checked(record)
    return None


def _checked(record: JobRecord) -> JobRecord:
    """Return a record; if it is damaged, raise what is wrong rather than take an older run."""
    return read(record.paths) if record.is_damaged else record


def _not_found(message: str, runs_dirs: Sequence[RunsDir]) -> JobNotFoundError:
    """Return the error; its hint names the newest runs in these places, if there are any."""
    for root in (each.root for each in runs_dirs[:1]):  # at most one
        if root.is_dir() and not os.access(root, os.R_OK | os.X_OK):
            text = f"you cannot read {root}, which belongs to {user_name(root.stat().st_uid)}"
            return JobNotFoundError(text, hint="ask its owner for access, or name your own run")
    found = (record for runs_dir in runs_dirs for record in list_records(runs_dir, 3))
    newest = heapq.nlargest(3, found, key=lambda record: record.age_key)
    known = ", ".join(f"{record.job_id} ({record.name})" for record in newest)
    others = f" or in {count(len(runs_dirs) - 1, 'other project')}" if len(runs_dirs) > 1 else ""
    place = runs_dirs[0].root if runs_dirs else "any known directory"
    where = "run the command where you submitted, or pass the path of the run"
    hint = f"choose a run; the newest are: {known}" if known else where
    return JobNotFoundError(f"{message} in {place}{others}", hint=hint)


# What is remembered between commands of where this user has runs. What a run directory says is not
# believed: a copied project could name a host, and the program that runs there.


def remember_root(runs_dir: RunsDir) -> None:
    """Remember a directory of runs, so that commands work from elsewhere; ignore write errors."""
    root = str(runs_dir.root.absolute())
    roots = dict.fromkeys((root, *(str(known.root) for known in remembered_roots())))
    path = _roots_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_whole(path, json.dumps({"roots": [*roots][:REMEMBERED_ROOTS]}) + "\n")


def remembered_roots() -> list[RunsDir]:
    """Return the remembered directories of runs that still exist, the last used first."""
    try:
        roots = (files.read_json(_roots_file()) or {})["roots"]
        return [RunsDir(root=Path(root)) for root in roots if Path(root).is_dir()]
    except (OSError, KeyError, TypeError):
        return []


def remember_home(record: JobRecord) -> None:
    """Remember the home that a record names: its run directory on another host. Raises OSError."""
    if record.home:
        path = _home_file(record)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.write_whole(path, reading.as_text(record.home, HOME_SCHEMA))


def adopted(record: JobRecord) -> JobRecord:
    """Return a record with the home elsewhere that this user accepted. Raises NotAdoptedError."""
    if record.home is None:  # the run is on this machine
        return record
    home = reading.read(_home_file(record), Home, HOME_SCHEMA)  # as `remember_home` wrote it
    if home is None:  # only job.json names one, which another user may have written
        word = record.job_id or shlex.quote(record.run_dir)
        raise NotAdoptedError(
            f"job {word} is on {record.home.host} according to its job.json, which is not trusted",
            hint=f"if you trust {record.home.python} on {record.home.host}: "
            f"clusterrun status --adopt {word}",
        )
    return dataclasses.replace(record, home=home)


def _home_file(record: JobRecord) -> Path:
    place = os.fsencode(os.path.realpath(record.run_dir))
    return state_dir() / "homes" / f"{hashlib.sha256(place).hexdigest()[:32]}.json"


def _roots_file() -> Path:
    return state_dir() / "roots.json"


def state_dir() -> Path:
    """Return the directory for state that clusterrun keeps between commands."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "clusterrun"
