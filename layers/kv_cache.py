"""One sequence's keys and values, allocated whole at the start, so that memory is known before the first token.

They are kept wide or in few bits (layers.kv_forms). Whatever a query attends to is read from what is kept, the newest
tokens included: how a prompt is cut into steps changes no key and no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from layers.kv_forms import GROUP, cache_form, kept_tensors
from layers.model_config import ModelConfig
from quant.dtypes import DType, to_torch
from quant.scheme import empty_stored

if TYPE_CHECKING:
    import torch

    from layers.kv_codec import KVCodec, Room

RUN_NBYTES = 16 << 20  # of wide keys and values that are decoded at once, or one head's where those are more
STRIP_NUMBERS = 1 << 18  # that pass through a codec at once: they stay in the cache of a core


def kv_cache_nbytes(config: ModelConfig, *, max_tokens: int, dtype: DType, cache_dtype: str = "auto") -> int:
    """Bytes of a KVCache: codes and scales of every layer's keys and values for `max_tokens` tokens. Imports no torch.

    `dtype` is the model's; `cache_dtype` as in layers.kv_forms.
    """
    return sum(spec.nbytes for spec in kept_tensors(cache_dtype, _shape(config, max_tokens), wide=dtype).values())


def cache_room_nbytes(config: ModelConfig, *, max_tokens: int, dtype: DType, cache_dtype: str = "auto") -> int:
    """Bytes, at the most, of the buffers that all such caches of a model decode into: a run of wide keys and values,
    and a strip in float32 and what a codec makes it from; 0 where they are kept wide. Imports no torch."""
    form = cache_form(cache_dtype)
    if form == "auto":
        return 0
    heads, width = config.num_kv_heads, config.head_dim
    head = 2 * max_tokens * width * dtype.itemsize
    run = min(heads * head, max(RUN_NBYTES, head))
    rows = min(run // max(1, 2 * width * dtype.itemsize), max(1, STRIP_NUMBERS // width))
    held = -(-width // GROUP) * GROUP if form == "int4" else width  # whole groups
    wide = 0 if dtype is DType.F32 and held == width else held * DType.F32.itemsize
    codes = {"fp8": width, "int8": 0, "int4": width + width % 2}[form] * DType.I16.itemsize  # on their way to float32
    return run + rows * (wide + codes)


def check_cache_form(config: ModelConfig, cache_dtype: str) -> None:
    """Raises ValueError for a form in which this model's cache cannot be kept: latents are kept wide only."""
    if config.mla is not None and cache_form(cache_dtype) != "auto":
        raise ValueError(
            f"a KV cache of dtype {cache_dtype} is not possible for {config.model_type}: its attention keeps a latent "
            f"of {config.mla.latent_dim} numbers a token for all heads, in the model's dtype (auto) only"
        )


def _shape(config: ModelConfig, max_tokens: int) -> tuple[int, ...]:
    """Kinds (keys and values, or latents), layers, heads, tokens, numbers."""
    if config.mla is not None:
        return (1, config.num_layers, 1, max_tokens, config.mla.latent_dim)
    return (2, config.num_layers, config.num_kv_heads, max_tokens, config.head_dim)


