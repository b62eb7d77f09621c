"""Compare the clock of this machine with that of the file server of the runs."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Final

from clusterrun.health.node import CheckPage, Needs, check
from clusterrun.health.paths import LOCAL, existing, file_system
from clusterrun.shared.finding import Finding, note, ok, skip

_NAME: Final = "node.clock"
CLOCK_S: Final = 5.0


@check(
    _NAME,
    CheckPage(
        looks_at="this machine's clock, compared with that of the file server of the runs",
        notes=f"the clocks differ by more than {CLOCK_S:g} s",
        why="Times of files and logs are misleading. If clocks differ by minutes, Munge refuses "
        "Slurm's messages.",
        fix=(
            "check the clock: chronyc tracking, or timedatectl",
            "tell the administrator: NTP may not be running on this machine or the file server",
        ),
    ),
)
def clock(needs: Needs) -> Finding:
    """Set a file to the server's time, and read it. Raises OSError."""
    place = existing(needs.runs)
    if file_system(place) in {*LOCAL, ""}:
        return skip(_NAME, f"{place} is not on a file server")
    before = time.time()
    with tempfile.TemporaryFile(dir=place) as file:
        os.utime(file.fileno())  # to the server's time
        server = os.fstat(file.fileno()).st_mtime
    # The server set its time between `before` and now: the clocks agree if it is within this span.
    off_s = server - min(max(server, before), time.time())
    side = "behind" if off_s > 0 else "ahead of"
    text = f"this machine's clock is {abs(off_s):.1f} s {side} that of {place}'s file server"
    is_off = abs(off_s) > CLOCK_S
    return note(_NAME, text, "check the clock: chronyc tracking") if is_off else ok(_NAME, text)
