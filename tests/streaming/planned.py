"""Checkpoints that exist as data only, and their plans: what headers would say of a tiny model, without a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.write_tiny_model import TinyModel, config_of, tensor_shapes
from layers.architecture import layer_specs
from layers.config import parse_config, weight_map
from layers.weights import LayerSpec
from quant.dtypes import DType
from quant.scheme import StoredSpec
from quant.wide import Wide
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.plan import ITEM_NBYTES, LoadPlan, make_plan
from tests.layers.tiny import OneScheme

if TYPE_CHECKING:
    from quant.scheme import Scheme

FILE = Path("/models/tiny/model.safetensors")
Tensors = dict[str, TensorInfo]


def tensors_of(model: TinyModel, *, dtype: DType = DType.BF16) -> Tensors:
    """The model's tensors, one behind the other in one file."""
    found: Tensors = {}
    offset = 1000
    for name, shape in tensor_shapes(model):
        found[name] = tensor(name, shape, offset=offset, dtype=dtype)
        offset += found[name].nbytes
    return found


def tensor(name: str, shape: tuple[int, ...], *, offset: int = 0, dtype: DType = DType.BF16) -> TensorInfo:
    """A plain tensor."""
    return TensorInfo(name, shape, dtype, FILE, offset, prod(shape) * dtype.itemsize)


def plan_of(
    model: TinyModel,
    tensors: Mapping[str, TensorInfo] | None = None,
    *,
    scheme: Scheme = Wide(),  # noqa: B008 (frozen)
    head: bool = False,
    dtype: DType = DType.BF16,
    tied: bool | None = None,
    direct: bool = True,
    read: Callable[[TensorInfo], bytes] = lambda info: b"\1" * info.nbytes,
    strict: bool = True,
    unwrap: bool = False,
    item_nbytes: int = ITEM_NBYTES,
    **changes: Any,
) -> LoadPlan:
    """The plan of these tensors (None: the model's own); `changes` are made to its config."""
    raw = config_of(model) | changes
    config = parse_config(raw)
    found = dict(tensors_of(model) if tensors is None else tensors)
    tied = model.tied if tied is None else tied
    specs = layer_specs(config, dtype=dtype, policy=OneScheme(scheme, head=head), tied=tied)
    checkpoint = Checkpoint(FILE.parent, "safetensors", found, (FILE,), raw, {})
    return make_plan(
        checkpoint, specs, weight_map(config), tied=tied, direct=direct, read=read, strict=strict,
        unwrap=unwrap, item_nbytes=item_nbytes,
    )  # fmt: skip


def specs_of(plan: LoadPlan) -> tuple[LayerSpec, ...]:
    """The specs that the plan fills."""
    return tuple(layer.spec for layer in plan.layers)


@dataclass(frozen=True)
class Blocks(Wide):
    """A scheme whose rows belong together in blocks, with a scale for each; for plans only."""

    rows: int = 1

    @property
    def name(self) -> str:
        return "blocks"

    @property
    def row_multiple(self) -> int:
        return self.rows

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        scales = sum(-(-rows // self.rows) for rows in sections) if self.rows else len(sections)
        return {
            "weight": StoredSpec((sum(sections), in_features), DType.I8),
            "weight_scale": StoredSpec((scales, 1), DType.F32),
        }
