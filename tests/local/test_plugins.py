"""What installed packages add to `doctor`, `diagnose` and `explain`, by the example of its page."""

from __future__ import annotations

import re

from tests.checkout import ROOT
from tests.road import Project

PAGE = (ROOT / "docs" / "plugins.md").read_text()
BLOCK = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GROUP = re.compile(r'^\[project\.entry-points\."(.+)"\]\n(.+) = "(.+)"$', re.MULTILINE)
LOG = "step 1\npurge: data.bin was removed from /scratch\n"


def install(here: Project, points: list[tuple[str, str, str]], **modules: str) -> None:
    """Install a package beside clusterrun, as pip would."""
    place = here.path / "packages"
    info = place / "example_site-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example-site\nVersion: 1.0\n")
    groups = {group: "" for group, _, _ in points}
    for group, name, value in points:
        groups[group] += f"{name} = {value}\n"
    text = "\n".join(f"[{group}]\n{lines}" for group, lines in groups.items())
    (info / "entry_points.txt").write_text(text)
    for name, module in modules.items():
        (place / f"{name}.py").write_text(module)
    here.extra.update(PYTHONPATH=str(place))


def test_the_package_of_the_page_adds_a_check_and_a_cause(here: Project) -> None:
    files = dict(BLOCK.findall(PAGE))
    install(here, GROUP.findall(files.pop("pyproject.toml")))
    for name, text in files.items():
        file = here.path / "packages" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    (here.path / "job.log").write_text(LOG)
    found = here.cli("diagnose", "job.log").stdout
    assert "A file was purged from scratch (example_scratch_purged)" in found
    assert "within 30 days" in here.ok("explain", "example_scratch_purged")
    listed = here.ok("doctor", "--only", "config.plugins,example")
    assert "checks 'example' of example-site 1.0; causes 'example' of example-site 1.0" in listed
    assert re.search(r"^(ok|note) +example\.runs ", listed, re.MULTILINE)
    assert "full after a few checkpoints" in here.ok("explain", "example.runs")


BROKEN = {
    "one.missing": "ModuleNotFoundError",
    "raises": "RuntimeError: not ours",
    "leaves": "SystemExit: 3",
    "taken": "ValueError: node.shm exists already",
    "half": "NameError: ",
}
TAKEN = """
from clusterrun.health.node import CheckPage, check

page = CheckPage(looks_at="a thing", fails="it is bad", why="It ends.", fix=["mend it"])
check("node.shm", page)(lambda needs: 1 / 0)
"""
BAD = "- {id: ours, means: It is bad., repeats: '(', signs: [purge]}"


def test_a_broken_package_is_one_line(here: Project) -> None:
    points = [("clusterrun.checks", f"n{n}", name) for n, name in enumerate(BROKEN)]
    points += [("clusterrun.causes", "empty", "empty"), ("clusterrun.schedulers", "no", "empty:NO")]
    points += [("clusterrun.causes", "pattern", "pattern"), ("clusterrun.checks", "ours", "ours")]
    modules = {"raises": "raise RuntimeError('not\\nours')", "leaves": "raise SystemExit(3)"}
    modules |= {name: TAKEN.replace("node.shm", f"node.{name}") for name in ("ours", "half")}
    modules["half"] += "nothing\n"
    install(here, points, empty="", taken=TAKEN, **modules)
    (here.path / "packages" / "pattern").mkdir()
    (here.path / "packages" / "pattern" / "bad.yaml").write_text(BAD)
    (here.path / "job.log").write_text(LOG)
    done = here.cli("diagnose", "job.log")
    assert done.returncode == 0
    said = "causes 'empty' of example-site 1.0 cannot be loaded: AttributeError"
    assert [line for line in done.stderr.splitlines() if said in line]
    done = here.cli("doctor", "-v", "--only", "config.plugins,node.shm,node.ours")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    (line,) = (line for line in done.stdout.splitlines() if "config.plugins" in line)
    texts = (*BROKEN.values(), said, "schedulers 'no'", "causes 'pattern'")
    assert [text for text in texts if text not in line] == []
    # What a package adds and then raises is skipped; what could not be loaded does not run.
    assert re.findall(r"^(\w+) +node\.(\w+) .*ZeroDivisionError", done.stdout, re.MULTILINE) == [
        ("skip", "ours")
    ]
