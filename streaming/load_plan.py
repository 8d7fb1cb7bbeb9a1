"""The plan as data: items, which are runs of rows of one tensor, by layer, in the order in which they are read.
[no-torch]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from layers.topology import Topology
from layers.weights import LayerSpec, ParamSpec
from quant.disk_forms.form import disk_tensors
from streaming.checkpoint.tensors import TensorInfo
from streaming.piece_cutting import cut_pieces, moved_nbytes

if TYPE_CHECKING:
    from quant.disk_forms.form import DiskForm
    from streaming.expert_plan import ExpertLayer
    from streaming.rank_share import RankShare
    from streaming.stream_plan import StreamPlan


@dataclass(frozen=True)
class SharedRead:
    """Bytes that several ranks of a tensor group want: `owner` reads them, the others of `ranks` get them from it.
    `rank` is this one. Numbers within the group."""

    owner: int
    ranks: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class LoadItem:
    """One run of rows of one section of one parameter, taken from one checkpoint tensor.

    `rows` counts within the checkpoint tensor, `section_rows` within the section. A direct item's bytes are its
    stored form: they are read straight into the memory where they stay. Others pass through the window. Where `stored`
    is set, the checkpoint tensor is a whole stored tensor of the parameter, and both count its rows. `leaf` names one
    of the tensors that an already quantized weight is on disk, and `fills` what is made of it.

    Of a parameter that is cut over ranks, `picked` rows and `columns` say what of the numbers that arrive is wanted. A
    rank's columns may be read alone: then `tensor` is what they make, packed, and `stride_nbytes` how far its rows lie
    apart on disk.
    """

    index: int
    layer: str
    param: ParamSpec
    section: int
    tensor: TensorInfo
    rows: tuple[int, int]
    section_rows: tuple[int, int]
    direct: bool
    sections: int = 1  # how many sections, from `section` on, one tensor fills
    stored: str | None = None  # the name of the stored tensor that it is rows of, where it is on disk in stored form
    leaf: str = ""  # the end of its name, where it is one tensor of a quantized weight's form on disk
    fills: str = ""  # the stored tensor that is made of it then
    completes: bool = False  # the last item of such a weight, or of one stored tensor of it (`held`)
    picked: tuple[tuple[int, int], ...] = ()  # rows of it that are wanted, section after section; (): all
    columns: tuple[int, int] | None = None  # numbers of each row that are wanted (bytes, of a `leaf` that is `as_is`)
    stride_nbytes: int = 0  # from one row to the next on disk, where these are runs of bytes with others between them
    scales_of_all: bool = False  # rows are quantized whole, and cut after
    held: bool = False  # a `leaf` of a weight that is cut, kept whole until its part of the weight can be made
    shared: SharedRead | None = None  # with which ranks its bytes are shared; None: this rank reads them for itself

    @property
    def is_received(self) -> bool:
        """Whether its bytes come from another rank."""
        return self.shared is not None and self.shared.owner != self.shared.rank

    @property
    def is_staged(self) -> bool:
        """Whether its bytes pass through the window."""
        return not (self.direct or self.is_received)

    @property
    def form(self) -> DiskForm:
        """The form on disk of the weight that this is a part of; only of items with a `leaf`."""
        form = self.param.whole.forms[self.disk_run]
        assert form is not None
        return form

    @property
    def disk_run(self) -> int:
        """The run of sections, of the uncut parameter, that it is a part of; only of items with a `leaf`."""
        return self.param.run_of(self.section)

    @property
    def form_shape(self) -> tuple[int, int]:
        """Rows and inputs of the run of sections that the form is of; only of items with a `leaf`."""
        whole = self.param.whole
        return whole.run_rows[self.disk_run], whole.shape[1]

    @property
    def is_as_stored(self) -> bool:
        """Whether rows of a tensor of a form on disk are rows of what is kept, byte for byte."""
        if not self.leaf:
            return False
        return any(one.as_is and one.leaf == self.leaf for one in disk_tensors(self.form, *self.form_shape))

    @property
    def run_nbytes(self) -> int:
        """Bytes of one run of a strided item (`stride_nbytes`); 0 where it is one run of bytes."""
        return self.tensor.row_nbytes if self.stride_nbytes else 0

    @property
    def stored_name(self) -> str:
        """The stored tensor that it fills, or the first of those."""
        return self.stored or self.fills or self.param.name.rpartition(".")[2]

    @property
    def read_nbytes(self) -> int:
        """Bytes that files are read for it: none where its numbers are made up; where some columns are read, short
        gaps between them too; none where they come from another rank."""
        if self.is_received:
            return 0
        if self.stride_nbytes and not self.tensor.generated:
            pieces = cut_pieces(self.nbytes, self.run_nbytes, self.stride_nbytes)
            return sum(moved_nbytes(size, self.run_nbytes if stride else 0, stride) for _, _, size, stride in pieces)
        return 0 if self.tensor.generated else self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of it that arrive."""
        if self.tensor.strides is not None:
            return self.tensor.nbytes
        return (self.rows[1] - self.rows[0]) * self.tensor.row_nbytes

    @property
    def file_offset(self) -> int:
        """Where its first byte lies in its file."""
        if self.tensor.strides is not None:
            return self.tensor.offset
        return self.tensor.offset + self.rows[0] * (self.stride_nbytes or self.tensor.row_nbytes)


