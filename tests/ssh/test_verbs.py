"""The commands on a run over ssh: from the laptop and from its hosts, with /shared and without."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from tests.checkout import EXAMPLES, listed
from tests.hosts import LAPTOP, Hosts
from tests.patience import patience, wait_for

pytestmark = [pytest.mark.ssh, pytest.mark.torch]

TWO = ("--cluster", "ssh", "--hosts", "h1,h2", "--gpus-per-node", "2", "--device", "cpu")
TINY = ("--width", "16", "--layers", "1", "--log-every", "5")
ENDLESS = ("--max-steps", "100000", "--save-every", "20", *TINY)
# Ranks that train nothing, and save nothing when they are asked to.
IDLE = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"
KEPT = (r" file (/shared|/home/\w+)/(proj|two|clusterrun)/", r" file /home/\w+/\.local/state/")


@dataclass(frozen=True)
class Bench:
    """The hosts, and where the project is on the laptop."""

    hosts: Hosts
    project: str

    @property
    def is_shared(self) -> bool:
        return self.project.startswith("/shared")

    def try_to(
        self, *words: str, on: str = LAPTOP, cwd: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run clusterrun in the project, or elsewhere in the home on a host that has none."""
        here = self.project if on == LAPTOP or self.is_shared else None
        return self.hosts[on].run(["clusterrun", *words], cwd=cwd or here, timeout_s=120)

    def do(self, *words: str, on: str = LAPTOP, cwd: str | None = None) -> str:
        done = self.try_to(*words, on=on, cwd=cwd)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def status(self, job_id: str, *, on: str = LAPTOP) -> Any:
        return json.loads(self.do("status", "--json", job_id, on=on))

    def listed(self, *, on: str = LAPTOP) -> dict[str, str]:
        jobs = json.loads(self.do("list", "--all", "--json", on=on))["jobs"]
        return {job["job_id"]: job["state"] for job in jobs}

    def submit(self, *words: str, cwd: str | None = None) -> str:
        return self.do("submit", "--parsable", *words, cwd=cwd).strip()

    def wait_for_step(self, job_id: str, step: int) -> None:
        wait_for(lambda: (self.status(job_id)["progress"]["step"] or 0) >= step, f"step {step}")

    def wait_for_end(self, job_id: str) -> str:
        def ended() -> str:
            state = str(self.status(job_id)["state"])
            return state if state not in ("PENDING", "RUNNING", "COMPLETING") else ""

        return wait_for(ended, f"{job_id} to end")

    def leftovers(self) -> list[str]:
        """Return all but the run directories, the projects and what clusterrun remembers."""
        # The controller ends shortly after it has recorded the end of the run.
        wait_for(lambda: "hosts.controller" not in str(self.hosts.leftovers(*KEPT)), "its exit")
        found = self.hosts.leftovers(*KEPT)
        return found + [line for line in self.hosts.leftovers() if "/.home-" in line]


@pytest.fixture(params=["shared", "apart"])
def bench(request: pytest.FixtureRequest, hosts: Hosts) -> Bench:
    is_shared = request.param == "shared"
    if not is_shared:
        hosts.share()
    project = "/shared/proj" if is_shared else "/home/ann/proj"
    hosts.laptop.run(["mkdir", project], check=True)
    names = [str(path.relative_to(EXAMPLES)) for path in listed(EXAMPLES)]
    hosts.laptop.run(["cp", "--parents", *names, project], cwd=str(EXAMPLES), check=True)
    hosts.laptop.write(f"{project}/idle.py", IDLE)
    return Bench(hosts=hosts, project=project)


