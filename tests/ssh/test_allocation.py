"""`--cluster allocation` as in PBS, LSF and Flux: on hosts, with stand-ins for their programs."""

from __future__ import annotations

import re

import pytest

from tests.hosts import Hosts
from tests.road import STUB

pytestmark = [pytest.mark.ssh, pytest.mark.long]

HELLO = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)"
PBS = ("PBS_JOBID=1.server", "PBS_NODEFILE=/shared/nodes")
LSF = ("LSB_JOBID=1", "LSB_DJOB_HOSTFILE=/shared/nodes")
FLUX = ("FLUX_URI=local:///run/flux/local",)
# They behave as their manuals say; ssh takes the place of the scheduler's daemons.
PROGRAMS = {
    # As rsh: the words are joined, and a shell reads them.
    "blaunch": """host=$1; shift; exec ssh -oBatchMode=yes $host "$@" """,
    # It passes output on by whole lines.
    "flux": """case $1 in
getattr) echo "h[1-2]" ;;
exec) hosts=(h1 h2); host=${hosts[${2#--rank=}]}; [[ $3 == --dir=/ ]] || exit 1; shift 3
ssh -oBatchMode=yes $host "$(printf '%q ' "$@")" | stdbuf -oL sed '' ;;
esac""",
}


@pytest.mark.parametrize(
    ("environ", "program"),
    [(PBS, ""), (LSF, "blaunch"), (FLUX, "flux")],
    ids=["pbs by ssh", "blaunch", "flux"],
)
def test_the_hosts_of_an_allocation_form_one_world(
    hosts: Hosts, environ: tuple[str, ...], program: str
) -> None:
    first = hosts["h1"]
    first.write("/shared/proj/hello.py", HELLO)
    first.write("/shared/nodes", "h1\nh1\nh2\nh2\n")
    if program:
        first.write(f"/shared/bin/{program}", f"#!/bin/bash\n{PROGRAMS[program]}\n")
        first.run(["chmod", "+x", f"/shared/bin/{program}"], check=True)
    options = (
        "--cluster allocation --gpus-per-node 2 --device cpu --set launch.world_contract=false"
    )
    script = (
        f"export PATH=/shared/bin:$PATH {' '.join(environ)}\n"
        f"clusterrun submit {options} --env PYTHONPATH={STUB} --wait hello.py\n"
        "clusterrun logs -a -o raw"
    )
    done = first.run(["bash", "-ec", script], cwd="/shared/proj", timeout_s=120)
    assert done.returncode == 0, done.stderr
    told = re.findall("^rank . of 4$", done.stdout, re.MULTILINE)
    assert sorted(told) == [f"rank {rank} of 4" for rank in range(4)]
    plan = first.run(["sh", "-c", "cat runs/hello/*/plan.json"], cwd="/shared/proj").stdout
    assert f'"starter":"{program or "ssh"}"' in plan
    kept = (" file /shared/(proj|bin|nodes)", r" file /home/\w+/\.local/state/")
    assert hosts.leftovers(*kept) == []
