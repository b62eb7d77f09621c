"""What cannot run is refused in one line that names the host; nothing is left anywhere."""

from __future__ import annotations

import platform
import re
import signal
import subprocess
import time

import pytest

from clusterrun.backends.hosts.openssh import Refusal
from tests.hosts import LAPTOP, Hosts
from tests.hosts.machine import PYTHON
from tests.patience import patience, wait_for
from tests.ssh.submitting import QUICK_S, nothing_left, refusal, refusals, start, submit, wrap

pytestmark = pytest.mark.ssh

UNKNOWN = f"{Refusal.UNKNOWN_HOST.value}: .*h9.*"
NO_KEY = f"{Refusal.UNKNOWN_KEY.value}: Host key verification failed."
CHANGED = f"{Refusal.CHANGED_KEY.value}: Host key verification failed."
DENIED = rf"{Refusal.DENIED.value}: \S+: Permission denied \(publickey\)\."
SILENT = f"{Refusal.SILENT.value}: .*timed out"
ENDED = f"{Refusal.ENDED.value}: no message"
NO_CLUSTERRUN = f"{Refusal.NO_CLUSTERRUN.value}: .*"


def test_logins_that_fail_are_named(hosts: Hosts) -> None:
    hosts.revoke("h1", "h4")
    hosts.forget(LAPTOP, "h2")
    hosts.change_host_key("h3")
    hosts.add_name("gpu1", "h1")
    wait_for(lambda: "CHANGED" in hosts.laptop.run(["ssh", "h3", "true"]).stderr, "another key")
    refusals(
        hosts,
        {
            "h9,h1": (5, f"h9: {UNKNOWN}"),
            "h1,h9": (5, f"h1 cannot log in to h9: {UNKNOWN}"),
            "h2,h1": (5, f"h2: {NO_KEY}"),
            "h1,h3": (5, f"h1 cannot log in to h3: {CHANGED}"),
            "h1,h4": (5, f"h1 cannot log in to h4: {DENIED}"),
            "h1,gpu1": (2, "gpu1 is the same machine as h1"),
        },
    )


@pytest.mark.long
def test_a_silent_host_is_named_soon(hosts: Hosts) -> None:
    hosts.cut("h2")
    hosts["h3"].freeze()
    for names, error in {
        "h1,h2": f"h1 cannot log in to h2: {SILENT}",
        "h2,h1": f"h2: {SILENT}",
        "h1,h3": f"h1 cannot log in to h3: {SILENT}",
    }.items():
        begin = time.monotonic()
        refusals(hosts, {names: (5, error)})
        assert time.monotonic() - begin < QUICK_S * patience()


def test_closed_ports_are_named(hosts: Hosts) -> None:
    hosts.close_ports("h2", "1024-65535", silently=False)
    code, error, hint = refusal(submit(hosts, "--hosts", "h1,h2,h3"))
    assert code == 1
    assert error.startswith("h1: port ")
    assert error.endswith(" of h2 cannot be reached (Connection refused)")
    assert "network.port_range" in hint
    nothing_left(hosts)


def test_software_that_differs_is_named(hosts: Hosts) -> None:
    wrap(hosts, ("h1",), f'exec {PYTHON} "$@"')
    other = "import platform\nplatform.python_version = lambda: '3.12.1'\n"
    hosts["h2"].write("fake/sitecustomize.py", other)
    wrap(hosts, ("h2",), f'PYTHONPATH=$HOME/fake exec {PYTHON} "$@"')
    code, error, hint = refusal(submit(hosts, "--hosts", "h1,h2", "--python", "~/py"))
    assert code == 1
    assert error.startswith("h[1-2]: python: h")
    assert {"h2 has 3.12.1", f"h1 has {platform.python_version()}"} == {*error[16:].split(", ")}
    assert "--python" in hint
    wrap(hosts, ("h2",), 'exec /usr/bin/python3 -I -S "$@"')
    code, error, hint = refusal(submit(hosts, "--hosts", "h1,h2", "--python", "~/py"))
    assert code == 1
    assert re.fullmatch(f"h2: {NO_CLUSTERRUN}", error), error
    assert "--python" in hint
    nothing_left(hosts)


@pytest.mark.long
def test_a_login_script_may_print_but_not_exit(hosts: Hosts) -> None:
    for name in ("h1", "h2"):
        hosts[name].write(".bashrc", "echo Welcome; printf '{no newline'\n")
    hosts["h3"].write(".bashrc", "exit 0\n")
    error = f"h3: {ENDED}"
    refusals(hosts, {"h3,h1": (1, error), "h1,h2,h3": (1, error)})


@pytest.mark.long
def test_a_full_disk_is_named(hosts: Hosts) -> None:
    hosts.share(LAPTOP)
    hosts["h2"].small_disk("/home/ann2/clusterrun", 1)
    code, error, hint = refusal(submit(hosts, "--hosts", "h1,h2"))
    assert code == 1
    assert error.startswith("h2: only ")
    assert hint == "free space on the host, or name another directory: --set hosts_dir=DIR"
    nothing_left(hosts)


def test_ctrl_c_during_submit_leaves_nothing(hosts: Hosts) -> None:
    process = start(hosts, "--hosts", "h1,h2", "hello.py")
    wait_for(lambda: hosts["h2"].processes(), "a courier", every_s=0.01)
    interrupted(hosts, process)


def interrupted(hosts: Hosts, process: subprocess.Popen[str]) -> None:
    hosts.laptop.signal(process, signal.SIGINT)
    _, err = process.communicate(timeout=60 * patience())
    assert (process.returncode, err.splitlines()[-1]) == (130, "interrupted")
    nothing_left(hosts)


@pytest.mark.long
def test_a_link_that_dies_during_submit_leaves_nothing(hosts: Hosts) -> None:
    hosts.share(LAPTOP)
    hosts.cut("h3")  # so it takes long enough
    process = start(hosts, "--hosts", "h1,h2,h3", "hello.py")
    wait_for(lambda: any("courier" in str(p.argv) for p in hosts["h2"].processes()), "a courier")
    hosts.cut(LAPTOP)
    _, err = process.communicate(timeout=120 * patience())
    assert process.returncode == 5, err
    assert f"error: h1: {Refusal.OTHER.value}: " in err
    hosts.heal("h3")
    hosts.heal(LAPTOP)
    nothing_left(hosts)
