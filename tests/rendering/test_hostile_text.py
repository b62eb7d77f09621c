"""Any text of a user arrives on the node as the same bytes, and none of it runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from clusterrun.config.spec import JobSpec
from clusterrun.launch.make import make_plan
from clusterrun.launch.plan import Plan
from clusterrun.rundir.paths import directory_name
from tests.launch.samples import slurm_facts
from tests.rendering.job import make_site, rendered
from tests.rendering.strategies import LINE, TEXT

EXAMPLES = 10 if settings().derandomize else 40  # each runs a whole batch script
NAMES = st.from_regex(r"X_[A-Za-z0-9_]{0,12}", fullmatch=True).filter(
    lambda name: not name.upper().endswith(("TOKEN", "KEY"))
)
FILE_NAME = LINE.filter(
    lambda text: "/" not in text and text not in ("", ".", "..") and len(text.encode()) < 200
)


@settings(max_examples=EXAMPLES)
@given(
    env=st.dictionaries(NAMES, TEXT, max_size=8),
    args=st.lists(TEXT, max_size=8),
    name=FILE_NAME,
    script=FILE_NAME,
    workdir=FILE_NAME,
    comment=FILE_NAME,
)
def test_any_text_arrives_and_never_runs(
    env: dict[str, str], args: list[str], name: str, script: str, workdir: str, comment: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        site = make_site(Path(directory))
        place = site.root / workdir
        place.mkdir(exist_ok=True)
        facts = slurm_facts(
            workdir=str(place), runs_dir=str(place / "runs"), python=str(site.stubs / "python")
        )
        spec = JobSpec(script=script, args=tuple(args), name=name, env=env, comment=comment)
        plan = make_plan(spec, facts)
        done = site.run(rendered(plan))
        assert (done.returncode, done.stderr) == (0, "")
        found = site.env_of("python.agent.0.env")
        assert {key: found[os.fsencode(key)] for key in env} == {
            key: os.fsencode(value) for key, value in env.items()
        }
        run_dir = place / "runs" / directory_name(name) / "4711"
        assert site.got("python.agent.0.args")[-4:-2] == [os.fsencode(run_dir), b"1"]
        carried = Plan.from_json((run_dir / "plan.json").read_text())
        assert carried == plan
        assert carried.entry[1:] == tuple(args)
        assert (site.stubs / "python.agent.0.cwd").read_bytes() == os.fsencode(place)
        made = {path.name for path in place.iterdir()} | {path.name for path in site.root.iterdir()}
        assert not made & {"canary"} - {workdir}
