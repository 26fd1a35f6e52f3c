"""A process that asks NVIDIA's driver how the GPUs are: ``python -m gpuctl.bootstrap.monitors.gpu_watch 0 1``.

One of its own, because a call into a driver that hangs never returns, and hears no signal.

It prints a line of JSON at once, then every two seconds and whenever something happens: ``{"ill": "…",
"warning": "…"}``, both empty where all is well. What is ill stays so. Without a driver, or NVML's package:
``{"unable": "…"}``, and it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpuctl.bootstrap.monitors.gpu_faults import Fault, Reading, is_throttled, of_reading, of_xid
from gpuctl.trainers.launchers.torchrun import die_with_parent

_EVERY_MS = 2000


class GpuWatch:
    """The GPUs with these numbers, through ``nvml`` (the module ``pynvml``, initialized)."""

    def __init__(self, nvml: Any, gpus: list[int], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.ill = ""
        self.warning = ""
        self._nvml = nvml
        self._monotonic = monotonic
        self._handles: dict[int, Any] = {}
        self._told: dict[int, str] = {}
        """What an Xid has said of a GPU that is not ill."""
        self._throttled_since: dict[int, float] = {}
        self._events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            with self._asking(gpu):
                self._handles[gpu] = nvml.nvmlDeviceGetHandleByIndex(gpu)
                nvml.nvmlDeviceRegisterEvents(self._handles[gpu], nvml.nvmlEventTypeXidCriticalError, self._events)

    def wait(self) -> None:
        """For an Xid, two seconds at most, and take it into account."""
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, _EVERY_MS)
        except nvml.NVMLError_Timeout:
            return
        except nvml.NVMLError_GpuIsLost:
            return  # which one, ``look`` finds
        except nvml.NVMLError:
            time.sleep(_EVERY_MS / 1000)  # a driver without events
            return
        for gpu, handle in self._handles.items():
            if _address(handle) == _address(event.device):
                self._take(gpu, of_xid(gpu, event.eventData, self._recovery(gpu)))

    def look(self) -> None:
        """Ask for all that no event tells."""
        now = self._monotonic()
        warnings = dict(self._told)
        for gpu, handle in self._handles.items():
            reading = self._read(gpu, handle)
            if not is_throttled(reading):
                self._throttled_since.pop(gpu, None)
            since = self._throttled_since.setdefault(gpu, now) if is_throttled(reading) else now
            for fault in of_reading(gpu, reading, now - since):
                if fault.is_ill:
                    self._take(gpu, fault)
                else:
                    warnings[gpu] = fault.words
        self.warning = "; ".join(warnings.values())

    def _take(self, gpu: int, fault: Fault | None) -> None:
        if fault and fault.is_ill:
            self.ill = self.ill or fault.words
        elif fault:
            self._told[gpu] = fault.words

    def _read(self, gpu: int, handle: Any) -> Reading:
        nvml = self._nvml
        found: dict[str, Any] = {}
        with self._asking(gpu):
            kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            found["uncorrected"] = nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since)
        with self._asking(gpu):
            _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
            found |= {"remap_pending": bool(pending), "remap_failed": bool(failed)}
        with self._asking(gpu):
            found["throttled"] = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        with self._asking(gpu):
            found["celsius"] = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        return Reading(**found)

    def _recovery(self, gpu: int) -> int | None:
        nvml = self._nvml
        with self._asking(gpu):
            (field,) = nvml.nvmlDeviceGetFieldValues(self._handles[gpu], [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                return int(field.value.uiVal)
        return None

    @contextlib.contextmanager
    def _asking(self, gpu: int) -> Iterator[None]:
        """What a GPU cannot tell is no fault of its; one that is gone is."""
        try:
            yield
        except self._nvml.NVMLError_GpuIsLost:
            for fault in of_reading(gpu, Reading(lost=True), 0.0):
                self._take(gpu, fault)
        except self._nvml.NVMLError:
            pass


def _address(handle: Any) -> int | None:
    """Equal for the same GPU, also one that is gone and does not tell its number."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def main(gpus: list[int]) -> None:
    die_with_parent()
    try:
        import pynvml

        pynvml.nvmlInit()
        watch = GpuWatch(pynvml, gpus)
    except Exception as error:  # noqa: BLE001 - no package, no driver, or an older one: then nothing is watched
        _print(unable=str(error))
        return
    while True:
        watch.look()
        _print(ill=watch.ill, warning=watch.warning)
        watch.wait()


def _print(**said: str) -> None:
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main([int(gpu) for gpu in sys.argv[1:]])
