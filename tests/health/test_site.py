"""The verdict of a site's command on a node, by its exit status."""

from __future__ import annotations

import resource
import shlex
import time
from pathlib import Path

import pytest

from clusterrun.health.site import site_verdict
from clusterrun.shared.finding import Finding
from tests.patience import patience


def verdict(tmp_path: Path, text: str, rc: int = 0, err: str = "") -> Finding:
    """Run a command with this output and exit status."""
    (tmp_path / "out").write_bytes(text.encode("utf-8", "surrogateescape"))
    line = f"cat {shlex.quote(str(tmp_path / 'out'))}; echo {shlex.quote(err)} >&2; exit {rc}"
    (tmp_path / "nodecheck").write_text(line)
    return site_verdict(f"bash {shlex.quote(str(tmp_path / 'nodecheck'))}", 10 * patience())


@pytest.mark.parametrize(
    ("output", "rc", "status", "text"),
    [
        ("", 0, "ok", "bash: exit status 0"),
        ("all is well", 0, "ok", "bash: exit status 0"),
        ("\nERROR:  nhc:  check_ps_loadavg\nmore", 1, "fail", "status 1: ERROR: nhc: check_ps_l"),
        ("", 2, "fail", "bash exited with status 2: on stderr"),
    ],
)
def test_the_verdict(tmp_path: Path, output: str, rc: int, status: str, text: str) -> None:
    found = verdict(tmp_path, output, rc, "on stderr")
    assert (found.id, found.severity.value) == ("node.site", status), found
    assert text in found.text
    assert bool(found.fix) == (status in ("note", "fail"))


def test_the_output_of_a_command_is_data(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x1b[31mred\u202e " + "x" * 5000
    found = verdict(tmp_path, evil, 1)
    assert found.severity.value == "fail"
    assert found.text.isprintable()
    assert len(found.text) < 500


def test_a_command_that_prints_without_end_takes_neither_memory_nor_time() -> None:
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = site_verdict("yes", 1.0)
    assert (found.severity.value, found.text) == ("skip", "yes did not answer within 1 s")
    assert time.monotonic() - begin < 10 * patience()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_command_that_is_missing(tmp_path: Path) -> None:
    assert site_verdict("'", 1).severity.value == "skip"
    found = site_verdict("no-such-program -j", 1)
    assert (found.severity.value, bool(found.fix)) == ("note", True)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert site_verdict(str(broken), 1).severity.value == "skip"
