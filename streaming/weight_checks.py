"""What only the numbers show: tensors with NaN or infinity, and tensors of nothing but zeros (a broken download)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from layers.model_config import NormKind
from layers.weights import ParamKind
from streaming.plan import LoadItem

logger = logging.getLogger(__name__)
_Key = tuple[str, str, int]  # tensor, parameter, where it begins in the file (one expert of many in one tensor)


class WeightChecks:
    """Gathers least and greatest of every tensor, part by part as they arrive; judged when the tensor is whole.

    `norm`: what the model's norms compute; where their weights count from one, zeros are what training begins with.
    """

    def __init__(self, *, norm: NormKind = NormKind.RMS) -> None:
        self._norm = norm
        self._parts: dict[_Key, list[torch.Tensor]] = {}
        self._rows: dict[_Key, int] = {}
        self._whole: list[tuple[LoadItem, _Key]] = []
        self.faults: list[str] = []

    def add(self, item: LoadItem, wide: torch.Tensor) -> None:
        """Look at one item's wide numbers: one pass, no wait for a device."""
        if item.param.kind is ParamKind.BIAS or wide.numel() == 0:
            return  # zeros are what a bias often is, and a bias is never quantized
        if not item.tensor.dtype.is_wide:
            return  # stored codes: their scales, which came from all the numbers, are looked at in their place
        # A tied table may be read a second time, for a quantized head.
        key = (item.tensor.name, item.param.name, item.tensor.offset)
        self._parts.setdefault(key, []).append(torch.stack(torch.aminmax(wide)))
        self._rows[key] = self._rows.get(key, 0) + item.rows[1] - item.rows[0]
        if self._rows[key] >= (item.tensor.shape or (1,))[0]:
            self._whole.append((item, key))

    def judge(self) -> Iterator[tuple[LoadItem, str]]:
        """New faults of tensors that are whole by now: an item of the tensor, and a line for people.

        Waits for the device that holds the numbers.
        """
        while self._whole:
            item, key = self._whole.pop(0)
            zeros_fit = item.param.kind is ParamKind.NORM and self._norm is NormKind.RMS_PLUS_ONE
            if fault := fault_of(torch.stack(self._parts.pop(key)).double(), zeros_fit=zeros_fit):
                line = f"{item.tensor.name} in {item.tensor.file.name} {fault}"
                if line not in self.faults:
                    self.faults.append(line)
                    yield item, line


def fault_of(extremes: torch.Tensor, *, zeros_fit: bool = False) -> str | None:
    """What is wrong with a tensor whose parts have these least and greatest numbers [parts, 2], if anything."""
    if extremes.isnan().any():
        return "holds NaN"
    if extremes.isinf().any():
        return "holds infinity"
    return None if zeros_fit or extremes.any() else "holds only zeros: is the download complete?"