@pytest.mark.parametrize("bench", ["apart"], indirect=True)
def test_two_hosts_form_one_world_of_four_ranks(bench: Bench) -> None:
    done = bench.try_to("submit", *TWO, "--follow", "train_lm.py", "--max-steps", "5", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "world 4 ranks on 2 hosts" in done.stdout
    assert "step 5/5" in done.stdout
    job = bench.status("train-lm")
    assert (job["state"], job["proven_world_size"], job["nodelist"]) == ("COMPLETED", 4, "h[1-2]")
    assert bench.status(job["job_id"], on="h2")["run_id"] == job["run_id"]
    assert bench.leftovers() == []


@pytest.mark.long
def test_a_training_is_stopped_and_resumed_from_every_machine(bench: Bench) -> None:
    first = bench.submit(*TWO, "train_lm.py", *ENDLESS)
    bench.wait_for_step(first, 5)
    for machine in (LAPTOP, "h1", "h2"):
        job = bench.status(first, on=machine)
        assert (job["state"], job["nodelist"], job["world_size"]) == ("RUNNING", "h[1-2]", 4)
        assert "step 5/" in bench.do("logs", "-n", "all", first, on=machine)
        assert bench.listed(on=machine) == {first: "RUNNING"}
    refused = bench.try_to("resume", first, on="h2")
    assert (refused.returncode, "still RUNNING" in refused.stderr) == (2, True)

    follower = bench.hosts.laptop.start(["clusterrun", "logs", "-f", first], cwd=bench.project)
    bench.do("cancel", "--checkpoint", first, on="h2")
    assert bench.wait_for_end(first) == "CANCELLED"
    assert "asked to save and exit" in follower.communicate(timeout=60 * patience())[0]
    saved = bench.status(first)["attempts"][0]["checkpoint"]
    assert saved

    second = bench.do("resume", "--parsable", first, on=LAPTOP).strip()
    bench.wait_for_step(second, saved + 1)
    assert f"at step {saved}" in bench.do("logs", "-n", "all", second)
    bench.do("cancel", second, on="h2")
    assert bench.wait_for_end(second) == "CANCELLED"
    assert "cancelled the job" in bench.try_to("diagnose", second, on="h2").stdout

    # Other settings, and another host if the checkpoint is there.
    third_host = "h3" if bench.is_shared else "h2"
    args = ("--override", "max_steps", "--max-steps", "100000", *TINY)
    resumed = bench.try_to("resume", second, "--hosts", f"h1,{third_host}", "--", *args)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    wait_for(lambda: bench.status("train-lm")["job_id"] != second, "the third job")
    third = bench.status("train-lm")
    bench.wait_for_step(third["job_id"], saved + 1)
    assert bench.status("train-lm")["nodelist"] == f"h[1,{third_host[1]}]".replace("1,2", "1-2")
    bench.do("cancel", third["job_id"])
    assert bench.wait_for_end(third["job_id"]) == "CANCELLED"
    assert len({first, second, third["job_id"]}) == 3
    assert bench.leftovers() == []


@pytest.mark.long
def test_what_needs_a_queue_or_a_shared_directory(bench: Bench) -> None:
    chain = bench.try_to("submit", *TWO, "--chain", "2", "idle.py")
    assert (chain.returncode, "a chain needs a queue" in chain.stderr) == (2, True)
    words = ("--nodes", "1,2", "--yes", "train_lm.py", "--max-steps", "200", *TINY)
    scaling = bench.try_to("scaling", *TWO, *words)
    doctor = bench.try_to("doctor", "--nodes", "2", *TWO, "--json")
    if bench.is_shared:
        assert scaling.returncode == 0, scaling.stderr
        assert doctor.returncode == 0, doctor.stderr
        return
    for done in (scaling, doctor):
        assert done.returncode == 2
        assert "h1 can't see the run directory" in done.stderr
    assert bench.hosts.leftovers(r"laptop: file ") == []
    first = bench.submit(*TWO, "idle.py")
    bench.do("cancel", first)
    assert bench.wait_for_end(first) == "CANCELLED"
    again = bench.do("resubmit", "--parsable", first).strip()
    assert again != first
    bench.do("cancel", again)
    assert bench.wait_for_end(again) == "CANCELLED"
