"""A weight's tensors in the compressed-tensors layout, by its formats: codes as they are, packed integers, packed FP4.

https://github.com/vllm-project/compressed-tensors. Integers are packed densely: B bits a code, the first one lowest, in
32-bit words along a row; codes are offset by 2^(B-1), zero points (along the rows of a column) too. For 4 and 8 bits
those words are, byte for byte, what is kept. O out_features, I in_features, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.disk_forms.form import DiskTensor
from quant.disk_forms.scales import E8M0, FLOATS
from quant.dtypes import DType
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock
from quant.int4 import IntPerGroup
from quant.int8 import Int8PerChannel
from quant.microscaling import MX_BLOCK, NV_BLOCK, MxFp4, MxFp8, NvFp4
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

_WORD_BITS = 32
_STRIP_NUMBERS = 1 << 20  # codes that are unpacked at once
Stored = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class CodesOnDisk:
    """`weight` [O, I] in the very codes that are kept (e4m3 or int8), and `weight_scale` by `strategy`."""

    kept: Scheme
    strategy: str  # tensor, channel, block, group
    unused: tuple[DiskTensor, ...] = ()

    @property
    def name(self) -> str:
        """What it is called in messages."""
        codes = "int8" if isinstance(self.kept, Int8PerChannel) else "FP8"
        return f"compressed-tensors {codes}, a scale per {self.strategy}"

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales, then codes."""
        mx = isinstance(self.kept, MxFp8)
        height, width = self.kept.block if isinstance(self.kept, Fp8PerBlock) else (1, MX_BLOCK)
        codes = DType.I8 if isinstance(self.kept, Int8PerChannel) else DType.F8_E4M3
        shapes = {
            "tensor": ((), (1,), (1, 1)),
            "channel": ((rows, 1), (rows,)),
        }.get(self.strategy, ((-(-rows // height), -(-in_features // width)),))
        return (
            *self.unused,
            DiskTensor("weight_scale", shapes, E8M0 if mx else FLOATS, "weight_scale", as_is=mx),
            DiskTensor("weight", ((rows, in_features),), (codes,), "weight", as_is=True),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Stored) -> None:
        """Scales become float32, exactly; one for all rows becomes one for each where those are kept."""
        _place_one_or_each(tensor, out[leaf])


@dataclass(frozen=True)
class IntegersOnDisk:
    """Integers of `bits` bits with what each group has: `weight_packed` I32 [O, ceil(I bits / 32)], or `weight` I8
    [O, I], not offset.

    `zeros`: the dtype of the zero points: I32 packed along the rows, I8 a code each, None where it is symmetric.
    """

    kept: IntPerGroup
    bits: int
    strategy: str
    packed: bool
    columns: int  # I, which packed codes do not tell
    zeros: DType | None = None
    unused: tuple[DiskTensor, ...] = ()

    @property
    def name(self) -> str:
        """What it is called in messages."""
        size = self.kept.group_size
        where = f"in groups of {size}" if size else f"a scale per {self.strategy}"
        return f"compressed-tensors {'packed ' if self.packed else ''}int{self.bits}, {where}"

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """What groups have, then codes, which are read to their place where words end with the row."""
        found = list(self.unused)
        groups = -(-in_features // (self.kept.group_size or max(1, in_features)))
        of_groups = {"tensor": ((), (1,), (1, 1)), "channel": ((rows, 1), (rows,))}.get(
            self.strategy, ((rows, groups),)
        )
        found.append(DiskTensor("weight_scale", of_groups, (self.kept.scale_dtype,), "weight_scale"))
        if self.zeros is DType.I32:
            words = (self._words(rows), groups)
            found.append(DiskTensor("weight_zero_point", (words,), (DType.I32,), "weight_zero_point"))
        elif self.zeros is not None:
            found.append(DiskTensor("weight_zero_point", of_groups, (self.zeros,), "weight_zero_point"))
        if self.kept.ordered:
            found.append(DiskTensor("weight_g_idx", ((in_features,),), (DType.I32, DType.I64), "g_idx"))
        found.append(self._codes(rows, in_features))
        return tuple(found)

    def _codes(self, rows: int, in_features: int) -> DiskTensor:
        if not self.packed:
            return DiskTensor("weight", ((rows, in_features),), (DType.I8,), "weight")
        as_is = self.bits == self.kept.bits and in_features * self.bits % _WORD_BITS == 0
        shape = (rows, self._words(in_features))
        return DiskTensor("weight_packed", (shape,), (DType.I32,), "weight", as_is=as_is)

    def _words(self, codes: int) -> int:
        return -(-codes * self.bits // _WORD_BITS)

    def place(self, leaf: str, tensor: torch.Tensor, out: Stored) -> None:
        """Codes and zero points in the kept offset; a strip of rows at a time."""
        from quant.int4_codec import store_codes

        if leaf == "weight_scale":
            _place_one_or_each(tensor, out["weight_scale"])
        elif leaf == "weight_zero_point":
            self._place_zeros(tensor, out["weight_zero_point"])
        elif leaf == "weight_g_idx":
            self._place_order(tensor, out["g_idx"], groups=out["weight_scale"].shape[1])
        elif self.packed and self.bits == self.kept.bits:
            _keep_bytes(tensor, out["weight"], last_is_half=self.bits == 4 and self.columns % 2 == 1)
        else:
            for start, stop in _strips(tensor.shape[0], self.columns):
                codes = self._unsigned(tensor[start:stop], self.columns)
                store_codes(codes, out["weight"][start:stop], bits=self.kept.bits)

    def _place_zeros(self, tensor: torch.Tensor, target: torch.Tensor) -> None:
        if self.zeros is not DType.I32:
            _place_one_or_each(self._unsigned(tensor, 0), target)
            return
        rows, groups = target.shape
        for start, stop in _strips(groups, rows):
            target[:, start:stop] = self._unsigned(tensor[:, start:stop].t().contiguous(), rows).t()

    def _place_order(self, tensor: torch.Tensor, target: torch.Tensor, *, groups: int) -> None:
        """Writers that keep no order of their own fill it with -1."""
        import torch

        from quant.int4_codec import check_order

        if tensor.numel() and bool((tensor == -1).all()):
            target.copy_(torch.arange(tensor.numel(), device=tensor.device) // (self.kept.group_size or tensor.numel()))
            return
        check_order(tensor, groups=groups)
        target.copy_(tensor)

    def _unsigned(self, stored: torch.Tensor, count: int) -> torch.Tensor:
        """Codes in the kept offset, uint8, of I8 numbers of any shape or of I32 words [n, words] -> [n, count]."""
        import torch

        if stored.dtype == torch.int32:
            codes = unpack(stored, bits=self.bits, count=count)
            return codes.add_(self.kept.zero - (1 << (self.bits - 1))) if self.bits != self.kept.bits else codes
        if self.kept.bits < 8 and stored.numel():
            least, most, zero = int(stored.min()), int(stored.max()), self.kept.zero
            if least < -zero or most >= zero:
                raise QuantError(f"{least} to {most}: of {self.bits}-bit integers {-zero} to {zero - 1} can be kept")
        codes = stored.contiguous().view(torch.uint8) + self.kept.zero
        return codes & ((1 << self.kept.bits) - 1)


@dataclass(frozen=True)
class Fp4OnDisk:
    """`weight_packed` U8 [O, ceil(I / 2)] (E2M1, the first one low) and its scales; nvfp4's global scale divides."""

    kept: MxFp4 | NvFp4
    unused: tuple[DiskTensor, ...] = ()

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"compressed-tensors packed {self.kept.name}"

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales, then codes."""
        found = list(self.unused)
        if isinstance(self.kept, NvFp4):
            scale = ((rows, -(-in_features // NV_BLOCK)),)
            found.append(DiskTensor("weight_scale", scale, (DType.F8_E4M3,), "weight_scale", as_is=True))
            shapes = ((), (1,), (1, 1))
            found.append(DiskTensor("weight_global_scale", shapes, (DType.F32,), "weight_global_scale"))
        else:
            scale = ((rows, -(-in_features // MX_BLOCK)),)
            found.append(DiskTensor("weight_scale", scale, E8M0, "weight_scale", as_is=True))
        codes = ((rows, -(-in_features // 2)),)
        return (*found, DiskTensor("weight_packed", codes, (DType.U8,), "weight", as_is=True))

    def place(self, leaf: str, tensor: torch.Tensor, out: Stored) -> None:
        """Everything is kept as it is."""
        out["weight_global_scale"].copy_(tensor.reshape(1))


def _place_one_or_each(tensor: torch.Tensor, target: torch.Tensor) -> None:
    """One number for all that are kept, or one for each."""
    target.copy_(tensor.reshape(-1) if tensor.numel() == 1 else tensor.reshape(target.shape))


# --- codes


def unpack(words: torch.Tensor, *, bits: int, count: int) -> torch.Tensor:
    """uint8 [n, count]: the first codes of each row of I32 words [n, ceil(count bits / 32)], as they are offset there.

    Eight codes fill `bits` bytes: the k-th of all eights at once.
    """
    import torch
    import torch.nn.functional as F

    rows, eights = words.shape[0], -(-count // 8)
    if words.stride(-1) != 1:  # which a single word a row may have, contiguous as it is
        words = words.clone(memory_format=torch.contiguous_format)
    data = words.contiguous().view(torch.uint8)
    parts = F.pad(data, (0, eights * bits - data.shape[1])).view(rows, eights, bits)
    codes = torch.empty(rows, eights, 8, dtype=torch.uint8, device=words.device)
    for index in range(8):
        byte, shift = divmod(index * bits, 8)
        code = parts[:, :, byte] >> shift
        if shift + bits > 8:
            code |= parts[:, :, byte + 1] << (8 - shift)
        codes[:, :, index] = code & ((1 << bits) - 1)
    return codes.view(rows, -1)[:, :count]


def _strips(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _STRIP_NUMBERS // max(1, columns))
    return ((start, min(rows, start + step)) for start in range(0, rows, step))


def _keep_bytes(words: torch.Tensor, target: torch.Tensor, *, last_is_half: bool) -> None:
    """The bytes of I32 words [O, words] that are kept, without those that fill up the last word of a row."""
    import torch

    target.copy_(words.view(torch.uint8)[:, : target.shape[1]])
    if last_is_half:
        target[:, -1] &= 15
