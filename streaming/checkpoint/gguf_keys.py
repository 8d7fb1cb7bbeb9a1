"""The metadata keys of one GGUF model's architecture, checked as they are asked for. [no-torch]"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from streaming.checkpoint.remote_file import WeightFile
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import CheckpointFormatError


@dataclass(frozen=True)
class GgufSource:
    """The metadata and tensors that the configuration is read from."""

    file: WeightFile
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]  # by GGUF's names

    def find(self, key: str) -> Any:
        """The value of `{architecture}.{key}`, None where there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def fault(self, key: str, problem: str) -> CheckpointFormatError:
        """An error about one of the architecture's keys."""
        return CheckpointFormatError(f"{self.file}: metadata key {self.architecture}.{key} {problem}")

    def size(self, key: str, *, default: int | None = None) -> int:
        """A whole number above 0; a list of one number for each layer counts where all are the same."""
        value = self.find(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            raise self.fault(key, f"is {value!r}, not one number above 0")
        return value

    def real(self, key: str, *, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.find(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not isfinite(value) or value <= 0:
            raise self.fault(key, f"is {value!r}, not a number above 0")
        return _shortest(float(value))

    def flag(self, key: str, *, default: bool) -> bool:
        """A truth value."""
        value = self.find(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fault(key, f"is {value!r}, not true or false")
        return value


def _shortest(value: float) -> float:
    """The shortest decimal number that is the same in float32: metadata keeps 1e-5 as 0.00000999999975."""
    single = struct.pack("<f", value) if abs(value) < 3e38 else b""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if single and struct.pack("<f", candidate) == single:
            return candidate
    return value
