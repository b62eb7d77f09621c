"""The commands that a user would run instead, for the same query on the same files."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.child import Command
from benchmarks.logs.corpus import RANKS, Corpus

NEEDLE = "CUDA out of memory"
_HERE = Path(__file__).parent


def ours(corpus: Corpus, name: str, *options: str, to_null: bool = False) -> Command:
    """Query clusterrun."""
    argv = [sys.executable, "-m", "clusterrun", "logs", corpus.run_dir, *options]
    return Command(name=name, argv=argv, to_null=to_null)


def cat(corpus: Corpus, name: str = "cat FILES") -> Command:
    """Read all bytes and ignore them: the lower bound for reading all."""
    return Command(name=name, argv=["cat", *corpus.files], to_null=True)


def sort_merge(corpus: Corpus) -> Command:
    """Merge sorted files by time."""
    argv = ["sort", "-m", "-s", "-k1,1n", f"--batch-size={corpus.nodes + 8}", *corpus.files]
    return _in_c(Command(name="sort -m -s -k1,1n FILES", argv=argv, to_null=True))


def cat_sort(corpus: Corpus) -> Command:
    """Sort everything by time."""
    script = 'cat "$@" | LC_ALL=C sort -s -k1,1n'
    return Command(name="cat FILES, sort", argv=_bash(script, corpus.files), to_null=True)


def tails(corpus: Corpus) -> Command:
    """Return the newest 200 lines of all files."""
    script = 'tail -q -n 200 "$@" | LC_ALL=C sort -s -k1,1n | tail -n 200'
    return Command(name="tail -n 200 FILES, sort, tail", argv=_bash(script, corpus.files))


def greps(corpus: Corpus) -> list[Command]:
    """Search all logs for a text, with every tool that is installed."""
    directory = Path(corpus.files[0]).parent
    argv = ["grep", "-rhF", "--exclude=*.err", NEEDLE, str(directory)]
    found = [_in_c(Command(name="grep -rF TEXT", argv=argv))]
    ripgrep = shutil.which("rg")
    if ripgrep:
        argv = [ripgrep, "-INF", "--no-ignore", "-g", "*.log", NEEDLE, str(directory)]
        found.append(Command(name="rg -F TEXT", argv=argv))
    return found


def torchx(python: str, corpus: Corpus, replicas: Path) -> Command:
    """Search with torchx's log command, which reads the files that a job on Slurm leaves."""
    argv = [python, str(_HERE / "torchx_reader.py"), str(corpus.nodes * RANKS), NEEDLE]
    return Command(name="torchx log --regex TEXT", argv=argv, cwd=replicas)


def grep_replicas(replicas: Path) -> Command:
    """Search the same files as torchx."""
    argv = ["grep", "-rhF", NEEDLE, str(replicas)]
    return _in_c(Command(name="grep -rF TEXT, a file a rank", argv=argv))


def _bash(script: str, files: Sequence[str]) -> list[str]:
    return ["bash", "-c", f"set -o pipefail; {script}", "-", *files]


def _in_c(command: Command) -> Command:
    """Compare bytes, not letters: other locales are far slower."""
    env = ["env", "LC_ALL=C"]
    return Command(name=command.name, argv=[*env, *command.argv], to_null=command.to_null)


def allow_many_files() -> None:
    """Let peers open all files together; clusterrun must work within the usual limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