class KVCache:
    """Keys and values [kv_heads, capacity, head_dim] of every layer; the first `length` tokens are filled. In a model
    of latent attention one latent [capacity, latent_dim] of every layer instead.

    A step appends to one layer after the other and then advances `length` once. A step that is given up halfway
    leaves `length` as it was: its keys are overwritten by the next one.

    `cache_dtype`: how they are kept. `scales`: fp8's, for each layer that of its keys and that of its values (None: 1).
    `room`: buffers to decode into, shared by caches of one device and one thread (None: its own). `fnuz`: fp8's codes
    are e4m3fnuz, half the numbers, so `scales` are given doubled.
    Raises ValueError for scales that are not one pair a layer, not above 0 and finite, or given to another form, and
    for a form that the model's cache cannot have.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_tokens: int,
        dtype: DType,
        device: str = "cpu",
        cache_dtype: str = "auto",
        scales: Sequence[tuple[float, float]] | None = None,
        room: Room | None = None,
        fnuz: bool = False,
    ) -> None:
        import torch

        from layers.kv_codec import Room

        check_cache_form(config, cache_dtype)
        _check_scales(config, cache_dtype, scales)
        tensors = kept_tensors(cache_dtype, _shape(config, max_tokens), wide=dtype, fnuz=fnuz)
        self._kept = empty_stored(tensors, device=device)
        self._dtype, self._head_dim = to_torch(dtype), config.head_dim
        self._room = room or Room(torch.device(device))
        self._codecs = _make_codecs(config, cache_dtype, scales, torch.device(device))
        self._wide = [list(codes) for codes in self._kept["codes"]]  # of each kind and layer, where kept wide
        self.num_heads = 1 if config.mla is not None else config.num_kv_heads
        self.cache_dtype = cache_form(cache_dtype)
        self.capacity = max_tokens
        self.length = 0
        self._nbytes = sum(tensor.nbytes for tensor in self._kept.values())

    @property
    def nbytes(self) -> int:
        """Bytes allocated for what is kept."""
        return self._nbytes

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write a step's keys and values [kv_heads, n, head_dim] behind the filled part of one layer.

        Raises ValueError when they do not fit.
        """
        self._append(layer, (keys, values))

    def append_latents(self, layer: int, latents: torch.Tensor) -> None:
        """The same for a step's latents [n, latent_dim]."""
        self._append(layer, (latents[None],))

    def latents(self, layer: int, *, stop: int) -> torch.Tensor:
        """A view of the latents [stop, latent_dim] of one layer's first tokens."""
        return self._kept["codes"][0, layer, 0, :stop]

    def _append(self, layer: int, kinds: Sequence[torch.Tensor]) -> None:
        stop = self.length + kinds[0].shape[1]
        if stop > self.capacity:
            raise ValueError(
                f"the KV cache holds {self.capacity} tokens; {self.length} are filled and {stop - self.length} more "
                "were given"
            )
        for kind, numbers in enumerate(kinds):
            codec = self._codecs[kind, layer]
            if codec is None:
                self._wide[kind][layer].narrow(1, self.length, numbers.shape[1]).copy_(numbers)
            else:
                kept = {name: tensor[kind, layer, :, self.length : stop] for name, tensor in self._kept.items()}
                codec.encode(numbers.to(self._dtype), kept)

    def runs(self, layer: int, *, stop: int, start: int = 0) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Wide keys and values of the positions [start, stop) of one layer: heads [a, b), and theirs [b - a, n, d].

        All heads at once as views where they are kept wide. Else runs of heads of at most RUN_NBYTES, or one head, in
        buffers that the next run overwrites.
        """
        heads = self.num_heads
        if self.cache_dtype == "auto":
            keys, values = (self._wide[kind][layer].narrow(1, start, stop - start) for kind in (0, 1))
            yield slice(0, heads), keys, values
            return
        step = max(1, RUN_NBYTES // max(1, 2 * (stop - start) * self._head_dim * self._dtype.itemsize))
        for first in range(0, heads, step):
            run = slice(first, min(first + step, heads))
            keys, values = (self._decoded(kind, layer, run, slice(start, stop)) for kind in (0, 1))
            yield run, keys, values

    def _decoded(self, kind: int, layer: int, heads: slice, tokens: slice) -> torch.Tensor:
        """[heads, tokens, d], decoded strip by strip."""
        shape = (heads.stop - heads.start, tokens.stop - tokens.start, self._head_dim)
        out = self._room.take(("keys", "values")[kind], shape, self._dtype)
        codec = self._codecs[kind, layer]
        assert codec is not None
        kept = {name: tensor[kind, layer, heads, tokens] for name, tensor in self._kept.items()}
        for strip in _strips(*shape):
            codec.decode({name: tensor[strip] for name, tensor in kept.items()}, out[strip], self._room)
        return out

    def advance(self, count: int) -> None:
        """Count the tokens that every layer has now appended."""
        if not 0 <= count <= self.capacity - self.length:
            raise ValueError(
                f"the KV cache holds {self.capacity} tokens; {self.length} are filled and {count} more were given"
            )
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on. Raises ValueError for a length that is not filled."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the KV cache cannot be cut to {length} tokens: {self.length} are filled")
        self.length = length


def _strips(heads: int, tokens: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Contiguous pieces of a [heads, tokens, width] tensor: a few heads whole, or a run of one head's tokens."""
    rows = max(1, STRIP_NUMBERS // width)
    whole = max(1, rows // max(1, tokens))
    for head in range(0, heads, whole):
        for token in range(0, tokens, rows):
            yield slice(head, head + whole), slice(token, token + rows)


def _make_codecs(
    config: ModelConfig,
    name: str,
    scales: Sequence[tuple[float, float]] | None,
    device: torch.device,
) -> Mapping[tuple[int, int], KVCodec | None]:
    """(0 for keys or 1 for values, layer) -> its codec; layers of equal scales share one."""
    from layers.kv_codec import codec_for

    pairs = scales or [(1.0, 1.0)] * config.num_layers
    codecs = {scale: codec_for(name, scale=scale, device=device) for scale in {s for pair in pairs for s in pair}}
    return {(kind, layer): codecs[pairs[layer][kind]] for kind in (0, 1) for layer in range(config.num_layers)}


def _check_scales(config: ModelConfig, name: str, scales: Sequence[tuple[float, float]] | None) -> None:
    if scales is None:
        return
    if cache_form(name) != "fp8":
        raise ValueError(f"a KV cache of dtype {name} takes no scales; fp8 does")
    if len(scales) != config.num_layers:
        raise ValueError(f"{len(scales)} pairs of KV-cache scales were given for {config.num_layers} layers")
    wrong = next((scale for pair in scales for scale in pair if not (isfinite(scale) and scale > 0)), None)
    if wrong is not None:
        raise ValueError(f"a KV-cache scale is {wrong}: a finite number above 0 is needed")
