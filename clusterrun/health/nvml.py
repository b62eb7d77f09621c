"""Ask NVIDIA's driver about GPUs, in a process of its own: a broken driver blocks who asks it.

`python -m clusterrun.health.nvml [GPU ...]` prints a line of JSON for each step. With `--again` it
answers each line of input with all GPUs and their work, until the input ends: when the agent does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any, Final

ASKS, ABSENT, PROBLEM, DRIVER, GPU = "asks", "absent", "problem", "driver", "gpu"
AGAIN: Final = "--again"
NO_DRIVER: Final = "this machine has no NVIDIA driver"
_ABSENCE_ERRORS: Final = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")


@dataclass(frozen=True, kw_only=True)
class NvmlGpu:
    """A GPU as NVML describes it; None: NVML does not report it, or was not asked (`--again`)."""

    name: str  # as in CUDA_VISIBLE_DEVICES
    problem: str = ""  # why it does not answer
    model: str | None = None
    address: str | None = None
    used: int | None = None  # bytes
    total: int | None = None  # bytes
    errors: int | None = None  # uncorrected ECC errors since its last reset
    is_pending: bool | None = None  # a part of its memory waits for its replacement
    is_worn: bool | None = None  # no replacement is left
    reasons: int | None = None  # bits of nvmlClocksEventReasons
    recovery: int | None = None  # an nvmlDeviceGpuRecoveryAction
    pids: Sequence[int] | None = None
    uuid: str | None = None
    capability: Sequence[int] | None = None  # major and minor
    links: Sequence[bool] | None = None  # of each NVLink, whether it is active
    activity: float | None = None  # percent of the time in which any kernel ran; with --again
    watts: float | None = None  # with --again
    celsius: int | None = None  # with --again


class Driver:
    """NVML, each of whose functions may be missing or refuse to answer."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def names(self) -> dict[str, str]:
        """Return the UUIDs of all GPUs by name; of one that MIG divides, those of its slices."""
        numbers = range(self.nvml.nvmlDeviceGetCount())
        return {name: uuid for number in numbers for name, uuid in self._parts(number).items()}

    def _parts(self, number: int) -> dict[str, str]:
        """Return the UUIDs of a GPU's MIG slices by name, or of the GPU ("" if it is silent)."""
        whole = self.ask("DeviceGetHandleByIndex", number)
        if whole is None:
            return {str(number): ""}
        mig = self.ask("DeviceGetMigMode", whole)  # the current and the pending mode
        most = self.ask("DeviceGetMaxMigDeviceCount", whole) if mig and mig[0] else 0
        slices = [self.ask("DeviceGetMigDeviceHandleByIndex", whole, n) for n in range(most or 0)]
        uuids = [self.ask("DeviceGetUUID", part) for part in slices if part is not None]
        slice_uuids = {uuid: uuid for uuid in uuids if uuid}  # CUDA names a slice by its UUID
        return slice_uuids or {str(number): self.ask("DeviceGetUUID", whole) or ""}

    def gpu(self, name: str) -> NvmlGpu:
        """Describe a GPU, or the slice of one that MIG divides."""
        nvml = self.nvml
        try:
            whole, part = self.handles(name)
        except nvml.NVMLError as error:
            unlisted = (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_FOUND)
            is_unlisted = error.value in unlisted
            text = "the driver does not list it" if is_unlisted else f"it does not answer: {error}"
            return NvmlGpu(name=name, problem=text)
        memory = self._memory(part)
        processes = self.ask("DeviceGetComputeRunningProcesses", part)
        return NvmlGpu(
            name=name,
            model=self.ask("DeviceGetName", whole),
            address=self.ask("DeviceGetPciInfo", whole, read=lambda pci: pci.busId),
            used=memory and memory.used,
            total=memory and memory.total,
            reasons=self.ask("DeviceGetCurrentClocksThrottleReasons", whole),
            recovery=self._recovery(whole),
            pids=None if processes is None else [process.pid for process in processes],
            uuid=self.ask("DeviceGetUUID", part),
            capability=self.ask("DeviceGetCudaComputeCapability", whole),
            links=self._links(whole),
            **self._wear(whole),
        )

    def ask(self, function: str, *args: Any, read: Callable[[Any], Any] | None = None) -> Any:
        """Call an NVML function; return None if the driver, bindings or GPU have no answer."""
        try:
            answer = getattr(self.nvml, f"nvml{function}")(*args)
        except Exception:  # noqa: BLE001 - NVMLError, AttributeError, NVMLLibraryMismatchError
            return None
        return read(answer) if read else answer

    def handles(self, name: str) -> tuple[Any, Any]:
        """Return the handle of a GPU, and that of the MIG slice `name`, or the GPU's again."""
        nvml = self.nvml
        if name.startswith("MIG-"):
            part = nvml.nvmlDeviceGetHandleByUUID(name)
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part), part
        if name.isdigit():
            whole = nvml.nvmlDeviceGetHandleByIndex(int(name))
            return whole, whole
        numbers = range(nvml.nvmlDeviceGetCount())
        found = (self.ask("DeviceGetHandleByIndex", number) for number in numbers)
        uuids = (nvml.nvmlDeviceGetUUID(handle) for handle in found if handle)
        uuid = next((uuid for uuid in uuids if uuid.startswith(name)), name)  # a prefix is enough
        whole = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return whole, whole

    def _memory(self, handle: Any) -> Any:
        """Return the memory in use, without what the driver reserves if it reports that."""
        version_2 = getattr(self.nvml, "nvmlMemory_v2", None)
        found = version_2 and self.ask("DeviceGetMemoryInfo", handle, version_2)
        return found or self.ask("DeviceGetMemoryInfo", handle)

    def _wear(self, handle: Any) -> dict[str, Any]:
        """Return what ECC found; pages are retired up to Volta, rows remapped from Ampere on."""
        uncorrected, volatile = 1, 0
        retired = self.ask("DeviceGetRetiredPagesPendingStatus", handle)
        rows = self.ask("DeviceGetRemappedRows", handle)
        _, _, remapping, has_failed = rows or (None, None, None, None)
        pending = [bool(each) for each in (retired, remapping) if each is not None]
        return {
            "errors": self.ask("DeviceGetTotalEccErrors", handle, uncorrected, volatile),
            "is_pending": any(pending) if pending else None,
            "is_worn": None if has_failed is None else bool(has_failed),
        }

    def _recovery(self, handle: Any) -> int | None:
        """Return what the driver asks for to repair a GPU; drivers know this since 570."""
        number = getattr(self.nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        found = number and self.ask("DeviceGetFieldValues", handle, [number])
        return int(found[0].value.uiVal) if found and found[0].nvmlReturn == 0 else None

    def _links(self, handle: Any) -> list[bool] | None:
        """Return which of a GPU's NVLinks are active; None without any."""
        numbers = range(getattr(self.nvml, "NVML_NVLINK_MAX_LINKS", 0))
        states = (self.ask("DeviceGetNvLinkState", handle, number) for number in numbers)
        return [bool(state) for state in takewhile(lambda state: state is not None, states)] or None

    def gpu_with_load(self, name: str) -> NvmlGpu:
        """Describe a GPU, with its present activity, power and temperature."""
        ask, found = self.ask, self.gpu(name)
        if found.problem:
            return found
        whole, part = self.handles(name)
        return replace(
            found,
            activity=ask("DeviceGetUtilizationRates", part, read=lambda rates: float(rates.gpu)),
            watts=ask("DeviceGetPowerUsage", whole, read=lambda milliwatts: milliwatts / 1000),
            celsius=ask("DeviceGetTemperature", whole, 0),
        )


def main(words: Sequence[str]) -> None:
    """Print what NVML reports about GPUs; all of them if none is named."""
    is_repeated, names = AGAIN in words, [word for word in words if word != AGAIN]
    if not is_repeated:
        say({ASKS: "NVML"})  # before each question: it may block
    driver = open_driver()
    if not isinstance(driver, Driver):
        say(driver)
    elif is_repeated:
        for _ in sys.stdin:  # each line asks once
            say({GPU: [asdict(driver.gpu_with_load(name)) for name in names or driver.names()]})
    else:
        say({DRIVER: driver.ask("SystemGetDriverVersion") or ""})
        for name in names or driver.names():
            say({ASKS: f"GPU {name}"})
            say({GPU: asdict(driver.gpu(name))})


def open_driver() -> Driver | dict[str, str]:
    """Start NVML; if it can't be used, return why."""
    try:
        import pynvml
    except ImportError:
        return {ABSENT: "nvidia-ml-py is not installed"}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        is_absent = error.value in [getattr(pynvml, name) for name in _ABSENCE_ERRORS]
        text = f"NVIDIA's driver cannot be used: {error}"
        return {ABSENT: NO_DRIVER} if is_absent else {PROBLEM: text}
    return Driver(pynvml)


def say(step: dict[str, Any]) -> None:
    """Print an object as a line of JSON."""
    sys.stdout.write(f"{json.dumps(step)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
