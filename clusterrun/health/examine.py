"""Run checks side by side, and leave behind those that are late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from clusterrun.errors import ClusterrunError, describe
from clusterrun.shared.finding import Finding, skip

Look = Callable[[], Finding]  # may raise UnknownError, OSError or ClusterrunError


class UnknownError(Exception):
    """A check cannot look; the text is the reason."""


def examine(
    looks: Mapping[str, Look],
    deadline_s: float,
    *,
    alone: Collection[str] = (),
    late: Mapping[str, Finding] = MappingProxyType({}),
) -> list[Finding]:
    """Run the checks of each domain (`node` of `node.shm`) in a thread, one after the other.

    A blocked file system, driver or server holds up its own domain only; `alone` are checks that
    may block by themselves. What has no answer in time is skipped, or what `late` says. A fault of
    a check is raised.
    """
    answers: dict[str, Finding | Exception] = {}
    domains: dict[str, list[str]] = {}
    for name in looks:
        domains.setdefault(name if name in alone else name.split(".")[0], []).append(name)
    parts = {domain: partial(_answer, looks, names, answers) for domain, names in domains.items()}
    side_by_side(parts, deadline_s)
    reason = f"no answer within {deadline_s:g} s"
    found = [answers.get(name) or late.get(name) or skip(name, reason) for name in looks]
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each for each in found if isinstance(each, Finding)]


def _answer(
    looks: Mapping[str, Look], names: Sequence[str], answers: dict[str, Finding | Exception]
) -> None:
    for name in names:
        try:
            answers[name] = looks[name]()
        except UnknownError as reason:
            answers[name] = skip(name, str(reason))
        except (ClusterrunError, OSError) as error:
            answers[name] = skip(name, describe(error))
        except Exception as error:  # noqa: BLE001  # a fault of ours: the main thread raises it
            answers[name] = error


def side_by_side(parts: Mapping[str, Callable[[], Any]], deadline_s: float) -> dict[str, Any]:
    """Run each part in a thread; leave out those that are late."""
    found: dict[str, Any] = {}

    def answer(name: str, part: Callable[[], Any]) -> None:
        found[name] = part()

    threads = [threading.Thread(target=answer, args=each, daemon=True) for each in parts.items()]
    deadline = time.monotonic() + deadline_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)
