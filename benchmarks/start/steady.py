"""What runs beside the ranks while they train: processor time, memory, and a step's time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from benchmarks.report import Section, Value, median, spread
from benchmarks.start import world
from benchmarks.start.back import GIVEN, PAIR, our_words, project
from benchmarks.start.place import SCRIPTS, Place, sbatch, script, settle, wait_for_files
from benchmarks.start.turns import compared, in_turns, ratios
from benchmarks.start.world import ON_CPU, World, rank_step
from tests.cluster.cluster import Cluster

WINDOWS = 3
SLEEP_S = 0.08  # a light step: it mostly waits
STEPS, WARM = 300, 50
OURS, FLOOR, AGAIN = "clusterrun", "srun python", "srun python, again (noise)"
EIGHT = World(nodes=1, procs=8, strategy="ddp", budgets=())
HOLD_S = 300
MIB = 1 << 20
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def steady(place: Place) -> Iterator[Section]:
    """Yield the tables of processor time, step time and memory."""
    yield _processor_time(place)
    yield _step_time(place)
    yield _memory(place)


def _processor_time(place: Place) -> Section:
    cluster, directory = place.cluster(2), project(place, "light")
    job = place.submit(directory, *our_words(directory, SLEEP_S, "--max-steps", "100000"))
    ranks = [directory / "times" / f"1-{rank}.json" for rank in range(2)]
    wait_for_files(ranks, job, cluster)
    time.sleep(10)  # for what follows a start
    training = {json.loads(path.read_text())["pid"] for path in ranks}
    windows = [_window(cluster, training, place.seconds) for _ in range(WINDOWS)]
    cluster.run(["scancel", job])
    settle(cluster, job)
    rows: list[dict[str, Value]] = []
    for node in cluster.nodes:
        each = [100 * sum(window[node].values()) / place.seconds for window in windows]
        names = sorted({name for window in windows for name in window[node]})
        shares = {
            n: median([100 * w[node].get(n, 0.0) / place.seconds for w in windows]) for n in names
        }
        rows.append(
            {
                "node": "the job's first" if node == cluster.nodes[0] else "another",
                "percent of a core": median(each),
                "extremes": spread(each),
                "budget": 1.0,
                "parts": ", ".join(f"{n} {s:.2f}" for n, s in shares.items() if s >= 0.005),
            }
        )
    return Section(
        title="Processor time beside the ranks",
        about=f"The example on 2 nodes x 1 rank, in steps that sleep {SLEEP_S} s, with a line "
        "every 10 steps. All processes of a node but the ranks and Slurm's daemons, over "
        f"{WINDOWS} windows of {place.seconds:.0f} s, by their user and system time. The "
        "first node also has the conductor and srun.",
        rows=rows,
    )


def _window(
    cluster: Cluster, training: Collection[int], seconds: float
) -> dict[str, dict[str, float]]:
    """Return the processor time of each node's processes by name, without the ranks."""
    before = _used(cluster, training)
    time.sleep(seconds)
    after = _used(cluster, training)
    return {
        node: _by_name(
            {
                pid: (name, s - before[node].get(pid, ("", 0.0))[1])
                for pid, (name, s) in found.items()
            }
        )
        for node, found in after.items()
    }


