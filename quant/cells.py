"""How many numbers of a weight one element of each stored tensor stands for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.int4 import ORDER, IntPerGroup
from quant.int8 import Int8PerChannel
from quant.microscaling import MxFp4, MxFp8, NvFp4
from quant.nf4 import Nf4
from quant.scheme import Scheme
from quant.wide import Wide


@dataclass(frozen=True)
class Cell:
    """Rows (0: all of a section) by columns (0: all) of a weight, counted from a section's first row and column."""

    rows: int
    columns: int


ONE, PAIR = Cell(1, 1), Cell(1, 2)
ROW, SECTION, INPUT = Cell(1, 0), Cell(0, 0), Cell(0, 1)


def cells(scheme: Scheme, in_features: int) -> dict[str, Cell]:
    """The cell of each stored tensor of a section of `in_features` columns, by its name. QuantError for a scheme that
    is not known here.

    Where blocks of nf4 reach over rows, its scales lie in rows of whole blocks (`Nf4.span`): such a row is a cell.
    """
    match scheme:
        case Wide():
            return {"weight": ONE}
        case Fp8PerTensor():
            return {"weight": ONE, "weight_scale": SECTION}
        case Fp8PerChannel() | Int8PerChannel():
            return {"weight": ONE, "weight_scale": ROW}
        case Fp8PerBlock():
            return {"weight": ONE, "weight_scale": Cell(*scheme.block)}
        case IntPerGroup():
            return _integer_cells(scheme)
        case MxFp8():
            return {"weight": ONE, "weight_scale": Cell(1, scheme.block)}
        case MxFp4():
            return {"weight": PAIR, "weight_scale": Cell(1, scheme.block)}
        case NvFp4():
            return {"weight": PAIR, "weight_scale": Cell(1, scheme.block), "weight_global_scale": SECTION}
        case Nf4():
            return {"weight": PAIR, "weight_scale": Cell(1, scheme.block) if scheme.span == 1 else Cell(scheme.span, 0)}
    raise QuantError(f"{scheme.name}: how its stored tensors are cut is not known")


def _integer_cells(scheme: IntPerGroup) -> dict[str, Cell]:
    """Where inputs have an order of their own, no run of columns is a group: each row has the scales of all groups."""
    group = Cell(1, 0 if scheme.ordered else scheme.group_size)
    found = {"weight": PAIR if scheme.bits == 4 else ONE, "weight_scale": group}
    if not scheme.symmetric:
        found["weight_zero_point"] = group
    return found | {ORDER: INPUT} if scheme.ordered else found
