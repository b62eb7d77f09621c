"""A node's part in what all nodes of a smoke job do at the same moment."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from clusterrun.health import reports, storage
from clusterrun.launch.plan import LOOPBACK
from clusterrun.node.agent.preparation import attempt_ports
from clusterrun.node.base.identity import Attempt
from clusterrun.node.base.ports import free_port, listening_socket
from clusterrun.node.base.tasks import SharedDisk
from clusterrun.node.link.clock import Offset
from clusterrun.node.link.questions import Answerer
from clusterrun.node.smoke.probes import Probes

BLOCK: Final = 1 << 20
SENT: Final = 32 * BLOCK
CONNECT_S, SEND_S = 3.0, 3.0


class NodePart:
    """What this node measures when the head asks all; each answer has fields of `Share`."""

    def __init__(self, attempt: Attempt, probes: Probes, disk: SharedDisk) -> None:
        self._attempt, self._probes, self._disk = attempt, probes, disk
        self._server: asyncio.Server | None = None
        self._clock_s = 0.0
        self.interface = ""
        self.answerers: dict[str, Answerer] = {
            "ready": self.ready,
            "store": self.store,
            "listen": self.listen,
            "send": self.send,
            "reduce": self.reduce,
        }

    def clock_compared(self, offset: Offset) -> None:
        """Take how far this node's clock is ahead of the head's."""
        self._clock_s = offset.offset_us / 1e6

    async def ready(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the matrix products; return whether all succeeded, and a port for a group."""
        found = await self._probes.computed()
        try:
            port = free_port(self._ports)
        except OSError:
            port = 0
        return {"is_fit": all("error" not in each for each in found.values()), "port": port}

    async def store(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Measure the runs' file system; `names`: the nodes whose files must be seen."""
        names = [str(name) for name in message.get("names", ())]
        try:
            found = await self._disk.do(partial(storage.measure, self._where))
            unseen = await self._disk.do(partial(storage.unseen, self._where, names))
        except OSError as error:
            return {"clock_s": self._clock_s, "store_error": error.strerror or str(error)}
        return {"clock_s": self._clock_s, "unseen": unseen, **dataclasses.asdict(found)}

    @property
    def _where(self) -> Path:
        return self._attempt.paths.root / reports.DIRECTORY

    async def listen(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Listen for another node's data; return the port, 0 if none is free."""
        is_local = self._attempt.who.is_local  # simulated nodes share this machine's ports
        for port in (0,) if is_local else self._ports:
            try:
                listener = listening_socket(port, LOOPBACK if is_local else "")
            except OSError:
                continue
            self._server = await asyncio.start_server(_swallow, sock=listener)
            return {"port": listener.getsockname()[1]}
        return {"port": 0}

    async def send(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send data to the next node of the ring, and measure the rate."""
        target = message["targets"].get(str(self._attempt.who.node_rank))
        if target is None:
            return {}
        name, address, port = target
        try:
            rate = await asyncio.wait_for(_send(address, int(port)), CONNECT_S + SEND_S)
        except (OSError, asyncio.TimeoutError) as error:
            text = getattr(error, "strerror", "") or "no answer"
            return {"peer": name, "link_error": f"{address}:{port}: {text}"}
        return {"peer": name, "sent": rate}

    async def reduce(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take part in an all-reduce of all devices of all nodes."""
        if self._server is not None:
            self._server.close()
        first = message["first"].get(str(self._attempt.who.node_rank))
        if first is None:
            return {}
        group = {name: message[name] for name in ("address", "port", "world")}
        ranks = range(first, first + len(self._probes))
        return dict(await self._probes.reduce({**group, "interface": self.interface}, ranks))

    @property
    def nodes(self) -> Sequence[str]:
        """All nodes of the job, by node rank."""
        return self._attempt.who.nodes

    @property
    def _ports(self) -> tuple[int, ...]:
        """The ports that torch may use."""
        return attempt_ports(self._attempt).rendezvous

    @property
    def devices(self) -> int:
        """How many devices of this node take part; all nodes have as many."""
        return len(self._probes)


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what a node sends, and confirm its end."""
    try:
        while await reader.read(BLOCK):
            pass
        writer.write(b"\n")
        await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def _send(address: str, port: int) -> float:
    """Return the rate in MB/s. Raises OSError, asyncio.TimeoutError."""
    opening = asyncio.open_connection(address, port)
    reader, writer = await asyncio.wait_for(opening, CONNECT_S)
    try:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        block, started, sent = bytes(BLOCK), time.perf_counter(), 0
        while sent < SENT and time.perf_counter() - started < 1.0:
            writer.write(block)
            await writer.drain()
            sent += BLOCK
        writer.write_eof()
        await reader.read(1)
        return sent / 1e6 / (time.perf_counter() - started)
    finally:
        writer.close()
