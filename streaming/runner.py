"""The forward pass over layers that may still be arriving: each is leased before it is computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from layers.batch import Batch
from layers.context import StepContext
from layers.decoder import DecoderModel
from quant.kernels import Kernels
from streaming.device import Device
from streaming.embedding_rows import EmbeddingRows
from streaming.panel_pool import PanelPool
from streaming.residency import Residency
from streaming.trace import Tracer


@dataclass(frozen=True)
class ThreadCounts:
    """Compute threads; while loading, a core is left to the reader and one to the quantizer where there are so many."""

    loading: int
    resident: int


def choose_threads(asked: int | None) -> ThreadCounts:
    """Counts for this machine. On two cores a second compute thread while loading slows the load by a fifth: its
    workers spin where the reader should run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    resident = asked or min(torch.get_num_threads(), cores)
    return ThreadCounts(loading=max(1, min(resident, cores - 1) // 2), resident=resident)


@dataclass
class ModelRunner:
    """Runs batches through the model. To be used from one thread."""

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
    layers: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [f"layers.{index}" for index in range(len(self.model.layers))]
        self._table_layer = "embed" if "embed" in self.residency.states() else "head"

    def forward(
        self, batch: Batch, rows: Sequence[int], *, stop: Callable[[], None], packed: bool = False
    ) -> torch.Tensor:
        """float32 logits [len(rows), vocab] of the batch's tokens `rows`; `stop` raises to cancel, between matmuls.

        `packed`: use the layers' packed copies (see streaming.packing).
        """
        context = StepContext(
            self.kernels, packed, stop, lambda p, n: self._await_rows(p, n, stop), self.int8_activations
        )
        self._set_threads()
        hidden = self._embed(batch, context)
        rope = self.model.rope(batch)
        for name, layer in zip(self.layers, self.model.layers, strict=True):
            with self.residency.lease(name, stop=stop) as moment:
                self.device.order_after(moment)
                self._set_threads()
                with self.tracer.span("forward", name, layer=name):
                    hidden = layer(hidden, batch, rope, context)
            if self.layer_outputs is not None:
                self.layer_outputs(name, hidden)
        batch.advance()
        return self._head(hidden[list(rows)], context, stop)

    def _embed(self, batch: Batch, context: StepContext) -> torch.Tensor:
        if self.residency.is_ready(self._table_layer):
            with self.residency.lease(self._table_layer, stop=context.check) as moment:
                self.device.order_after(moment)
                return self.model.embed(batch.token_ids, context)
        with self.tracer.span("read", "embedding rows", layer="embed"):
            found = self.rows.fetch(batch.token_ids.tolist())
        return found.to(self.device.torch_device)

    def _head(self, hidden: torch.Tensor, context: StepContext, stop: Callable[[], None]) -> torch.Tensor:
        if self.device.torch_device.type == "cpu":  # the head's rows can be used while its last ones still arrive
            with self.tracer.span("forward", "head", layer="head"):
                return self.model.head(hidden, context)
        with self.residency.lease("head", stop=stop) as moment:
            self.device.order_after(moment)
            with self.tracer.span("forward", "head", layer="head"):
                return self.model.head(hidden, context)

    def _await_rows(self, param: str, rows: int, stop: Callable[[], None]) -> None:
        if self.device.torch_device.type == "cpu":
            self.residency.lease_rows("head", param, rows, stop=stop)

    def _set_threads(self) -> None:
        wanted = self.threads.resident if self.residency.all_ready() else self.threads.loading
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)
        self.panels.threads = wanted
