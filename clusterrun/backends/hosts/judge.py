"""Decide by the facts of all hosts whether a run can start there; nothing is looked up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from clusterrun.backends.hosts.locks import Holder, job_lock
from clusterrun.config.choices import Device
from clusterrun.errors import Exit, SubmissionError
from clusterrun.health.compare import differences
from clusterrun.health.machine import gib
from clusterrun.launch.plan import Plan
from clusterrun.shared.finding import Finding, Severity, bad, fail, note
from clusterrun.shared.wording import count, missing_text

NEEDED: Final = ("clusterrun", "torch", "accelerate")
CLOCK_NOTE_S: Final = 1.0
CLOCK_S: Final = 60.0  # no time service runs there: certificates and file times mislead
ELSEWHERE: Final = "free space there, or name another directory: --set hosts_dir=DIR"
SMALL_BYTES: Final = 1 << 30
_SCREENS: Final = frozenset({"Xorg", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "sddm"})
_SAME: Final = "install the same versions on all hosts, or name another interpreter with --python"


# What is reported first. Notes come last, and the run starts anyway.
TWICE: Final = "host.twice"
ORDER: Final = (
    *(TWICE, "host.packages", "host.files", "host.disk", "host.gpus", "host.busy"),
    *("host.clock", "host.ports"),
)

Facts = Mapping[str, Any]


def judged(plan: Plan, facts: Mapping[str, Facts], ahead_s: Mapping[str, float]) -> list[Finding]:
    """Return all failures and notes, the most telling first, alike ones of several hosts as one.

    `facts` are by name, the first host first; `ahead_s`: how far clocks are ahead of its own.
    """
    first = next(iter(facts))
    hosts: dict[Finding, list[str]] = defaultdict(list)
    for host, each in facts.items():
        ahead = ahead_s.get(host, 0.0)
        for found in (*_files(each), *_gpus(plan, each), *_clock(ahead, first)):
            hosts[found].append(host)
    for found, names in _mixed(facts):
        hosts[found] = names
    named = [replace(found, nodes=tuple(names)) for found, names in hosts.items()]
    return sorted(named, key=lambda each: (each.severity is Severity.NOTE, ORDER.index(each.id)))


def error_of(found: Iterable[Finding]) -> SubmissionError:
    """Return the error for failures: the first is the message, the others are hints."""
    first, *others = found
    hints = (first.fix, *(f"also {each.summary}" for each in others))
    error = SubmissionError(first.summary, hint=hints)
    error.exit_code = Exit.USAGE if first.id == TWICE else Exit.FAILED
    return error


def busy(host: str, lock: str, holder: Holder, job_id: str) -> Finding:
    """Explain a lock that a host could not take: a GPU's, or the one of this job."""
    if lock == job_lock(job_id):
        text = f"the same machine as {holder.host or holder}"
        return replace(fail(TWICE, text, "name each machine once in hosts:"), nodes=(host,))
    text = f"GPU {lock.removeprefix('clusterrun-gpu-')} is held by {holder}"
    fix = "wait until that run ends, or choose other hosts (--hosts)"
    return replace(fail("host.busy", text, fix), nodes=(host,))


def closed_port(hosts: Sequence[str], to: str, port: int, reason: str) -> Finding:
    """Explain that hosts do not reach a port of another."""
    text = f"port {port} of {to} cannot be reached ({reason})"
    fix = "open ports between the hosts, and pass them: --set network.port_range=LOW-HIGH"
    return replace(fail("host.ports", text, fix), nodes=tuple(hosts))


def gpus_to_lock(plan: Plan, facts: Facts) -> list[str]:
    """Return the UUIDs (or names) of the GPUs that a run may use on a host.

    If they are unknown, all runs over ssh use the first ones; an allocation's are its own.
    """
    found = facts["gpus"]
    if "unknown" in found and plan.cluster.scheduler.outlives_shell:
        return [str(number) for number in range(gpus_needed(plan))]
    free = [gpu for gpu in found.get("all", []) if not gpu["problem"] and not _user(gpu)]
    return [gpu["uuid"] or gpu["name"] for gpu in free]


