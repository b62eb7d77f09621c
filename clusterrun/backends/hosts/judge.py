"""Decide by the facts of all hosts whether a run can start there; nothing is looked up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from clusterrun.config.choices import Device
from clusterrun.errors import SubmissionError, describe
from clusterrun.health.examine import differences
from clusterrun.launch.plan import Plan
from clusterrun.shared.finding import Finding, Severity, fail
from clusterrun.shared.wording import count, missing_text

NEEDED: Final = ("clusterrun", "torch", "accelerate")
CLOCK_S: Final = 60.0  # no time service runs there: certificates and file times mislead
ELSEWHERE: Final = "free space on the host, or name another directory: --set hosts_dir=DIR"
_SAME: Final = "install the same versions on all hosts, or name another interpreter with --python"

Facts = Mapping[str, Any]


def problems(plan: Plan, facts: Mapping[str, Facts]) -> list[Finding]:
    """Return why the run can't start, each reason once; `facts` has the first host first."""
    first_host = next(iter(facts))
    hosts: dict[Finding, list[str]] = defaultdict(list)  # those that have this problem
    for host, own in facts.items():
        for problem in (*_files(own), *_gpus(plan, own), *_clock(own["ahead_s"], first_host)):
            hosts[problem].append(host)
    for problem, names in _mixed(facts):
        hosts[problem] = names
    return [replace(problem, nodes=tuple(names)) for problem, names in hosts.items()]


def error_of(findings: Iterable[Finding]) -> SubmissionError:
    """Return the error for findings: the first is the message, the others are hints."""
    first, *others = findings
    hints = (first.fix, *(f"also {each.summary}" for each in others))
    return SubmissionError(first.summary, hint=hints)


def unwritten(host: str, error: Exception) -> SubmissionError:
    """Return the error for a host that cannot write the run directory or its files."""
    return SubmissionError(f"{host}: cannot write run files", cause=describe(error), hint=ELSEWHERE)


def busy(host: str, gpu: str, holder: str) -> Finding:
    """Explain a GPU's lock that a host could not take."""
    fix = "wait until that process has ended, or choose other hosts (--hosts)"
    return replace(fail("host.busy", f"GPU {gpu} is held by {holder}", fix), nodes=(host,))


def closed_port(host: str, to: str, port: int, reason: str) -> Finding:
    """Explain that a host does not reach a port of another."""
    text = f"port {port} of {to} cannot be reached ({reason})"
    fix = "open a range of ports between the hosts, and pass it: --set network.port_range=LOW-HIGH"
    return replace(fail("host.ports", text, fix), nodes=(host,))


def gpus_to_lock(plan: Plan, facts: Facts) -> list[str]:
    """Return the GPUs that a run locks on a host, by UUID or name.

    If they are unknown, a run over ssh locks the first ones; one in an allocation locks none,
    because the scheduler gives its GPUs to no other job.
    """
    found = facts["gpus"]
    if "unknown" in found and plan.cluster.scheduler.outlives_shell:
        return [str(number) for number in range(gpus_needed(plan))]
    free = [gpu for gpu in found.get("all", []) if not gpu["problem"]]
    return [gpu["uuid"] or gpu["name"] for gpu in free]


def _files(facts: Facts) -> Iterator[Finding]:
    """Yield what the host lacks: packages, paths and room; facts that were `late` are unknown."""
    needed = NEEDED if "versions" not in facts["late"] else ()
    for name in needed:
        if not facts["versions"].get(name):
            hint = f"install it on the host: {facts['executable']} -m pip install {name}"
            yield fail("host.packages", missing_text(facts["executable"], [name]), hint)
    for path in facts["missing"]:
        hint = "copy it to the host, or submit from a directory that all hosts share"
        yield fail("host.files", f"{path} does not exist", hint)
    for check in facts["checks"]:
        is_of_hosts_dir = not facts["sees_home"] and check["id"].startswith("path.")
        yield fail("host.disk", check["text"], ELSEWHERE if is_of_hosts_dir else check["hint"])
    if {"missing", "checks"}.intersection(facts["late"]):
        yield fail("host.files", "a file system does not answer", "run df on the host to see which")


def _clock(ahead_s: float, first: str) -> Iterator[Finding]:
    """Yield a failure if the host's clock is far from that of the first host."""
    if abs(ahead_s) > CLOCK_S:
        text = f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        fix = "synchronize the host's clock: chronyc makestep, or timedatectl set-ntp true"
        yield fail("host.clock", f"{text} that of {first}", fix)


def _gpus(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield a failure if too few GPUs are free; those that NVML cannot list are not judged."""
    if plan.device is not Device.CUDA:
        return
    answer, needed = facts["gpus"], gpus_needed(plan)
    known = answer.get("all", [])
    bad = [f"GPU {gpu['name']}: {gpu['problem']}" for gpu in known if gpu["problem"]]
    free = len(known) - len(bad)
    if "gpus" in facts["late"]:
        yield fail("host.gpus", "NVIDIA's driver does not answer", "run nvidia-smi on the host")
    elif "unknown" not in answer and free < needed:
        text = f"{free} of {count(len(known), 'GPU')} can be used, but {needed} are needed"
        why = "; ".join(filter(None, [text, answer.get("problem", ""), *bad]))
        fix = "lower --gpus-per-node, end the processes on the GPUs, or leave the host out"
        yield fail("host.gpus", why, fix)


def gpus_needed(plan: Plan) -> int:
    """Return how many GPUs each host must have free."""
    return plan.gpus_per_node or plan.procs_per_node


def _mixed(facts: Mapping[str, Facts]) -> Iterator[tuple[Finding, list[str]]]:
    """Yield which versions differ between the hosts that have all packages, and these hosts."""
    versions = {host: own["versions"] for host, own in facts.items()}
    has_all = [host for host, own in versions.items() if all(own.get(name) for name in NEEDED)]
    known = {
        host: {f"versions.{name}": versions[host][name] for name in ("python", *NEEDED)}
        for host in has_all
    }
    for difference in differences(known):
        if difference.severity is Severity.FAIL:  # the versions must agree
            yield fail("host.packages", difference.text, _SAME), [*known]
