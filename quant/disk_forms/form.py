"""The contract of a form on disk: which tensors one quantized weight is, and how each becomes what a scheme keeps.

A checkpoint that is already quantized holds a weight of O rows and I inputs as several tensors: its codes, their
scales, perhaps zero points. What is on disk, what is kept, and what a kernel wants are three things: a `DiskForm` says
how the first becomes the second, tensor by tensor, so that they may come in any order and each from its own read.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quant.dtypes import DType
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DiskTensor:
    """One tensor of a weight on disk: its name is the module's plus `leaf`.

    `shapes` are those that it may have, `dtypes` those it may be in. `fills` names the kept tensor that is made of it;
    "" where nothing is, with the reason in `unused`. `as_is`: each of its rows is a row of that tensor, byte for byte
    (in whatever dtype: 32-bit words of codes are bytes of codes), so that it may be read to its place, in runs of rows.
    `optional`: a checkpoint may lack it.
    """

    leaf: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    fills: str = ""
    as_is: bool = False
    optional: bool = False
    unused: str = ""


class DiskForm(Protocol):
    """How one weight of `rows` outputs lies on disk. Implementations are frozen dataclasses; equal forms are one form.

    All but `place` import no torch.
    """

    @property
    def name(self) -> str:
        """What it is called in messages, such as "GPTQ, 4 bits in groups of 128"."""
        ...

    @property
    def kept(self) -> Scheme:
        """The scheme that keeps exactly what is on disk."""
        ...

    def __hash__(self) -> int:
        """Forms are values."""
        ...

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """The tensors of a weight [rows, in_features]. Those that fill "weight" come last: rows are usable from then.

        Raises QuantError for a size that the form cannot have.
        """
        ...

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Fill, of the views `out` that `kept` gives of the weight's section, the one that `leaf` makes: from the whole
        tensor, in the shape and dtype that it has on disk, on out's device. Tensors that are `as_is` may come in runs
        of rows instead, and need no call: their bytes are copied."""
        ...


@runtime_checkable
class RenamesLeaves(Protocol):
    """A method whose tensors' names end with more than one word behind the module's."""

    @property
    def leaves(self) -> Mapping[str, str]:
        """What names end with on disk, such as "weight.absmax" -> as the leaf that it is read as."""
        ...


@runtime_checkable
class PartedForm(Protocol):
    """A form that depends on the rows of the parts that a weight is fused from on disk."""

    def with_parts(self, rows: tuple[int, ...]) -> DiskForm:
        """The form of a weight of parts that have so many rows each."""
        ...


class Method(Protocol):
    """What a checkpoint's quantization_config says: of which form a module's weight is, given what is there of it."""

    @property
    def name(self) -> str:
        """The method's name in configurations: "gptq", "fp8"."""
        ...

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """The form of the weight of `module` (its name in the checkpoint), from the tensors that it has there, by
        leaf; `shape`: [rows, in_features] as the model has it. None where it is wide. Raises QuantError, with the
        reason alone (who calls names the module)."""
        ...

    def excludes(self, module: str) -> bool:
        """Whether the configuration says that this module is not quantized: then it is not while loading either."""
        ...


@dataclass(frozen=True)
class FoundTensor:
    """Shape and dtype of a tensor on disk."""

    shape: tuple[int, ...]
    dtype: DType


@lru_cache(maxsize=256)
def disk_tensors(form: DiskForm, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
    """`form.tensors`, remembered: a large model asks tens of thousands of times for the few kinds of weight it has."""
    return form.tensors(rows, in_features)


def fill(
    form: DiskForm, tensors: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor], *, shape: tuple[int, int]
) -> None:
    """Fill all views `out` of a weight [rows, in_features] from all of its tensors, by leaf."""
    for one in disk_tensors(form, *shape):
        if one.as_is:
            out[one.fills].copy_(same_bytes(tensors[one.leaf], out[one.fills]))
        elif one.fills and one.leaf in tensors:
            form.place(one.leaf, tensors[one.leaf], out)


def same_bytes(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor that is `as_is`, or of some of its rows, in the dtype and shape in which they are kept."""
    if tensor.dtype != kept.dtype:
        tensor = tensor.contiguous().view(kept.dtype)
    return tensor.reshape(kept.shape)
