"""Products on a CPU, each cut into panels: straight on the stored weight, by torch's int8 product, or strip by strip.

T rows of activations, O output rows, I input features. rows [T, I] is contiguous; results are [T, O]. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from quant.float8 import BLOCK
from quant.magnitudes import DEVICE_STRIP_NBYTES
from quant.panel_bounds import LEAST_LIBRARY_NBYTES, LEAST_TURNED_NBYTES, ROW_MULTIPLE, panel_bounds, strip_bounds
from quant.panels import Panel, RunPanels, Workspace
from quant.row_parts import RowParts, Rows

# Writes the numbers of weight rows [start, stop) into a strip buffer [stop - start, I].
Expand = Callable[[int, int, torch.Tensor, Workspace], None]


def straight(rows: torch.Tensor, weight: Rows, bias: torch.Tensor | None, *, run: RunPanels) -> torch.Tensor:
    """rows and weight [O, I] of one dtype, as the library multiplies them."""
    out = rows.new_empty(rows.shape[0], weight.shape[0])

    def panel(start: int, stop: int) -> Panel:
        def compute(workspace: Workspace) -> None:
            part = None if bias is None else bias[start:stop]
            out[:, start:stop] = F.linear(rows, weight[start:stop], part)

        return compute

    run(
        [
            panel(start, stop)
            for start, stop in panel_bounds(weight.shape[0], _row_nbytes(weight), least_nbytes=LEAST_LIBRARY_NBYTES)
        ]
    )
    return out


def turned(rows: torch.Tensor, weight: Rows, bias: torch.Tensor | None, *, run: RunPanels) -> torch.Tensor:
    """The same with the weight on the left: a fifth to a third faster in bfloat16 from 2 to some 100 rows."""
    out, columns = rows.new_empty(rows.shape[0], weight.shape[0]), rows.t().contiguous()

    def panel(start: int, stop: int) -> Panel:
        def compute(workspace: Workspace) -> None:
            sums = torch.mm(weight[start:stop], columns).t()
            out[:, start:stop] = sums if bias is None else sums + bias[start:stop]

        return compute

    bounds = panel_bounds(weight.shape[0], _row_nbytes(weight), least_nbytes=LEAST_TURNED_NBYTES)
    run([panel(start, stop) for start, stop in bounds])
    return out


LEAST_APART = 1 << 16  # numbers of a part of a weight that is multiplied by itself


def one_row(rows: torch.Tensor, weight: Rows, bias: torch.Tensor | None) -> torch.Tensor:
    """The same for a single row in bfloat16: a dot product for each output, a fifth faster than the general product.

    Without panels, as `int8_rows` and for its reason: each output is summed by one thread whatever their number
    (compared for 1 to 16 threads). Not so in float32. Parts of a weight, likewise, are summed where they lie (compared
    with AVX512, AMX and AVX2), but for small ones: torch sums a matrix of up to 4,096 numbers in another order.
    """
    if not isinstance(weight, RowParts):
        sums = torch.mv(weight, rows[0])
    elif min(part.numel() for part in weight.parts) < LEAST_APART:
        sums = torch.mv(weight[:], rows[0])
    else:
        sums = torch.cat([torch.mv(part, rows[0]) for part in weight.parts])
    out = sums[None]
    return out if bias is None else out.add_(bias)


# Of input features: torch's int8 product reads past the end of rows whose length is no multiple of it.
INT8_MULTIPLE = 16


def int8_rows(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """rows bfloat16, weight int8 [O, I] with I a multiple of 16, scale float32 [O]; by torch's int8 product.

    Without panels: torch's own threads, which are handed work faster, change no bits here, since each
    of the operator's small tiles of outputs is computed whole by one of them (compared for 1 to 32 threads).

    It would take the scales, but only in bfloat16: eight bits of a scale are too few, so it gets ones, and scale and
    bias are applied to its (rounded) sums in float32.
    """
    sums = torch._weight_int8pack_mm(rows, weight, rows.new_ones(weight.shape[0]))
    return scaled(sums, scale, bias, 0, weight.shape[0]).to(rows.dtype)


# Rows of x for which a float32 product is faster with the weight on the left: 10 to 40 % (AVX2 and AVX512).
TALL_ROWS = range(5, 64)


def stripwise(
    rows: torch.Tensor,
    weight: Rows,
    expand: Expand,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    run: RunPanels,
    multiple: int = ROW_MULTIPLE,
) -> torch.Tensor:
    """Panels expanded strip by strip into `dtype` and multiplied there; scale [O] and bias are applied in float32."""
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    wide, columns = rows.to(dtype), rows.shape[1]
    tall = dtype == torch.float32 and rows.shape[0] in TALL_ROWS
    turned = wide.t().contiguous() if tall else wide

    def panel(start: int, stop: int) -> Panel:
        def compute(workspace: Workspace) -> None:
            for first, last in strip_bounds(start, stop, row_nbytes=columns * dtype.itemsize):
                strip = workspace.take("strip", (last - first, columns), dtype)
                expand(first, last, strip, workspace)
                sums = torch.mm(strip, turned).t() if tall else F.linear(wide, strip)
                out[:, first:last] = scaled(sums, scale, bias, first, last)

        return compute

    run([panel(start, stop) for start, stop in panel_bounds(weight.shape[0], _row_nbytes(weight), multiple=multiple)])
    return out


def scaled(
    sums: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, start: int, stop: int
) -> torch.Tensor:
    """The sums of output rows [start, stop) times their scales plus their biases, in float32."""
    if scale is not None:
        sums = sums.float().mul_(scale[start:stop])  # a copy, or the product's own memory
    if bias is not None:
        sums = sums.float().add_(bias[start:stop])
    return sums


def _row_nbytes(weight: Rows) -> int:
    return weight.shape[1] * weight.element_size()


def on_device(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, widen: Callable[[int, int], torch.Tensor]
) -> torch.Tensor:
    """x [..., I] times a stored weight [O, ...] on a device: runs of rows widened to float32, rounded to x's dtype and
    multiplied, so that little is held beside the weight. `widen(start, stop)` gives float32 [stop - start, I], a run
    that begins with a scale block."""
    out = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype, device=x.device)
    size = max(1, DEVICE_STRIP_NBYTES // (4 * max(1, x.shape[-1]) * BLOCK)) * BLOCK
    for start in range(0, weight.shape[0], size):
        stop = min(weight.shape[0], start + size)
        part = None if bias is None else bias[start:stop]
        out[..., start:stop] = F.linear(x, widen(start, stop).to(x.dtype), part)
    return out
