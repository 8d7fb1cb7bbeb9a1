"""A text's way through a model's layers, wide and under several schemes side by side: the sums that quality is made of.

No model is held whole: see streaming.quality. T tokens of a run, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch

from layers.architecture import EMBED_WEIGHT
from layers.batch import make_batch
from layers.context import StepContext
from layers.decoder import DecoderModel, build_shell, stored_names
from layers.kv_cache import KVCache
from layers.weights import LayerSpec
from quant.kernels import KernelMode, Kernels
from streaming.embedding_rows import EmbeddingRows
from streaming.one_layer import load_one_layer
from streaming.panel_pool import PanelPool
from streaming.prepare import Prepared
from streaming.quality_measures import LogitsSums, logits_sums, state_noise, weight_noise
from streaming.quality_report import LayerQuality, Noise, add_all, quantized_params
from streaming.quality_text import Run
from streaming.runner import choose_threads

HEAD_ROWS = 32  # positions whose logits are held at once

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SchemeSums:
    """What was found of one scheme."""

    layers: tuple[LayerQuality, ...]
    logits: LogitsSums


def measure_schemes(
    wide: Prepared,
    schemes: Sequence[Prepared],
    runs: tuple[Run, ...],
    *,
    progress: Callable[[str, int, int], None],
) -> list[SchemeSums]:
    """The sums of each of `schemes`, loads of the same model that `wide` loads without any."""
    threads = choose_threads(wide.options.threads).resident
    with closing(PanelPool(threads)) as panels, torch.inference_mode():
        step = _step(wide, runs, panels)
        same = all(one.options.kv_cache_dtype == one.options.activation_dtype == "auto" for one in schemes)
        scheme_step = step if same else _step(schemes[0], runs, panels)
        reference = _Stream(wide, build_shell(wide.config, wide.specs), step, threads)
        streams = [_Stream(one, build_shell(one.config, one.specs), scheme_step, threads) for one in schemes]
        return _walk(reference, streams, progress)


def _step(prepared: Prepared, runs: tuple[Run, ...], panels: PanelPool) -> _Step:
    options, device = prepared.options, torch.device(prepared.options.device)
    cache = KVCache(
        prepared.config, max_tokens=max(len(run.ids) for run in runs), dtype=prepared.dtype, device=str(device),
        cache_dtype=options.kv_cache_dtype, scales=prepared.kv_scales,
    )  # fmt: skip
    kernels = Kernels.detect(mode=KernelMode(options.kernels), run=panels)
    return _Step(runs, cache, StepContext(kernels, int8_activations=options.activation_dtype == "int8"), device)


def _walk(
    reference: _Stream, streams: Sequence[_Stream], progress: Callable[[str, int, int], None]
) -> list[SchemeSums]:
    count = reference.prepared.config.num_layers
    _embed([reference, *streams])
    for index in range(count):
        progress(f"layers.{index}", index, count + 1)
        _pass_layer(reference, streams, index)
    progress("head", count, count + 1)
    wide = reference.load("head")
    return [_finish(reference, stream, wide) for stream in streams]


@dataclass(frozen=True)
class _Step:
    """What a layer is computed with. One cache serves all: no step advances it, so each writes over the last."""

    runs: tuple[Run, ...]
    cache: KVCache
    context: StepContext
    device: torch.device


@dataclass
class _Stream:
    """The model in one form on its way through the layers: the hidden states [T, D] of each run."""

    prepared: Prepared
    shell: DecoderModel
    step: _Step
    threads: int
    hidden: list[torch.Tensor] = field(default_factory=list)
    layers: list[LayerQuality] = field(default_factory=list)

    def spec(self, layer: str) -> LayerSpec:
        """The layer's parameters."""
        return next(spec for spec in self.prepared.specs if spec.name == layer)

    def load(self, layer: str) -> Tensors:
        """The layer's stored tensors, which the shell holds until `release`."""
        tensors = load_one_layer(self.prepared, layer)
        torch.set_num_threads(self.threads)  # the load has its own
        for name, tensor in tensors.items():
            self.shell.assign(name, tensor)
        return tensors

    def release(self, layer: str) -> None:
        """Give the layer's memory back."""
        for param in self.spec(layer).params:
            for name in stored_names(param):
                self.shell.release(name)

    def advance(self, index: int, shell: DecoderModel) -> None:
        """Compute a decoder layer, with the parameters of `shell`."""
        step, vocab_size = self.step, self.prepared.config.vocab_size
        for number, run in enumerate(step.runs):
            batch = make_batch([(run.ids, step.cache)], vocab_size=vocab_size, device=step.device)
            self.hidden[number] = shell.layers[index](self.hidden[number], batch, shell.rope(batch), step.context)


