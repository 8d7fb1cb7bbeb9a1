"""For `verify`: what is stored of weights that are in memory only while they are used, brought and looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from layers.architecture import EMBED_WEIGHT
from quant.row_parts import RowParts

if TYPE_CHECKING:
    import torch

    from layers.decoder import DecoderModel
    from streaming.runner import ModelRunner

ROWS = 1024  # of the embedding table that are fetched at once
Look = Callable[[str, "torch.Tensor", "torch.Tensor"], None]
"""(name, as it was streamed, as it is in the resident model)"""


def passing_names(runner: ModelRunner, resident: DecoderModel) -> set[str]:
    """The parameters that are not simply there: streamed ones, the table, experts that come and go."""
    here = dict(runner.model.named_parameters())
    found = {name for name, _ in resident.named_parameters() if name not in here or here[name].is_meta}
    return found | {name for modules in _experts(runner) for name in _names_of(modules, runner)}


def look_at_streamed(runner: ModelRunner, stop: Callable[[], None], resident: DecoderModel, look: Look) -> None:
    """Give `look` each of them, part by part, in the forward thread."""
    expected = dict(resident.named_parameters())
    for name, found, rows in _units(runner, stop):
        look(name, found, expected[name] if rows is None else expected[name][rows])
    if EMBED_WEIGHT in expected and dict(runner.model.named_parameters())[EMBED_WEIGHT].is_meta:
        table = expected[EMBED_WEIGHT]
        for first in range(0, table.shape[0], ROWS):
            ids = list(range(first, min(first + ROWS, table.shape[0])))
            look(f"{EMBED_WEIGHT}, rows from {first}", runner.rows.fetch(ids), table[first : first + ROWS])
    for module in _experts(runner):
        _look_at_experts(module, runner, stop, resident, look)


def _units(runner: ModelRunner, stop: Callable[[], None]) -> Iterator[tuple[str, torch.Tensor, slice | None]]:
    """(parameter, tensor, its rows where it is a part) of every unit of the stream that no module has."""
    stream = runner.stream
    if stream is None:
        return
    for unit in stream.units:
        with stream.lease_unit(unit, stop=stop) as leased:
            if leased is None:
                continue
            stored = {"weight": leased[:]} if isinstance(leased, RowParts) else leased
            module = unit.param.name.rpartition(".")[0]
            multiple = unit.param.scheme.row_multiple if unit.param.kind.has_scheme else 1
            for name, tensor in stored.items():
                step = 1 if tensor.shape[:1] == unit.param.shape[:1] else multiple
                rows = slice(unit.first // step, unit.first // step + tensor.shape[0]) if unit.is_part else None
                yield f"{module}.{name}", tensor, rows


def _experts(runner: ModelRunner) -> list[str]:
    """Modules of experts that come and go."""
    from layers.moe import Experts
    from streaming.expert_cache import ExpertCache

    if not isinstance(runner.experts, ExpertCache):
        return []
    return [name for name, module in runner.model.named_modules() if isinstance(module, Experts)]


def _names_of(module: str, runner: ModelRunner) -> Iterator[str]:
    return (
        f"{module}.{name}"
        for name, _ in runner.model.get_submodule(module).named_parameters()
        if not name.endswith("bias")
    )


def _look_at_experts(
    module: str, runner: ModelRunner, stop: Callable[[], None], resident: DecoderModel, look: Look
) -> None:
    from layers.moe import Experts
    from streaming.expert_cache import ExpertCache

    own, other = runner.model.get_submodule(module), resident.get_submodule(module)
    assert isinstance(own, Experts)
    assert isinstance(other, Experts)
    assert isinstance(runner.experts, ExpertCache)
    every = range(own.gate_up_proj.experts)
    for expert in runner.experts.needed(own.gate_up_proj.name, every, stop=stop):
        for projection in ("gate_up_proj", "down_proj"):
            expected: Mapping[str, torch.Tensor] = getattr(other, projection).stored(expert)
            for name, tensor in getattr(own, projection).stored(expert).items():
                look(f"{module}.{projection}.{name} of expert {expert}", tensor, expected[name])
