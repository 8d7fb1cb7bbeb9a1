"""What only the numbers show: tensors with NaN or infinity, and tensors of nothing but zeros (a broken download)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from layers.model_config import NormKind
from layers.weights import ParamKind
from quant.dtypes import DType
from streaming.errors import LayerLoadError
from streaming.load_plan import LoadItem

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
        extremes = _extremes(item, wide)
        if extremes is None:
            return
        # A tied table may be read a second time, for a quantized head.
        key = (item.tensor.name, item.param.name, item.tensor.offset)
        self._parts.setdefault(key, []).append(extremes)
        self._rows[key] = self._rows.get(key, 0) + item.rows[1] - item.rows[0]
        if item.param.is_cut_within or self._rows[key] >= (item.tensor.shape or (1,))[0]:
            self._whole.append((item, key))

    def settle(self, *, strict: bool, warn: Callable[[str], None]) -> None:
        """Warn of new faults; raise LayerLoadError for the first of them where that is `strict`."""
        for item, fault in list(self.judge()):
            if strict:
                raise LayerLoadError(item.layer, "check", item.tensor.name, fault)
            warn(fault)

    def judge(self) -> Iterator[tuple[LoadItem, str]]:
        """New faults of tensors that are whole by now: an item of the tensor, and a line for people.

        Waits for the device that holds the numbers.
        """
        while self._whole:
            item, key = self._whole.pop(0)
            if key not in self._parts:
                continue
            kind = item.param.kind
            zeros_fit = item.param.is_cut_within  # a part of a good tensor may be zeros
            zeros_fit |= kind is ParamKind.SINK or (kind is ParamKind.NORM and self._norm is NormKind.RMS_PLUS_ONE)
            if fault := fault_of(torch.stack(self._parts.pop(key)).double(), zeros_fit=zeros_fit):
                line = f"{item.tensor.name} in {item.tensor.file.name} {fault}"
                if line not in self.faults:
                    self.faults.append(line)
                    yield item, line


def _extremes(item: LoadItem, numbers: torch.Tensor) -> torch.Tensor | None:
    """Least and greatest of an item's numbers [2]; None of integer codes, of which every one is a number."""
    if item.tensor.dtype.is_wide:
        return torch.stack(torch.aminmax(numbers))
    float8 = _float8_of(item)
    if float8 is None:
        return None
    codes = numbers.view(torch.uint8)
    greatest = codes.amax()
    none, of_zeros = greatest == 0xFF, greatest == 0
    if float8 is DType.F8_E8M0:
        of_zeros = torch.zeros_like(none)  # its code 0 is a power of two
    else:
        none = none | (codes.view(torch.int8).amax() == 0x7F)  # E4M3 has a NaN of either sign
    return torch.where(none, torch.nan, torch.where(of_zeros, 0.0, 1.0)).expand(2)


def _float8_of(item: LoadItem) -> DType | None:
    """The floats of 8 bits that an item holds; some writers call a byte of E8M0 U8."""
    dtype = item.tensor.dtype
    if dtype is DType.U8 and item.leaf and item.fills:
        dtype = item.form.kept.storage((1,), item.param.whole.shape[1], wide=item.param.dtype)[item.fills].dtype
    return dtype if dtype in (DType.F8_E4M3, DType.F8_E8M0) else None


def fault_of(extremes: torch.Tensor, *, zeros_fit: bool = False) -> str | None:
    """What is wrong with a tensor whose parts have these least and greatest numbers [parts, 2], if anything."""
    if extremes.isnan().any():
        return "holds NaN"
    if extremes.isinf().any():
        return "holds infinity"
    return None if zeros_fit or extremes.any() else "holds only zeros: is the download complete?"
