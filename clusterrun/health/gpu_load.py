"""Answer each line of input with what NVML reports about GPUs now, in a line of JSON.

A broken driver blocks this process alone. It ends with its input: when the agent does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from clusterrun.health.nvml import GPU, Driver, NvmlGpu, say, start

_SM_UTIL: Final = 2  # nvmlGpmMetricId_t


class Loads:
    """The work of GPUs since the answer before."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._samples: dict[str, list[Any]] = {}

    def answer(self, names: Iterable[str]) -> None:
        """Print the state and the work of each GPU."""
        say({GPU: [asdict(self._gpu(name)) for name in names]})

    def _gpu(self, name: str) -> NvmlGpu:
        driver, ask = self._driver, self._driver.ask
        try:
            whole, part = driver.handles(name)
        except driver.nvml.NVMLError as error:
            return NvmlGpu(name=name, problem=driver.problem(error))
        if name not in self._samples:
            self._samples[name] = self._first_samples(whole) if whole is part else []
        samples = self._samples[name]
        activity = (
            self._of_sms(samples, whole)
            if samples
            else ask("DeviceGetUtilizationRates", part, read=lambda rates: float(rates.gpu))
        )
        return NvmlGpu(
            name=name,
            activity=activity,
            is_of_sms=bool(samples),
            watts=ask("DeviceGetPowerUsage", whole, read=lambda milliwatts: milliwatts / 1000),
            celsius=ask("DeviceGetTemperature", whole, 0),
            **driver.state(whole, part),
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
        return round(metric.value, 2) if metric and metric.nvmlReturn == 0 else None


def main(names: Sequence[str]) -> None:
    """Answer until the input ends."""
    if driver := start():
        loads = Loads(driver)
        for _ in sys.stdin:
            loads.answer(names or driver.names())


if __name__ == "__main__":
    main(sys.argv[1:])