def _embed(streams: Sequence[_Stream]) -> None:
    """The first hidden states, which no scheme changes: only the text's own rows of the table are read."""
    prepared, step = streams[0].prepared, streams[0].step
    table = prepared.plan.table
    assert table is not None  # one rank has all of it
    with closing(EmbeddingRows(table, dtype=prepared.dtype, state=prepared.read_plan.state_of(table.file))) as rows:
        found = [rows.fetch(run.ids).to(step.device) for run in step.runs]
    for stream in streams:
        stream.hidden = list(found)


def _pass_layer(reference: _Stream, streams: Sequence[_Stream], index: int) -> None:
    """Every stream behind this decoder layer. One whose scheme keeps the layer wide computes with the wide one."""
    name = f"layers.{index}"
    wide = reference.load(name)
    reference.advance(index, reference.shell)
    for stream in streams:
        weights = Noise()
        if quantized_params(stream.spec(name)):
            weights = _weights(stream, name, wide)
            stream.advance(index, stream.shell)
            stream.release(name)
        else:
            stream.advance(index, reference.shell)
        outputs = add_all(map(state_noise, stream.hidden, reference.hidden))
        stream.layers.append(LayerQuality(name, weights, outputs))
    reference.release(name)


def _weights(stream: _Stream, layer: str, wide: Tensors) -> Noise:
    """Load the layer; the noise of all its quantized weights, one weight after the other."""
    stored = stream.load(layer)
    total = Noise()
    for param in quantized_params(stream.spec(layer)):
        module = param.name.rpartition(".")[0]
        own = {name: stored[f"{module}.{name}"] for name in param.storage()}
        expected = wide[param.name] if param.name in wide else wide[EMBED_WEIGHT]  # of a tied head
        total += weight_noise(param, own, expected)
    return total


def _finish(reference: _Stream, stream: _Stream, wide: Tensors) -> SchemeSums:
    """The head, whose wide parameters the reference's shell holds."""
    own = bool(quantized_params(stream.spec("head")))
    if own:
        stream.layers.append(LayerQuality("head", _weights(stream, "head", wide), None))
    shell = stream.shell if own else reference.shell
    total = LogitsSums()
    for expected, hidden, targets in _positions(reference, stream):
        wide_logits = reference.shell.head(expected, reference.step.context)
        total += logits_sums(wide_logits, shell.head(hidden, stream.step.context), targets)
    if own:
        stream.release("head")
    return SchemeSums(tuple(stream.layers), total)


def _positions(reference: _Stream, stream: _Stream) -> Iterator[tuple[torch.Tensor, ...]]:
    """The last hidden states of both, and the tokens that come, of a few positions at a time."""
    step = reference.step
    for run, expected, hidden in zip(step.runs, reference.hidden, stream.hidden, strict=True):
        rows = slice(run.first - 1, len(run.ids) - 1)
        targets = torch.tensor(run.targets, dtype=torch.int64, device=step.device)
        yield from zip(*(part.split(HEAD_ROWS) for part in (expected[rows], hidden[rows], targets)), strict=True)
