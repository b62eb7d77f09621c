"""The controller's connections to the couriers of its hosts."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from clusterrun.backends.hosts import judge, mirror
from clusterrun.backends.hosts.courier import ALIVE_S
from clusterrun.backends.hosts.openssh import BYE_S, MEET_S, Connection
from clusterrun.backends.hosts.start import Frame
from clusterrun.errors import ClusterrunError, NodeExit, SubmissionError

AT_ONCE = 32
PING_S = 5.0


@dataclass(kw_only=True)
class Link(Connection):
    """The connection to one host's courier.

    `code` is how its node ended in `attempt`, None while it runs; `ahead_s` is how far its clock is
    ahead. `receiver` gets the files of a host that does not share the run directory.
    """

    host: str
    attempt: int = 0
    code: int | None = 0
    receiver: mirror.Receiver | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    ahead_s: float = 0.0
    _heard: threading.Event = field(default_factory=threading.Event)

    @property
    def is_apart(self) -> bool:
        """Return whether the host keeps a run directory of its own."""
        return self.receiver is not None

    def open(self, **wanted: Any) -> None:
        """Start the courier and ask for the host's facts. Raises ClusterrunError."""
        self.start()
        try:
            self.facts = self.ask("facts", within_s=MEET_S, **wanted)["facts"]
        except ClusterrunError as error:
            raise self.explained() from error
        if not self.first:  # SSH_CONNECTION is about a login of the user
            self.facts |= {"client": "", "server": ""}
        self.ahead_s = self.facts["time"] - time.time()
        self.is_met = True
        threading.Thread(target=self._show_life, args=(self.process,), daemon=True).start()

    def answered(self, within_s: float) -> dict[str, Any]:
        """Return the next answer. Raises ClusterrunError if there is none, or for a failure."""
        fields = super().answered(within_s)
        if "failed" in fields:
            raise SubmissionError(
                f"{self.name}: cannot write the run", cause=fields["failed"], hint=judge.ELSEWHERE
            )
        return fields

    def check(self) -> None:
        """Give the host up unless its courier answers."""
        self._heard.clear()
        self.send("alive")
        if self.is_lost or not self._heard.wait(PING_S):
            self.close(within_s=0.0)

    def _show_life(self, process: subprocess.Popen[bytes]) -> None:
        """Show the courier that this process lives, also while others are made ready."""
        while self.process is process and process.poll() is None:
            self.send("alive")
            time.sleep(ALIVE_S)

    def take(self, message: Frame) -> None:
        """Take a message of the courier."""
        super().take(message)
        self._heard.set()
        if message.kind == "ended" and message.fields["attempt"] == self.attempt:
            self.code = message.fields["code"]
        elif message.kind == "ask" and self.receiver and (wanted := self.receiver.wants()):
            self.send("wants", **wanted)
        elif message.kind == "file" and self.receiver:
            self.receiver.take(message)

    def lose(self) -> None:
        """Notice that the courier is gone."""
        if self.code is None:
            self.code = int(NodeExit.NODE_LOST)
        super().lose()


def on_all(links: Sequence[Link], deed: Callable[[Link], object]) -> dict[str, ClusterrunError]:
    """Do something with all hosts at once; return the errors by host."""

    def one(link: Link) -> dict[str, ClusterrunError]:
        try:
            deed(link)
        except ClusterrunError as error:
            return {link.name: error}
        return {}

    with ThreadPoolExecutor(min(AT_ONCE, max(1, len(links)))) as pool:
        return {name: each for found in pool.map(one, links) for name, each in found.items()}


def end_all(links: Sequence[Link], *, forget: bool = False) -> None:
    """Let all couriers end at once; with `forget` they remove what they wrote for this job."""
    for link in links:
        link.send("bye", forget=forget)
    until = time.monotonic() + BYE_S
    for link in links:
        link.close(max(0.5, until - time.monotonic()))
