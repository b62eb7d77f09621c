"""Answer each line of input with what NVML reports about GPUs now, in a line of JSON.

A broken driver blocks this process alone. It ends with its input: when the agent does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from clusterrun.health.nvml import GPU, Driver, NvmlGpu, say, start

_SM_UTIL: Final = 2  # nvmlGpmMetricId_t


class Loads:
    """The work of GPUs since the answer before."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._samples: dict[str, list[Any]] = {}  # of the counters of SMs

    def gpu(self, name: str) -> NvmlGpu:
        """Describe a GPU and its work."""
        ask, found = self._driver.ask, self._driver.gpu(name)
        if found.problem:
            return found
        whole, part = self._driver.handles(name)
        if name not in self._samples:
            self._samples[name] = self._first_samples(whole) if whole is part else []
        samples = self._samples[name]
        ran = ask("DeviceGetUtilizationRates", part, read=lambda rates: float(rates.gpu))
        return replace(
            found,
            activity=self._of_sms(samples, whole) if samples else ran,
            is_of_sms=bool(samples),
            watts=ask("DeviceGetPowerUsage", whole, read=lambda milliwatts: milliwatts / 1000),
            celsius=ask("DeviceGetTemperature", whole, 0),
        )

    def _first_samples(self, gpu: Any) -> list[Any]:
        """Return two samples of the counters, the first of now; [] if the GPU has none."""
        support = self._driver.ask("GpmQueryDeviceSupport", gpu)
        if support is None or not support.isSupportedDevice:
            return []
        samples = [self._driver.ask("GpmSampleAlloc") for _ in range(2)]
        return samples if self._driver.ask("GpmSampleGet", gpu, samples[1]) else []

    def _of_sms(self, samples: list[Any], gpu: Any) -> float | None:
        """Return how active the SMs were since the last sample; None if it can't be read."""
        samples.reverse()
        if not self._driver.ask("GpmSampleGet", gpu, samples[1]):
            return None
        asked = self._driver.nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = 1, 1
        asked.sample1, asked.sample2 = samples
        asked.metrics[0].metricId = _SM_UTIL
        found = self._driver.ask("GpmMetricsGet", asked)
        metric = found and found.metrics[0]
        is_known = metric and metric.nvmlReturn == 0 and 0 <= metric.value <= 100  # it may be NaN
        return round(metric.value, 2) if is_known else None


def main(names: Sequence[str]) -> None:
    """Answer until the input ends."""
    if driver := start():
        loads = Loads(driver)
        for _ in sys.stdin:
            say({GPU: [asdict(loads.gpu(name)) for name in names or driver.names()]})


if __name__ == "__main__":
    main(sys.argv[1:])