def _by_name(found: dict[int, tuple[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, seconds in found.values():
        total[name] = total.get(name, 0.0) + seconds
    return total


def _used(cluster: Cluster, training: Collection[int]) -> dict[str, dict[int, tuple[str, float]]]:
    return {
        node: {
            process.pid: (role(process.name, process.cmdline), processor_s(process.pid))
            for process in found
            if process.pid not in training
        }
        for node, found in cluster.processes().items()
    }


def role(name: str, command: str) -> str:
    """Return what a process of a node is, by its command line."""
    roles = {"slurm import batch": "conductor", "clusterrun.node agent": "agent"}
    roles |= {"forge.launchers": "launcher", "node.forge": "forge"}
    return next((text for sign, text in roles.items() if sign in command), name)


def processor_s(pid: int) -> float:
    """Return the processor time of a process and of the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * TICK_S


def _step_time(place: Place) -> Section:
    cluster = place.cluster(2)
    contenders: dict[str, Callable[[], float]] = {
        OURS: partial(_our_step_s, place, cluster),
        FLOOR: partial(_bare_step_s, place, cluster),
        AGAIN: partial(_bare_step_s, place, cluster),
    }
    times = in_turns(contenders, place.rounds)
    rows = compared(times, OURS, {})
    noise = ratios(times[AGAIN], times[FLOOR])
    rows[2] |= {"it : srun python": median(noise), "it : srun python, extremes": spread(noise)}
    return Section(
        title="Time of a step",
        about="The example with its default model on 2 nodes x 1 rank, on as many cores as ranks: "
        "agents and ranks compete for them. The median step of each run, on its slower rank, "
        f"without the first {WARM}.",
        rows=rows,
    )


def _our_step_s(place: Place, cluster: Cluster) -> float:
    directory = project(place, "steps")
    job = place.submit(directory, *our_words(directory, 0, "--max-steps", str(STEPS)))
    return _middle_step_s(directory, cluster, job)


def _bare_step_s(place: Place, cluster: Cluster) -> float:
    directory = project(place, "steps")
    words = (str(directory / "timed.py"), str(directory / "times"), "0", "--max-steps", str(STEPS))
    body = rank_step({**GIVEN, **ON_CPU}, PAIR, *words)
    return _middle_step_s(directory, cluster, sbatch(script(directory, body, *PAIR.options)))


def _middle_step_s(directory: Path, cluster: Cluster, job: str) -> float:
    files = [directory / "times" / f"steps-1-{rank}.json" for rank in range(2)]
    wait_for_files(files, job, cluster)
    settle(cluster, job)
    return max(median(json.loads(file.read_text())["steps"][WARM:]) for file in files)


def _memory(place: Place) -> Section:
    """Compare the memory of a node under each launcher."""
    cluster = place.cluster(2)
    contenders: dict[str, Callable[[], dict[str, float]]] = {
        name: partial(_our_memory, place, cluster, options)
        for name, options in place.ways(world.OURS).items()
    }
    contenders[world.FLOOR] = partial(_bare_memory, place, cluster)
    found = in_turns(contenders, max(1, place.rounds // 2))
    whole = {name: [sum(each.values()) for each in turns] for name, turns in found.items()}
    rows: list[dict[str, Value]] = []
    for name, turns in found.items():
        middle = {part: median([each[part] for each in turns]) / MIB for part in turns[0]}
        row: dict[str, Value] = {"what": name, "node_MB": median(whole[name]) / MIB}
        row |= {f"{part}_MB": size for part, size in middle.items()}
        row |= {"ours : it": median(ratios(whole[world.OURS], whole[name])), "turns": len(turns)}
        rows.append(row)
    return Section(
        title="Memory of a node",
        about="The proportional set size (PSS, which divides shared pages among those that share "
        "them) of all processes of one node but Slurm's daemons, with 8 ranks that have joined a "
        "world under DDP and taken a step.",
        rows=rows,
    )


def _our_memory(place: Place, cluster: Cluster, options: tuple[str, ...]) -> dict[str, float]:
    directory = place.fresh("memory")
    words = (
        *(*options, "--cluster", "slurm", "--nodes", "1", "--nproc-per-node", "8"),
        *("--device", "cpu", "--set", "launch.threads_per_process=1", "--time", "10"),
    )
    probe = (str(SCRIPTS / "probe.py"), str(directory), "--hold", str(HOLD_S))
    job = place.submit(directory, *words, *probe)
    return _held(cluster, directory, job)


def _bare_memory(place: Place, cluster: Cluster) -> dict[str, float]:
    directory = place.fresh("memory")
    probe = (str(SCRIPTS / "probe.py"), str(directory), "--hold", str(HOLD_S))
    body = rank_step({**GIVEN, **ON_CPU}, EIGHT, *probe)
    return _held(cluster, directory, sbatch(script(directory, body, *EIGHT.options)))


def _held(cluster: Cluster, directory: Path, job: str) -> dict[str, float]:
    """Return the memory of the ranks that wait, and of all else on the nodes."""
    files = [directory / f"{rank}.json" for rank in range(EIGHT.size)]
    wait_for_files(files, job, cluster)
    ranks = {json.loads(file.read_text())["pid"] for file in files}
    found = [process.pid for each in cluster.processes().values() for process in each]
    sizes = {pid: shared_fairly_bytes(pid) for pid in found}
    (directory / "end").touch()
    settle(cluster, job)
    of_ranks = sum(size for pid, size in sizes.items() if pid in ranks)
    return {"ranks": of_ranks, "others": sum(sizes.values()) - of_ranks}


def shared_fairly_bytes(pid: int) -> float:
    """Return the proportional set size of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
