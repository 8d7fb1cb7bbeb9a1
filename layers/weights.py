"""What a parameter is, where its numbers come from in a checkpoint, and which layer it belongs to: all of it data.

`ParamSpec` describes one parameter of the shell. A linear weight may be fused from *sections* (q, k, v), each a run of
rows that comes from a checkpoint tensor of its own. `WeightMap` says what a checkpoint's tensor is called here. The
plan joins the two from file headers alone; nothing here imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from math import prod

from quant.dtypes import DType
from quant.scheme import Scheme, StoredSpec


class ParamKind(Enum):
    """What a parameter is for, which decides how it may be kept."""

    LINEAR = "linear"  # a projection inside a layer: quantized when a scheme is asked for
    HEAD = "head"  # the output projection: quantized only when that is asked for by name
    EMBEDDING = "embedding"  # looked up by row, wide
    NORM = "norm"  # wide
    BIAS = "bias"  # wide


@dataclass(frozen=True)
class Section:
    """One logical part of a parameter: `rows` of it along dim 0. Its name is "" where the parameter has one part."""

    name: str
    rows: int


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the shell, as the model sees it (shape) and as it is kept (scheme)."""

    name: str
    shape: tuple[int, ...]
    sections: tuple[Section, ...]
    kind: ParamKind
    dtype: DType
    scheme: Scheme

    @property
    def section_rows(self) -> tuple[int, ...]:
        """Rows of each section, in order."""
        return tuple(section.rows for section in self.sections)

    def storage(self) -> dict[str, StoredSpec]:
        """What is kept for it, by name within its module ("weight", "weight_scale", or "bias")."""
        if self.kind in (ParamKind.LINEAR, ParamKind.HEAD):
            return self.scheme.storage(self.section_rows, self.shape[1], wide=self.dtype)
        return {self.name.rpartition(".")[2]: StoredSpec(self.shape, self.dtype)}

    @property
    def nbytes(self) -> int:
        """Bytes kept for it."""
        return sum(spec.nbytes for spec in self.storage().values())

    @property
    def wide_nbytes(self) -> int:
        """Bytes of its wide form."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerSpec:
    """One step of the decoder: "embed", "layers.0" ... "layers.N-1", "head"."""

    name: str
    params: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor goes: a parameter, and the run of its sections [first, stop) that the tensor covers."""

    param: str
    first: int = 0
    stop: int = 1


@dataclass(frozen=True)
class Dropped:
    """A checkpoint tensor that is not used, and why."""

    reason: str


@dataclass(frozen=True)
class Stacked:
    """A module of the checkpoint that is one section (or a run of them) of a fused parameter: q_proj -> qkv_proj[0]."""

    source: str
    target: str
    first: int
    stop: int


_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class WeightMap:
    """How a family's checkpoint names become parameter names.

    Rules in their order: `renames` (regular expression -> replacement; None drops, with the reason), then `stacked`
    by the last module of the name. What no rule touches keeps its name. Layers from `num_layers` on are dropped
    (heads that predict further tokens are stored so).
    """

    renames: tuple[tuple[re.Pattern[str], str | None, str], ...] = field(default=())
    stacked: tuple[Stacked, ...] = ()
    num_layers: int | None = None

    def rename(self, name: str) -> str | Dropped:
        """The rename-only view: no stacking; used to look up modules that a configuration calls by checkpoint names."""
        for pattern, replacement, reason in self.renames:
            if pattern.search(name):
                if replacement is None:
                    return Dropped(reason)
                name = pattern.sub(replacement, name, count=1)
        layer = _LAYER.match(name)
        if layer and self.num_layers is not None and int(layer[1]) >= self.num_layers:
            return Dropped(f"layer {layer[1]} lies beyond num_hidden_layers = {self.num_layers}")
        return name

    def locate(self, name: str) -> Target | Dropped:
        """Where the checkpoint tensor `name` goes."""
        renamed = self.rename(name)
        if isinstance(renamed, Dropped):
            return renamed
        module, _, leaf = renamed.rpartition(".")
        parent, _, last = module.rpartition(".")
        for rule in self.stacked:
            if rule.source == last:
                return Target(f"{parent}.{rule.target}.{leaf}", rule.first, rule.stop)
        return Target(renamed)
