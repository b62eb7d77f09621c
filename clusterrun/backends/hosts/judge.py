"""Decide by the facts of all hosts whether a run can start there; nothing is looked up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from clusterrun.config.choices import Device
from clusterrun.errors import Exit, SubmissionError, describe
from clusterrun.health.examine import differences
from clusterrun.launch.plan import Plan
from clusterrun.shared.finding import Finding, Severity, bad, fail, note
from clusterrun.shared.wording import count, missing_text

NEEDED: Final = ("clusterrun", "torch", "accelerate")
CLOCK_NOTE_S: Final = 1.0
CLOCK_S: Final = 60.0  # no time service runs there: certificates and file times mislead
ELSEWHERE: Final = "free space there, or name another directory: --set hosts_dir=DIR"
_SAME: Final = "install the same versions on all hosts, or name another interpreter with --python"


# What is reported first. Notes come last, and the run starts anyway.
TWICE: Final = "host.twice"
ORDER: Final = (
    *(TWICE, "host.packages", "host.files", "host.disk", "host.gpus", "host.busy"),
    *("host.clock", "host.ports"),
)

Facts = Mapping[str, Any]


def judged(plan: Plan, facts: Mapping[str, Facts]) -> list[Finding]:
    """Return all failures and notes, the most telling first, alike ones of several hosts as one.

    `facts` are by name, the first host first.
    """
    first = next(iter(facts))
    hosts: dict[Finding, list[str]] = defaultdict(list)
    for host, each in facts.items():
        for found in (*_files(each), *_gpus(plan, each), *_clock(each["ahead_s"], first)):
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


def unwritten(host: str, error: Exception) -> SubmissionError:
    """Return the error for a host on which the run can't be written."""
    return SubmissionError(f"{host}: cannot write the run", cause=describe(error), hint=ELSEWHERE)


def twice(host: str, holder: str) -> Finding:
    """Explain that a machine has the job's lock already, under another name."""
    text = f"the same machine as {holder}"
    return replace(fail(TWICE, text, "name each machine once in hosts:"), nodes=(host,))


def busy(host: str, gpu: str, holder: str) -> Finding:
    """Explain a GPU's lock that a host could not take."""
    fix = "wait until that run ends, or choose other hosts (--hosts)"
    return replace(fail("host.busy", f"GPU {gpu} is held by {holder}", fix), nodes=(host,))


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
    free = [gpu for gpu in found.get("all", []) if not (gpu["problem"] or gpu["user"])]
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
    users = [f"GPU {gpu['name']}: {gpu['user']}" for gpu in usable if gpu["user"]]
    free = len(usable) - len(users)
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
    elif free < needed:
        text = f"{free} of {count(len(usable), 'GPU')} free, but {needed} are needed"
        yield fail("host.busy", f"{text}: {'; '.join(users)}", "end them, or leave the host out")


def gpus_needed(plan: Plan) -> int:
    """Return how many GPUs each host must have free."""
    return plan.gpus_per_node or plan.procs_per_node


def _mixed(facts: Mapping[str, Facts]) -> Iterator[tuple[Finding, list[str]]]:
    """Yield what differs between hosts; those that lack a package are left out."""
    has_all = [host for host in facts if all(map(facts[host]["versions"].get, NEEDED))]
    known = {
        host: {f"versions.{name}": facts[host]["versions"][name] for name in ("python", *NEEDED)}
        for host in has_all
    }
    for each in differences(known):
        if each.severity is Severity.FAIL:  # an attempt does not start with different versions
            yield fail("host.packages", each.text, _SAME), [*known]
    apart = [host for host, each in facts.items() if not each["sees_home"]]
    if apart and len(apart) < len(facts) - 1:
        text = "the run directory is not shared there, so checkpoints stay there"
        yield note("host.files", text, ""), apart
