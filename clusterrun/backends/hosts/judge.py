"""Decide by the facts of all hosts whether a run can start there; nothing is looked up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from clusterrun.backends.hosts.locks import Holder, job_lock
from clusterrun.config.choices import Device
from clusterrun.errors import Exit, SubmissionError
from clusterrun.health.compare import differences
from clusterrun.health.machine import gib
from clusterrun.launch.plan import Plan
from clusterrun.shared.finding import Severity
from clusterrun.shared.hostlist import named
from clusterrun.shared.wording import count, missing_text

NEEDED: Final = ("clusterrun", "torch", "accelerate")
CLOCK_NOTE_S: Final = 1.0
CLOCK_S: Final = 60.0  # no time service runs there: certificates and file times mislead
ELSEWHERE: Final = "free space there, or name another directory: --set hosts_dir=DIR"
SMALL_BYTES: Final = 1 << 30
_SCREENS: Final = frozenset({"Xorg", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "sddm"})
_SAME: Final = "install the same versions on all hosts, or name another interpreter with --python"
_FREE_GPUS: Final = "end them, or leave the host out"


class Order(IntEnum):
    """What is reported first."""

    SAME_HOST = 0
    PACKAGE = 1
    FILES = 2
    DISK = 3
    GPUS = 4
    BUSY = 5
    CLOCK = 6
    CLOSED_PORTS = 7
    NOTE = 8


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is wrong with hosts; of order NOTE, the run starts anyway."""

    hosts: tuple[str, ...]
    text: str
    hint: str
    order: Order
    exit_code: Exit = Exit.FAILED

    def __str__(self) -> str:
        """Return the line for people."""
        return f"{named(self.hosts)}: {self.text}"


Facts = Mapping[str, Any]
Found = tuple[Order, str, str]  # what is wrong with one host, and what to do


def judged(plan: Plan, facts: Mapping[str, Facts], ahead_s: Mapping[str, float]) -> list[Problem]:
    """Return all problems and notes, the most telling first, alike ones of several hosts as one.

    `facts` are by name, the first host first; `ahead_s`: how far clocks are ahead of its own.
    """
    first = next(iter(facts))
    hosts: dict[Found, list[str]] = defaultdict(list)
    for host, each in facts.items():
        for found in (
            *_software(each),
            *_files(each),
            *_gpus(plan, each),
            *_clock(ahead_s.get(host, 0.0), first),
        ):
            hosts[found].append(host)
    for found, names in _mixed(facts):
        hosts[found] = names
    problems = [
        Problem(hosts=tuple(names), order=order, text=text, hint=hint)
        for (order, text, hint), names in hosts.items()
    ]
    return sorted(problems, key=lambda problem: problem.order)


def problems(plan: Plan, facts: Mapping[str, Facts], ahead_s: Mapping[str, float]) -> list[Problem]:
    """Return why the run cannot start; [] if it can."""
    return [each for each in judged(plan, facts, ahead_s) if each.order is not Order.NOTE]


def notes(plan: Plan, facts: Mapping[str, Facts], ahead_s: Mapping[str, float]) -> list[Problem]:
    """Return what the user should know although the run starts."""
    return [each for each in judged(plan, facts, ahead_s) if each.order is Order.NOTE]


def error_of(found: Iterable[Problem]) -> SubmissionError:
    """Return the error for problems: the first is the message, the others are hints."""
    first, *others = found
    error = SubmissionError(str(first), hint=(first.hint, *(f"also {each}" for each in others)))
    error.exit_code = first.exit_code
    return error


def busy(host: str, lock: str, holder: Holder, job_id: str) -> Problem:
    """Explain a lock that a host could not take: a GPU's, or the one of this job."""
    if lock == job_lock(job_id):
        return Problem(
            hosts=(host,),
            text=f"the same machine as {holder.host or str(holder)}",
            hint="name each machine once in hosts:",
            order=Order.SAME_HOST,
            exit_code=Exit.USAGE,
        )
    text = f"GPU {lock.removeprefix('clusterrun-gpu-')} is held by {holder}"
    hint = "wait until that run ends, or choose other hosts (--hosts)"
    return Problem(hosts=(host,), text=text, hint=hint, order=Order.BUSY)


def gpus_to_lock(plan: Plan, facts: Facts) -> list[str]:
    """Return the UUIDs (or names) of the GPUs that a run may use on a host.

    If they are unknown, all runs over ssh use the first ones; an allocation's are its own.
    """
    found = facts["gpus"]
    if "unknown" in found and plan.cluster.scheduler.outlives_shell:
        return [str(number) for number in range(gpus_needed(plan))]
    free = [gpu for gpu in found.get("all", []) if not gpu["problem"] and not _user(gpu)]
    return [gpu["uuid"] or gpu["name"] for gpu in free]


def _software(facts: Facts) -> Iterator[Found]:
    for name in NEEDED if "versions" not in facts["late"] else ():
        if not facts["versions"].get(name):
            hint = f"install it there: {facts['executable']} -m pip install {name}"
            yield Order.PACKAGE, missing_text(facts["executable"], [name]), hint