def _files(facts: Facts) -> Iterator[Finding]:
    """Yield what the host lacks: packages, paths and room."""
    for name in NEEDED if "versions" not in facts["late"] else ():
        if not facts["versions"].get(name):
            hint = f"install it there: {facts['executable']} -m pip install {name}"
            yield fail("host.packages", missing_text(facts["executable"], [name]), hint)
    for path in facts["missing"]:
        hint = "copy it there, or submit from a directory that all hosts share"
        yield fail("host.files", f"{path} does not exist there", hint)
    for check in facts["checks"]:
        is_own = not facts["sees_home"] and check["id"].startswith("path.")
        yield fail("host.disk", check["text"], ELSEWHERE if is_own else check["hint"])
    if {"missing", "checks", "sees_home"}.intersection(facts["late"]):
        yield fail("host.files", "a file system does not answer there", "run df there to find it")


def _clock(ahead_s: float, first: str) -> Iterator[Finding]:
    if abs(ahead_s) >= CLOCK_NOTE_S:
        text = f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        fix = "set it there with chronyc makestep or timedatectl"
        is_far = abs(ahead_s) > CLOCK_S
        yield bad("host.clock", f"{text} that of {first}", fix, is_sure=is_far)


def _gpus(plan: Plan, facts: Facts) -> Iterator[Finding]:
    if plan.device is not Device.CUDA:
        return
    found, needed = facts["gpus"], gpus_needed(plan)
    known = found.get("all", [])
    usable = [gpu for gpu in known if not gpu["problem"]]
    free = [gpu for gpu in usable if not _user(gpu)]
    driver = found.get("problem", "")
    if "gpus" in facts["late"]:
        yield fail("host.gpus", "NVIDIA's driver does not answer there", "run nvidia-smi there")
    elif found.get("unknown"):
        text = f"its GPUs are not checked: {found['unknown']}"
        yield note("host.gpus", text, "install clusterrun[train] there")
    elif len(usable) < needed:
        silent = [f"GPU {gpu['name']}: {gpu['problem']}" for gpu in known if gpu["problem"]]
        why = "; ".join(filter(None, [driver, *silent]))
        text = f"{count(len(usable), 'GPU')}, but {needed} are needed{f' ({why})' if why else ''}"
        yield fail("host.gpus", text, "lower --gpus-per-node, or leave the host out")
    elif len(free) < needed:
        users = "; ".join(f"GPU {gpu['name']}: {_user(gpu)}" for gpu in usable if _user(gpu))
        text = f"{len(free)} of {count(len(usable), 'GPU')} free, but {needed} are needed: {users}"
        yield fail("host.busy", text, "end them, or leave the host out")


def gpus_needed(plan: Plan) -> int:
    """Return how many GPUs each host must have free."""
    return plan.gpus_per_node or plan.procs_per_node


def _user(gpu: Facts) -> str:
    """Return who uses a GPU; "" if it is free."""
    if gpu["holder"]:
        return str(Holder(**gpu["holder"]))
    return ", ".join(
        f"process {each['pid']} ({each['command'] or '?'} of {each['user'] or '?'}, "
        f"{gib(each['bytes'])})"
        for each in gpu["processes"]
        if each["command"] not in _SCREENS or each["bytes"] >= SMALL_BYTES
    )


def _mixed(facts: Mapping[str, Facts]) -> Iterator[tuple[Finding, list[str]]]:
    """Yield what differs between hosts; those that lack a package are left out."""
    has_all = [host for host in facts if all(map(facts[host]["versions"].get, NEEDED))]
    known = {
        host: {
            "versions.python": facts[host]["python"],
            **{f"versions.{name}": facts[host]["versions"][name] for name in NEEDED},
        }
        for host in has_all
    }
    for each in differences(known):
        if each.severity is Severity.FAIL:  # an attempt does not start with different versions
            yield fail("host.packages", each.text, _SAME), [*known]
    apart = [host for host, each in facts.items() if not each["sees_home"]]
    if apart and len(apart) < len(facts) - 1:
        text = "the run directory is not shared there, so checkpoints stay there"
        yield note("host.files", text, ""), apart
