"""Write failure.svg and top.svg: kill a rank of a real run, and show what clusterrun prints.

    python docs/images/capture.py [DIRECTORY]

What is shown is what the commands print, with the names of this machine and its directories
replaced, and each line cut at `COLUMNS`.
"""

from __future__ import annotations

import contextlib
import fcntl
import html
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
CLUSTERRUN = Path(sys.executable).with_name("clusterrun")
COLUMNS = 100
KILL_AT = 33
SUBMIT = "clusterrun submit --nodes 2 --gpus-per-node 2 train_lm.py --max-steps 120 --save-every 20"
HERE_ALONE = ["--cluster", "local", "--device", "cpu", "--job-name", "demo"]
TOP = "clusterrun top"
SHOWN = ("clusterrun status", "clusterrun logs --errors --attempt 1 -n 3")
DARK = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "36": "#79c0ff", "2": "#8b949e"}
LIGHT = {"31": "#cf222e", "32": "#116329", "33": "#7d4e00", "36": "#0969da", "2": "#59636e"}
ANSI = re.compile(r"\x1b\[([\d;]*)m")
STYLE = "font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
LINE_PX, CHAR_PX, MARGIN_PX = 18, 7.85, 16


def main(target: Path) -> None:
    """Run, kill, wait, and write the pictures."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, lines in screens(Path(scratch)).items():
            (target / f"{name}.svg").write_text(picture(lines))


def screens(scratch: Path) -> dict[str, list[str]]:
    """Return what the commands of each picture print, by its name."""
    project = scratch / "project"
    shutil.copytree(EXAMPLES, project, ignore=shutil.ignore_patterns("runs"))
    lines = [f"$ {SUBMIT}", *_run(project, _local(SUBMIT.split())).splitlines()]
    _await(project, KILL_AT)
    top = [f"$ {TOP}", *_shown(project, TOP)]
    _kill_a_rank(project)
    _run(project, ["clusterrun", "status", "demo", "--wait"])
    lines += ["\x1b[2m# one of the four ranks is killed: kill -9\x1b[0m"]
    for command in SHOWN:
        lines += ["", f"$ {command}", *_shown(project, command)]
    names = {
        str(project): "~/project",
        str(Path(click.__file__).parents[1]): "site-packages",
        socket.gethostname(): "laptop",
    }
    return {
        name: [_renamed(line, names) for line in each]
        for name, each in {"failure": lines, "top": top}.items()
    }


def _shown(project: Path, command: str) -> list[str]:
    """Return what a command prints on a terminal of so many columns; `top` only once."""
    ours, theirs = os.pipe() if command == TOP else pty.openpty()
    if command != TOP:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    argv = [str(CLUSTERRUN), *command.split()[1:], "--color", "always"]
    with subprocess.Popen(argv, cwd=project, env=_env(project), stdout=theirs, stderr=theirs):
        os.close(theirs)
        data = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while block := os.read(ours, 1 << 16):
                data += block
    os.close(ours)
    return data.decode().splitlines()


def _local(words: list[str]) -> list[str]:
    return [*words[:2], *HERE_ALONE, *words[2:]]


def _run(project: Path, words: list[str]) -> str:
    argv, env = [str(CLUSTERRUN), *words[1:]], _env(project)
    to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(argv, cwd=project, env=env, text=True, check=True, **to).stdout


def _env(project: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(project.parent / "state"), "TERM": "xterm-256color"}


def _await(project: Path, step: int) -> None:
    """Wait until the run is past a step, and its nodes have sampled what they use."""
    run = project / "runs/demo"
    while not any(_has_come_to(path, step) for path in run.glob("*/events/local0.jsonl")):
        time.sleep(0.1)


def _kill_a_rank(project: Path) -> None:
    for path in (project / "runs/demo").glob("*/events/local1.jsonl"):
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
    """Return lines with ANSI colours as an SVG, for light and dark pages."""
    width = int(COLUMNS * CHAR_PX + 2 * MARGIN_PX)
    height = len(lines) * LINE_PX + 2 * MARGIN_PX
    rows = (_row(MARGIN_PX + (n + 0.75) * LINE_PX, line) for n, line in enumerate(lines))
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} xml:space="preserve">'
    light = _colours("#ffffff", "#1f2328", LIGHT)
    only = f"@media (prefers-color-scheme: light) {{ {light} }}"
    kept = "text { white-space: pre }"  # browsers do not pass it down to text
    style = f"<style>{kept} {_colours('#0d1117', '#e6edf3', DARK)} {only}</style>"
    box = '<rect width="100%" height="100%" rx="8"/>'
    return "\n".join([head, style, box, f'<g style="{STYLE}">', *rows, "</g></svg>\n"])


def _colours(page: str, text: str, colours: dict[str, str]) -> str:
    rules = {"rect": page, "text": text, **{f".c{code}": each for code, each in colours.items()}}
    return " ".join(f"{name} {{ fill: {colour} }}" for name, colour in rules.items())


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
    name = next((word for word in words if word in DARK), "")
    return weight + (f' class="c{name}"' if name else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