def _files(facts: Facts) -> Iterator[Found]:
    for path in facts["missing"]:
        hint = "copy it there, or submit from a directory that all hosts share"
        yield Order.FILES, f"{path} does not exist there", hint
    for check in facts["checks"]:
        is_own = not facts["sees_home"] and check["id"].startswith("path.")
        yield Order.DISK, check["text"], ELSEWHERE if is_own else check["hint"]
    if {"missing", "checks", "sees_home"}.intersection(facts["late"]):
        yield Order.FILES, "a file system does not answer there", "run df there to find it"


def _clock(ahead_s: float, first: str) -> Iterator[Found]:
    if abs(ahead_s) >= CLOCK_NOTE_S:
        order = Order.CLOCK if abs(ahead_s) > CLOCK_S else Order.NOTE
        text = f"its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        yield order, f"{text} that of {first}", "set it there with chronyc makestep or timedatectl"


def _gpus(plan: Plan, facts: Facts) -> Iterator[Found]:
    if plan.device is not Device.CUDA:
        return
    found, needed = facts["gpus"], gpus_needed(plan)
    known = found.get("all", [])
    usable = [gpu for gpu in known if not gpu["problem"]]
    free = [gpu for gpu in usable if not _user(gpu)]
    driver = found.get("problem", "")
    if "gpus" in facts["late"]:
        yield Order.GPUS, "NVIDIA's driver does not answer there", "run nvidia-smi there"
    elif found.get("unknown"):
        text = f"its GPUs are not checked: {found['unknown']}"
        yield Order.NOTE, text, "install clusterrun[train] there"
    elif len(usable) < needed:
        silent = [f"GPU {gpu['name']}: {gpu['problem']}" for gpu in known if gpu["problem"]]
        why = "; ".join(filter(None, [driver, *silent]))
        text = f"{count(len(usable), 'GPU')}, but {needed} are needed{f' ({why})' if why else ''}"
        hint = "lower --gpus-per-node, leave the host out, or pass --device cpu to use no GPU"
        yield Order.GPUS, text, hint
    elif len(free) < needed:
        users = "; ".join(f"GPU {gpu['name']}: {_user(gpu)}" for gpu in usable if _user(gpu))
        text = f"{len(free)} of {count(len(usable), 'GPU')} free, but {needed} are needed: {users}"
        yield Order.BUSY, text, _FREE_GPUS
    for gpu in free:
        for process in gpu["processes"]:
            text = f"GPU {gpu['name']} also serves a screen: {_described(process)}"
            yield Order.NOTE, text, _FREE_GPUS


def closed_port(hosts: Sequence[str], to: str, port: int, reason: str) -> Problem:
    """Explain that hosts do not reach a port of another."""
    text = f"port {port} of {to} cannot be reached ({reason})"
    hint = "open ports between the hosts, and pass them: --set network.port_range=LOW-HIGH"
    return Problem(hosts=tuple(hosts), text=text, hint=hint, order=Order.CLOSED_PORTS)


def gpus_needed(plan: Plan) -> int:
    """Return how many GPUs each host must have free."""
    return plan.gpus_per_node or plan.procs_per_node


def _user(gpu: Facts) -> str:
    """Return who uses a GPU; "" if it is free."""
    if gpu["holder"]:
        return str(Holder(**gpu["holder"]))
    return ", ".join([_described(each) for each in gpu["processes"] if not _is_screen(each)])


def _is_screen(process: Facts) -> bool:
    return process["command"] in _SCREENS and process["bytes"] < SMALL_BYTES


def _described(process: Facts) -> str:
    owner = f"{process['command']} of {process['user']}" if process["user"] else "not visible there"
    return f"process {process['pid']} ({owner}, {gib(process['bytes'])})"


def _mixed(facts: Mapping[str, Facts]) -> Iterator[tuple[Found, list[str]]]:
    """Yield what differs between hosts; those that lack a package are left out."""
    has_all = [host for host in facts if all(map(facts[host]["versions"].get, NEEDED))]
    known = {host: _compared(facts[host]) for host in has_all}
    for each in differences(known):
        if each.severity is Severity.FAIL:  # an attempt does not start with different versions
            yield (Order.PACKAGE, each.text, _SAME), [*known]
        elif each.severity is Severity.NOTE and each.id == "same.gpu":
            yield (Order.NOTE, each.text, "the slowest one sets the pace"), [*known]
    apart = [host for host, each in facts.items() if not each["sees_home"]]
    if apart and len(apart) < len(facts) - 1:
        text = "the run directory is not shared there, so checkpoints stay there"
        yield (Order.NOTE, text, ""), apart


def _compared(facts: Facts) -> dict[str, str]:
    models = {gpu["model"] or "" for gpu in facts["gpus"].get("all", [])}
    return {
        "gpu.GPUs": ", ".join(sorted(models)) or "unknown",
        "versions.python": facts["python"],
        **{f"versions.{name}": facts["versions"][name] for name in NEEDED},
    }
