"""Checkpoints that hold all experts of a layer as one tensor: each expert's part of it, under a name of its own.

A tensor "...experts.gate_up_proj" of three dims becomes "...experts.0.gate_up_proj.weight", "...experts.1...": views
of the same bytes, so that an expert is read alone; "gate_up_proj_bias" becomes "...0.gate_up_proj.bias" likewise.
Which way an expert's matrix lies, and whether outputs of gate and up take turns in it, is the family's word, never
guessed from the shape. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layers.weights import LayerSpec

EXPERTS = ".experts."
LEAVES: Mapping[str, tuple[str, int]] = MappingProxyType({
    "": ("weight", 3), "_bias": ("bias", 2), "_blocks": ("blocks", 4), "_scales": ("scales", 3),
})  # fmt: skip
"""How a tensor of all experts ends behind the projection -> what one expert's is called, dims of the whole."""
_LEAF_OF = {f"{proj}{end}": (proj, *leaf) for proj in ("gate_up_proj", "down_proj") for end, leaf in LEAVES.items()}


@dataclass(frozen=True)
class ExpertRule:
    """A projection of an expert: `source` in checkpoints is sections [first, stop) of the `of` that the expert has in
    the parameter `target`."""

    source: str
    target: str
    first: int
    stop: int
    of: int


GATE_UP_DOWN = (
    ExpertRule("gate_proj", "gate_up_proj", 0, 1, 2),
    ExpertRule("up_proj", "gate_up_proj", 1, 2, 2),
    ExpertRule("gate_up_proj", "gate_up_proj", 0, 2, 2),
    ExpertRule("down_proj", "down_proj", 0, 1, 1),
)


def is_fused(name: str, dims: int) -> bool:
    """Whether a tensor of this name and so many dims holds every expert of a layer."""
    parent, _, last = name.rpartition(".")
    return f"{parent}.".endswith(EXPERTS) and last in _LEAF_OF and _LEAF_OF[last][2] == dims


def may_be_fused(name: str) -> bool:
    """The same by the name alone."""
    parent, _, last = name.rpartition(".")
    return f"{parent}.".endswith(EXPERTS) and last in _LEAF_OF


def is_fused_weight(name: str) -> bool:
    """Whether that is a wide weight, which may lie transposed."""
    return name.endswith(("gate_up_proj", "down_proj"))


def holds_gate_up(name: str) -> bool:
    """Whether its outputs are those of gate and up."""
    return name.rpartition(".")[2].startswith("gate_up_proj")


def lie_transposed(shapes: Mapping[str, tuple[int, ...]], specs: Iterable[LayerSpec], *, usually: bool) -> bool | None:
    """Whether experts are stored [in, out], by the names and shapes of the tensors of all experts: as the family's
    files usually have them, unless every down projection, which is not square, has the other shape than the layers'.

    None where no layer is sparse.
    """
    params = (param for spec in specs for param in spec.params)
    down = next((param for param in params if param.name.endswith(".experts.down_proj.weight")), None)
    if down is None:
        return None
    rows, in_features = down.section_rows[0], down.shape[1]
    found = {shape[1:] for name, shape in shapes.items() if name.endswith(".down_proj")}
    usual = (in_features, rows) if usually else (rows, in_features)
    return usually if rows == in_features or found != {usual[::-1]} else not usually


def expert_name(name: str, expert: int) -> str:
    """What one expert's part of a fused tensor is called."""
    parent, _, last = name.rpartition(".")
    proj, leaf, _ = _LEAF_OF[last]
    return f"{parent}.{expert}.{proj}.{leaf}"
