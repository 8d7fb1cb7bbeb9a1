"""How much of a GPU's memory is free, before torch is there: asked of the driver itself. [no-torch]

The CUDA driver knows which device "cuda:1" is (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER) and its place on the PCI bus,
and NVIDIA's management library what is free there; neither takes a context for it, which would cost memory and time.
"""

from __future__ import annotations

import ctypes
from typing import Any

from streaming.errors import OptionError

_BUS_ID_NBYTES = 32


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_gpu_nbytes(device: str, *, flag: str) -> int:
    """Bytes that are free on "cuda" or "cuda:1" now. Raises OptionError where nobody says so; `flag` has the "auto"."""
    try:
        bus_id = _bus_id(int(device.partition(":")[2] or 0))
        return _free_nbytes(bus_id)
    except (OSError, AttributeError, _DriverError) as error:
        raise OptionError(
            f"{flag} auto: the driver does not say how much of {device} is free ({error}); give a size"
        ) from None


class _DriverError(Exception):
    """A call of the driver's that failed."""


def _bus_id(index: int) -> bytes:
    driver = ctypes.CDLL("libcuda.so.1")
    device, found = ctypes.c_int(), ctypes.create_string_buffer(_BUS_ID_NBYTES)
    _call(driver.cuInit, 0)
    _call(driver.cuDeviceGet, ctypes.byref(device), index)
    _call(driver.cuDeviceGetPCIBusId, found, _BUS_ID_NBYTES, device)
    return found.value


def _free_nbytes(bus_id: bytes) -> int:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, memory = ctypes.c_void_p(), _Memory()
    _call(library.nvmlInit_v2)
    try:
        _call(library.nvmlDeviceGetHandleByPciBusId_v2, bus_id, ctypes.byref(handle))
        _call(library.nvmlDeviceGetMemoryInfo, handle, ctypes.byref(memory))
    finally:
        library.nvmlShutdown()
    return int(memory.free)


def _call(function: Any, *arguments: object) -> None:
    code = function(*arguments)
    if code != 0:
        raise _DriverError(f"{function.__name__}: error {code}")
