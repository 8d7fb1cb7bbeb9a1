"""The forward pass over layers that may still be arriving: each is leased before it is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from layers.architecture import EMBED_WEIGHT
from layers.batch import Batch
from layers.context import AwaitExperts, StepContext
from layers.decoder import DecoderModel
from layers.parallel import Groups
from layers.topology import Topology
from quant.kernels import Kernels
from streaming.cores import core_count
from streaming.device import Device
from streaming.embedding_rows import EmbeddingRows
from streaming.panel_pool import PanelPool
from streaming.residency import Residency
from streaming.trace import Tracer

if TYPE_CHECKING:
    from streaming.distributed import DistributedGroup, ProcessGroups
    from streaming.expert_cache import ExpertCache
    from streaming.expert_loading import ExpertLoader
    from streaming.ranks.lead import Lead
    from streaming.weight_stream import WeightStream


@dataclass(frozen=True)
class ThreadCounts:
    """Compute threads; while loading, a core is left to the reader and one to the quantizer where there are so many."""

    loading: int
    resident: int


def choose_threads(asked: int | None) -> ThreadCounts:
    """Counts for this machine. On two cores a second compute thread while loading slows the load by a fifth: its
    workers spin where the reader should run."""
    cores = core_count()
    resident = asked or min(torch.get_num_threads(), cores)
    return ThreadCounts(loading=max(1, min(resident, cores - 1) // 2), resident=resident)


@dataclass
class ModelRunner:
    """Runs batches through the model. To be used from one thread.

    On several ranks, `lead` is rank 0's, whose `forward` is computed by all of them; each rank `run`s its part.
    """

    model: DecoderModel
    device: Device
    residency: Residency
    rows: EmbeddingRows
    kernels: Kernels
    tracer: Tracer
    threads: ThreadCounts
    panels: PanelPool
    layer_outputs: Callable[[str, torch.Tensor], None] | None = None
    int8_activations: bool = False
    topology: Topology = field(default_factory=Topology)
    process_groups: ProcessGroups | None = None
    lead: Lead | None = None
    experts: ExpertLoader | ExpertCache | None = None  # where they are loaded apart from their layers
    foresight: Callable[[str, torch.Tensor], None] | None = None  # of the experts that the next layer will need
    stream: WeightStream | None = None  # of weights that do not all fit into memory
    say_through: Callable[[], None] = lambda: None  # tells who receives from this rank, see streaming.ranks.first_pass
    layers: Sequence[str] = field(init=False)  # of this rank's stage
    at: str = ""  # the layer that is computed or waited for, or was last

    def __post_init__(self) -> None:
        self._first, stop = self.topology.layers_of_stage(len(self.model.layers))
        self.layers = [f"layers.{index}" for index in range(self._first, stop)]
        self._is_through = False
        self.computing = threading.Lock()  # held for the length of a pass
        self._table_layer = "embed" if "embed" in self.residency.states() else "head"

    def forward(
        self, batch: Batch, rows: Sequence[int], *, stop: Callable[[], None], packed: bool = False
    ) -> torch.Tensor:
        """float32 logits [len(rows), vocab] of the batch's tokens `rows`; `stop` raises to cancel, between matmuls (on
        several ranks: between steps).

        `packed`: use the layers' packed copies (see streaming.packing).
        """
        if self.lead is not None:
            return self.lead.forward(self, batch, rows, stop=stop, packed=packed)
        logits = self.run(batch, rows, stop=stop, packed=packed, table=self.has_table())
        assert logits is not None  # one rank is the last stage too
        return logits

    def has_table(self) -> bool:
        """Whether the embedding table is there, or has to be waited for since no file has all of its rows."""
        if self.rows.available and EMBED_WEIGHT not in self.device.stored:
            return False  # weights are streamed, and the table is not kept for a few rows
        return not self.rows.available or self.residency.is_ready(self._table_layer)

    def run(
        self, batch: Batch, rows: Sequence[int], *, stop: Callable[[], None], packed: bool, table: bool
    ) -> torch.Tensor | None:
        """This rank's part of a step: the logits, or None where a later stage of the pipeline has them.

        `table`: use the embedding table; else the tokens' rows are fetched from the file. `batch` may be empty where
        other ranks have sequences and this one has not.
        """
        late = self.experts is not None and not self.experts.is_done
        with self.computing, self.experts.computing() if self.experts and late else nullcontext():
            return self._run(batch, rows, stop, packed=packed, table=table)

    def _run(
        self, batch: Batch, rows: Sequence[int], stop: Callable[[], None], *, packed: bool, table: bool
    ) -> torch.Tensor | None:
        groups = Groups() if self.process_groups is None else self.process_groups.forward
        context = StepContext(
            self.kernels, packed, stop, lambda p, n: self._await_rows(p, n, stop), self.int8_activations, groups,
            self._await_experts(stop), weights=None if self.stream is None else self.stream.for_step(stop),
            foresee_experts=self.foresight,
        )  # fmt: skip
        self._set_threads()
        self.at = "embed"
        hidden = self._embed(batch, context, table=table) if self.topology.stage == 0 else self._receive(batch, stop)
        rope = self.model.rope(batch)
        for index, name in enumerate(self.layers, start=self._first):
            self.at = name
            with self.residency.lease(name, stop=stop) as moment:
                self.device.order_after(moment)
                self._set_threads()
                with self.tracer.span("forward", name, layer=name):
                    hidden = self.model.layers[index](hidden, batch, rope, context)
            if self.layer_outputs is not None:
                self.layer_outputs(name, hidden)
        batch.advance()
        if self.topology.stage < self.topology.pipeline - 1:
            self.send(hidden, to=self.topology.rank + self.topology.stage_ranks)
            return None
        return self._head(hidden[list(rows)], context, stop)

    @property
    def peers(self) -> DistributedGroup:
        """All ranks, to send to and receive from, in a run where they do."""
        assert self.process_groups is not None
        assert self.process_groups.world is not None
        return self.process_groups.world

    def send(self, x: torch.Tensor, *, to: int) -> None:
        """Send to another rank what it receives; that all layers here are computed is told it before the first time."""
        if not self._is_through:
            self._is_through = True
            self.say_through()
        self.peers.send(x, to=to)

    def _receive(self, batch: Batch, stop: Callable[[], None]) -> torch.Tensor:
        """hidden [T, D] from the stage before."""
        shape = (batch.token_ids.shape[0], self.model.config.hidden_size)
        source, device = self.topology.rank - self.topology.stage_ranks, self.device.torch_device
        self.residency.await_through(source, layer=self.layers[0], stop=stop)
        with self.tracer.span("forward", f"from rank {source}", layer=self.layers[0]):
            return self.peers.receive(shape, self.model.dtype, source=source, device=device)

    def _embed(self, batch: Batch, context: StepContext, *, table: bool) -> torch.Tensor:
        if not batch.sequences:
            width, device = self.model.config.hidden_size, self.device.torch_device
            return torch.empty(0, width, dtype=self.model.dtype, device=device)
        if table:
            with self.residency.lease(self._table_layer, stop=context.check) as moment:
                self.device.order_after(moment)
                return self.model.embed(batch.token_ids, context)
        with self.tracer.span("read", "embedding rows", layer="embed"):
            found = self.rows.fetch(batch.token_ids.tolist())
        return found.to(self.device.torch_device)

    def _head(self, hidden: torch.Tensor, context: StepContext, stop: Callable[[], None]) -> torch.Tensor:
        self.at = "head"
        if not self.topology.is_single and not hidden.shape[0]:
            return torch.empty(0, self.model.config.vocab_size, device=self.device.torch_device)
        if self.device.torch_device.type == "cpu":  # the head's rows can be used while its last ones still arrive
            with self.tracer.span("forward", "head", layer="head"):
                local = self.model.local_logits(hidden, context)
            if self.topology.is_single:
                return self.model.gather_logits(local, context)
            with self.residency.lease("head", stop=stop):  # all ranks have the whole of it: they meet here
                return self.model.gather_logits(local, context)
        with self.residency.lease("head", stop=stop) as moment:
            self.device.order_after(moment)
            with self.tracer.span("forward", "head", layer="head"):
                return self.model.head(hidden, context)

    def _await_experts(self, stop: Callable[[], None]) -> AwaitExperts | None:
        """What a sparse layer calls before it reads experts, while they are loaded apart from their layers."""
        if self.experts is None or self.experts.is_done:
            return None
        return partial(self.experts.needed, stop=stop)

    def _await_rows(self, param: str, rows: int, stop: Callable[[], None]) -> None:
        if self.device.torch_device.type == "cpu":
            self.residency.lease_rows("head", param, rows, stop=stop)

    def _set_threads(self) -> None:
        copying = self.stream is not None and self.stream.loading.copies  # a core is left to it, as while loading
        wanted = self.threads.resident if self.residency.all_ready() and not copying else self.threads.loading
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
        self.panels.threads = wanted
