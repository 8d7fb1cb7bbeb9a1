"""What a device has for products of stored weights, asked once for each product: a look at what torch already knows."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class DeviceFeatures:
    """The defaults are those of a device of which nothing is known: everything goes through strips of wide numbers.

    capability: NVIDIA's compute capability, such as (9, 0); None for devices of others. triton: it is installed.
    fnuz: its float8 products read e4m3fnuz and no e4m3fn (AMD's gfx940 to gfx942; later ones read e4m3fn).
    """

    capability: tuple[int, int] | None = None
    triton: bool = False
    fnuz: bool = False

    @classmethod
    def detect(cls, device: torch.device, *, triton: bool) -> DeviceFeatures:
        """The features of a device that tensors are on; no waiting for what runs there."""
        if device.type != "cuda":
            return cls(None, triton)
        if torch.version.hip is not None:
            return cls(None, triton, needs_fnuz(torch.cuda.get_device_properties(device).gcnArchName))
        return cls(torch.cuda.get_device_capability(device), triton)

    def at_least(self, major: int, minor: int) -> bool:
        """Whether this is NVIDIA's, of that capability or newer."""
        return self.capability is not None and self.capability >= (major, minor)


def needs_fnuz(arch: str) -> bool:
    """Whether float8 products of an AMD device read e4m3fnuz; `arch` is such as "gfx942:sramecc+:xnack-"."""
    return arch.startswith("gfx94")


def triton_installed() -> bool:
    """Whether Triton can be imported; it comes with torch's CUDA builds. It is not imported here: that takes 0.3 s."""
    return find_spec("triton") is not None
