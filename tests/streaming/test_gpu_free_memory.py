"""What is free on a GPU: asked of NVIDIA's libraries, here of stand-ins with the same calls."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from streaming.errors import OptionError
from streaming.gpu_free_memory import free_gpu_nbytes

FREE = {b"0000:01:00.0": 5 << 30, b"0000:41:00.0": 70 << 30}
BUS_IDS = [b"0000:41:00.0", b"0000:01:00.0"]  # as CUDA numbers them


class Libraries:
    """libcuda and libnvidia-ml of a machine with two GPUs, which the two number in different orders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, init: int = 0) -> None:
        self.calls: list[str] = []
        self._init, self._handles = init, list(FREE)
        monkeypatch.setattr(ctypes, "CDLL", self.open)

    def open(self, name: str) -> SimpleNamespace:
        cuda = ("cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId")
        management = (
            "nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetMemoryInfo", "nvmlShutdown",
        )  # fmt: skip
        return SimpleNamespace(**{call: getattr(self, call) for call in (cuda if "libcuda" in name else management)})

    def cuInit(self, _flags: int) -> int:  # noqa: N802  (CUDA's name, as the following)
        self.calls.append("init")
        return self._init

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        if index >= len(BUS_IDS):
            return 101
        device._obj.value = index + 7
        return 0

    def cuDeviceGetPCIBusId(self, found: Any, length: int, device: Any) -> int:  # noqa: N802
        assert length == len(found)
        found.value = BUS_IDS[device.value - 7]
        return 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.calls.append("opened")
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.calls.append("closed")
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 1 + self._handles.index(bus_id)
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.free = FREE[self._handles[handle.value - 1]]
        return 0


@pytest.mark.parametrize(("device", "nbytes"), [("cuda", 70 << 30), ("cuda:0", 70 << 30), ("cuda:1", 5 << 30)])
def test_the_device_is_the_one_that_cuda_numbers_so(device: str, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = Libraries(monkeypatch)
    assert free_gpu_nbytes(device, flag="--memory") == nbytes
    assert libraries.calls == ["init", "opened", "closed"]


def test_a_call_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Libraries(monkeypatch)
    with pytest.raises(OptionError, match=r"--memory auto: the driver .* of cuda:2 is free \(cuDeviceGet: error 101\)"):
        free_gpu_nbytes("cuda:2", flag="--memory")
    Libraries(monkeypatch, init=100)
    with pytest.raises(OptionError, match=r"--gpu-memory auto: .*\(cuInit: error 100\); give a size"):
        free_gpu_nbytes("cuda", flag="--gpu-memory")


def test_planning_for_a_gpu_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys; from streaming.options import LoadOptions; from streaming.prepare import prepare; "
        "plan = prepare('demo', LoadOptions(device='cuda', memory='150MiB', host_memory='1GiB')).plan; "
        "assert plan.stream.tier; print(sorted({'torch', 'numpy', 'anyio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
