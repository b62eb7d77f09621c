"""The verdict of a site's command on a node, in each format that is known."""

from __future__ import annotations

import json
import resource
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.health import site
from clusterrun.health.site import site_verdict
from clusterrun.shared.finding import Finding
from tests.patience import patience


def verdict(tmp_path: Path, text: str, rc: int = 0, err: str = "") -> Finding:
    """Run a command with this output and exit status."""
    (tmp_path / "out").write_bytes(text.encode("utf-8", "surrogateescape"))
    line = f"cat {shlex.quote(str(tmp_path / 'out'))}; echo {shlex.quote(err)} >&2; exit {rc}"
    (tmp_path / "nodecheck").write_text(line)
    return site_verdict(f"bash {shlex.quote(str(tmp_path / 'nodecheck'))}", 10 * patience())


def dcgm(*results: dict[str, Any]) -> str:
    """Return what `dcgmi diag -j` prints."""
    passed = {"name": "Software", "results": [{"status": "Pass"}]}
    failed = {"name": "PCIe", "results": list(results)}
    categories = [
        {"category": "Deployment", "tests": [passed]},
        {"category": "Integration", "tests": [failed]},
    ]
    return json.dumps({"DCGM Diagnostic": {"test_categories": categories}})


BAD_GPU = {"status": "Fail", "gpu_id": "3", "warnings": [{"warning": "Link is 8x, not 16x"}]}
OLD_FORM = {"status": "FAIL", "gpu_ids": "3", "warnings": "Link is 8x, not 16x"}
WARNED = {"status": "Warn", "gpu_id": 3, "info": ["too warm"]}


@pytest.mark.parametrize(
    ("output", "rc", "status", "text"),
    [
        ("", 0, "ok", "bash: exit status 0"),
        ("all is well", 0, "ok", "bash: exit status 0"),
        ("\nERROR:  nhc:  check_ps_loadavg\nmore", 1, "fail", "status 1: ERROR: nhc: check_ps_l"),
        ("", 2, "fail", "bash exited with status 2: on stderr"),
        (dcgm({"status": "Pass"}, {"status": "Skip"}), 0, "ok", "bash: 2 tests passed"),
        (dcgm(BAD_GPU), 0, "fail", "bash: PCIe (GPU 3): Link is 8x, not 16x"),
        (dcgm(OLD_FORM), 226, "fail", "bash: PCIe (GPU 3): Link is 8x, not 16x"),
        (dcgm(WARNED), 0, "note", "bash: PCIe (GPU 3): too warm"),
        (dcgm(WARNED, BAD_GPU), 0, "fail", "Link is 8x"),
        (f"Successfully ran\n{dcgm(BAD_GPU)}", 0, "fail", "PCIe (GPU 3): Link is 8x"),
        (dcgm({"status": "Pass"}), 1, "fail", "bash exited with status 1: on stderr"),
        ('[{"check": "ib", "result": "PASS"}]', 0, "ok", "bash: 1 test passed"),
        ('[{"name": "ib", "result": "fail", "message": "down"}]', 0, "fail", "bash: ib: down"),
        ('{"status": "unhealthy"}', 0, "fail", "bash: fail"),
        ('{"healthy": false, "reason": "no NVLink"}', 0, "fail", "bash: no NVLink"),
        ('{"gpu0": {"Health": "Healthy"}, "n": 3}', 0, "ok", "bash: 1 test passed"),
        ('{"a": "fail", "status": 7, "state": "idle"}', 0, "ok", "bash: exit status 0"),
        ('{"status": "fail"', 0, "ok", "bash: exit status 0"),
        ("[" * 100_000, 0, "ok", "bash: exit status 0"),
        ('{"a":' * 950 + '{"status": "pass"}' + "}" * 950, 0, "ok", "bash: "),
    ],
)
def test_the_verdict(tmp_path: Path, output: str, rc: int, status: str, text: str) -> None:
    found = verdict(tmp_path, output, rc, "on stderr")
    assert (found.id, found.severity.value) == ("node.site", status), found
    assert text in found.text
    assert bool(found.fix) == (status in ("note", "fail"))


def test_the_output_of_a_command_is_data(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x1b[31mred\u202e " + "x" * 5000
    for text in (evil, json.dumps([{"status": "fail", "message": evil, "name": evil}])):
        found = verdict(tmp_path, text, 1)
        assert found.severity.value == "fail"
        assert found.text.isprintable()
        assert len(found.text) < 500


def test_many_failures_are_few_words(tmp_path: Path) -> None:
    rows = [{"name": f"t{number}", "status": "fail"} for number in range(3000)]
    assert verdict(tmp_path, json.dumps([{"status": "fail"}, *rows])).text == "bash: t0; 2999 more"
    rows = [{"name": "a", "status": "fail"}, {"name": "b", "status": "fail", "info": "a reason"}]
    assert verdict(tmp_path, json.dumps(rows)).text == "bash: b: a reason; 1 more"


def test_a_command_that_does_not_answer_is_killed() -> None:
    begin = time.monotonic()
    found = site_verdict("sleep 60", 0.2)
    assert time.monotonic() - begin < 10 * patience()
    assert (found.severity.value, found.text) == ("skip", "sleep did not answer within 0.2 s")


def test_a_command_that_prints_without_end_takes_neither_memory_nor_time() -> None:
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = site_verdict("yes", 1.0)
    assert (found.severity.value, found.text) == ("skip", "yes did not answer within 1 s")
    assert time.monotonic() - begin < 10 * patience()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_command_that_prints_much_is_judged_by_its_status(tmp_path: Path) -> None:
    assert verdict(tmp_path, "[" + "1, " * site.OUTPUT).text == "bash: exit status 0"
    found = verdict(tmp_path, "first line\n" * site.OUTPUT, 7)
    assert found.text == "bash exited with status 7: first line"


def test_a_command_that_is_missing(tmp_path: Path) -> None:
    assert site_verdict("", 1).severity.value == "skip"
    assert site_verdict("'", 1).severity.value == "skip"
    found = site_verdict("no-such-program -j", 1)
    assert (found.severity.value, bool(found.fix)) == ("note", True)
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert site_verdict(str(broken), 1).severity.value == "skip"


def test_slurms_words_are_a_verdict_too(tmp_path: Path) -> None:
    """The command is not Slurm's: such a message is no reason to try again, or to skip."""
    found = verdict(tmp_path, "", 1, "slurmd: Socket timed out")
    assert (found.severity.value, "Socket timed out" in found.text) == ("fail", True)


def test_no_shell_runs() -> None:
    found = site_verdict(f"{sys.executable} -c 'print(1)' ; exit 3", 20 * patience())
    assert found.severity.value == "ok"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["pass", "FAIL", "warn", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["status", "name", "healthy", "info", "y"]), inner)
    ),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([0, 1]))
def test_any_answer_is_read(data: Any, rc: int) -> None:
    found = site._judged("nhc", site.shell.Completed(rc=rc, stdout=json.dumps(data), stderr=""))
    assert found.text
    assert found.severity.value == "fail" or rc == 0
