"""Write failure.svg: kill a rank of a real run, and show what clusterrun prints.

    python docs/images/capture.py [FILE]

What is shown is what the commands print, with the names of this machine and its directories
replaced, and each line cut at `COLUMNS`.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
CLUSTERRUN = Path(sys.executable).with_name("clusterrun")
COLUMNS = 128
KILL_AT = 33
SUBMIT = "clusterrun submit --nodes 2 --gpus-per-node 2 train_lm.py --max-steps 120 --save-every 20"
HERE_ALONE = ["--cluster", "local", "--device", "cpu", "--job-name", "demo"]
SHOWN = ("clusterrun status", "clusterrun logs --errors --attempt 1 -n 3")
COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#79c0ff", "2": "#8b949e"}
ANSI = re.compile(r"\x1b\[([\d;]*)m")
STYLE = "font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre"
LINE_PX, CHAR_PX, MARGIN_PX = 18, 7.85, 16


def main(target: Path) -> None:
    """Run, kill, wait, and write the picture."""
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch) / "project"
        shutil.copytree(EXAMPLES, project, ignore=shutil.ignore_patterns("runs"))
        lines = [f"$ {SUBMIT}", *_run(project, _local(SUBMIT.split())).splitlines()]
        _kill_a_rank(project)
        _run(project, ["clusterrun", "status", "demo", "--wait"])
        lines += [f"\x1b[2m# step {KILL_AT} or so: kill -9 one of the four ranks\x1b[0m"]
        for command in SHOWN:
            printed = _run(project, [*command.split(), "--color", "always"])
            lines += ["", f"$ {command}", *printed.splitlines()]
        names = {
            str(project): "~/project",
            str(Path(click.__file__).parents[1]): "site-packages",
            socket.gethostname(): "laptop",
        }
        target.write_text(picture([_renamed(line, names) for line in lines]))


def _local(words: list[str]) -> list[str]:
    return [*words[:2], *HERE_ALONE, *words[2:]]


def _run(project: Path, words: list[str]) -> str:
    env = {**os.environ, "XDG_STATE_HOME": str(project.parent / "state"), "COLUMNS": str(COLUMNS)}
    argv = [str(CLUSTERRUN), *words[1:]]
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(argv, cwd=project, env=env, text=True, check=True, **to).stdout


def _kill_a_rank(project: Path) -> None:
    """Kill rank 3 once the run is past its first checkpoint."""
    events = project / "runs/demo"
    while not any(_has_come_to(path, KILL_AT) for path in events.glob("*/events/local0.jsonl")):
        time.sleep(0.1)
    for path in events.glob("*/events/local1.jsonl"):
        found = re.search(r'"type": "rank_start".*?"rank": 3, "pid": (\d+)', path.read_text())
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)


def _has_come_to(path: Path, step: int) -> bool:
    return any(int(n) >= step for n in re.findall(r'"step": (\d+)', path.read_text()))


def _renamed(line: str, names: dict[str, str]) -> str:
    for name, shown in names.items():
        line = line.replace(name, shown)
    return line


def picture(lines: list[str]) -> str:
    """Return lines with ANSI colours as an SVG."""
    width = int(COLUMNS * CHAR_PX + 2 * MARGIN_PX)
    height = len(lines) * LINE_PX + 2 * MARGIN_PX
    rows = (_row(MARGIN_PX + (n + 0.75) * LINE_PX, line) for n, line in enumerate(lines))
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} xml:space="preserve">'
    box = '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>'
    return "\n".join([head, box, f'<g style="{STYLE}" fill="#e6edf3">', *rows, "</g></svg>\n"])


def _row(y: float, line: str) -> str:
    return f'<text x="{MARGIN_PX}" y="{y}">{"".join(_spans(line))}</text>'


def _spans(line: str) -> Iterator[str]:
    shown, style = 0, ""
    for n, part in enumerate(ANSI.split(line)):
        if n % 2:
            style = _style(part)
            continue
        text = part[: COLUMNS - shown]
        shown += len(text)
        if text:
            yield f"<tspan{style}>{html.escape(text)}</tspan>"


def _style(codes: str) -> str:
    words = codes.split(";")
    weight = ' font-weight="bold"' if "1" in words else ""
    colour = next((COLOURS[word] for word in words if word in COLOURS), "")
    return weight + (f' fill="{colour}"' if colour else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "failure.svg")
