"""Weights that are quantized anew: what has come of one in its form on disk, held until it is whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quant.dtypes import to_torch
from quant.requantize import requantize
from quant.scheme import empty_stored
from streaming.plan import LoadItem
from streaming.stages import arrival, store_item


class Arrivals:
    """At most one run of sections is held at a time: items come in plan order."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], dict[str, torch.Tensor]] = {}

    def store(self, item: LoadItem, wide: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> None:
        """Hold one tensor of the form on disk; with the last one the run is quantized into `stored`."""
        run = item.param.run_at(item.section)
        key = (item.param.name, run)
        if key not in self._held:
            self._held[key] = empty_stored(arrival(item), device=wide.device)
        held = self._held[key]
        store_item(item, wide, held)
        if item.completes:
            _quantize(item, held, stored)
            del self._held[key]


def _quantize(item: LoadItem, held: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    param, first = item.param, 0
    total = param.run_rows[param.run_at(item.section)]
    for section in range(item.section, item.section + item.sections):
        rows = param.section_rows[section]
        views = param.scheme.section_views(stored, param.section_rows, section)
        requantize(
            item.form.kept, held, param.scheme, views,
            first=first, rows=rows, total=total, in_features=param.shape[1], dtype=to_torch(param.dtype),
        )  # fmt: skip
        first += rows