@dataclass(frozen=True)
class LayerPlan:
    """One layer's items, in the order in which they are read."""

    name: str
    spec: LayerSpec
    items: tuple[LoadItem, ...]

    @cached_property
    def read_nbytes(self) -> int:
        """Bytes read for this layer."""
        return sum(item.read_nbytes for item in self.items)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that stay in memory."""
        return sum(param.nbytes for param in self.spec.params)


@dataclass(frozen=True)
class LoadPlan:
    """The whole load, layers in reading order (which is not the order of use for the embedding table)."""

    layers: tuple[LayerPlan, ...]
    table: TensorInfo | None  # where any row of the embedding table can be fetched on its own; None: nowhere
    dropped: Mapping[str, str]  # checkpoint name -> why it is not used
    warnings: tuple[str, ...] = field(default=())
    unused: Mapping[str, int] = field(default_factory=dict)  # why tensors are not used -> their bytes
    unwrapped: Mapping[str, str] = field(default_factory=dict)  # names without a wrapper's words -> as they are on disk
    specs: tuple[LayerSpec, ...] = ()  # the layers in the order of use, where their weights have forms on disk
    experts: tuple[ExpertLayer, ...] = ()  # what is loaded apart from the layers, when it is needed
    ranks: tuple[RankShare, ...] = ()  # what every rank has, where that was asked for
    topology: Topology = field(default_factory=Topology)  # the ranks, and which of them this plan is for
    stream: StreamPlan | None = None  # what comes anew in every pass, where not all fits into memory

    @cached_property
    def all_layers(self) -> tuple[LayerPlan, ...]:
        """The layers, each with what is loaded apart from it behind it."""
        apart = {one.of: one.plan for one in self.experts}
        pairs = ((layer, apart.get(layer.name)) for layer in self.layers)
        return tuple(plan for pair in pairs for plan in pair if plan is not None)

    @cached_property
    def all_items(self) -> tuple[LoadItem, ...]:
        """Every item, of experts that are loaded apart and of what is streamed too."""
        units = () if self.stream is None else self.stream.units
        streamed = (item for unit in units if unit.name not in self.stream_loaded for item in unit.items)
        return (*(item for layer in self.all_layers for item in layer.items), *streamed)

    @property
    def stream_loaded(self) -> frozenset[str]:
        """Units of the stream that are loaded with the layers."""
        return frozenset() if self.stream is None else self.stream.loaded

    @cached_property
    def items(self) -> tuple[LoadItem, ...]:
        """All items in reading order."""
        return tuple(item for layer in self.layers for item in layer.items)

    @property
    def read_nbytes(self) -> int:
        """Bytes read from the files: of what is streamed, those of one pass (of experts that do not all fit, all)."""
        return sum(layer.read_nbytes for layer in self.all_layers) + self._streamed_read_nbytes

    @property
    def received_nbytes(self) -> int:
        """Bytes that come from other ranks, which have read them."""
        return sum(item.nbytes for item in self.items if item.is_received)

    @property
    def soonest_nbytes(self) -> int:
        """Bytes that no first token can do without: where experts are loaded apart, without any."""
        return sum(layer.read_nbytes for layer in self.layers) + self._streamed_read_nbytes

    @property
    def _streamed_read_nbytes(self) -> int:
        """Of what comes through the stream for the first time."""
        if self.stream is None:
            return 0
        return sum(unit.read_nbytes for unit in self.stream.units if unit.name not in self.stream_loaded)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of all parameters that stay in memory, in their stored form."""
        if self.stream is not None:
            return sum(layer.kept_nbytes for layer in self.layers) + self.stream.own_nbytes
        return sum(layer.kept_nbytes for layer in self.all_layers)

    @cached_property
    def largest_staged_nbytes(self) -> int:
        """Bytes of the largest item that passes through the window; 0 when none does."""
        return max((item.nbytes for item in self.items if item.is_staged), default=0)
