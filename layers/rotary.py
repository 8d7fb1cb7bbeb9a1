"""Rotary position embedding: frequencies of every kind, the angles of a step, and the rotation itself.

Formulas and their roundings follow transformers 5 (modeling_rope_utils.py): frequencies and angles in float32, cos and
sin rounded once to the activations' dtype. T tokens, R rotated numbers of a head, R/2 frequencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log, pi

import torch

from layers.batch import Batch
from layers.model_config import RopeConfig, RopeKind


@dataclass(frozen=True)
class Rope:
    """The angles of a step's tokens: cos and sin, each [T, R], in the activations' dtype."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim] with its first R numbers of each head rotated; pairs lie R/2 apart, or side by side
        where they are interleaved."""
        size = self.cos.shape[-1]
        part = x if size == x.shape[-1] else x[..., :size]
        turned = (part * self._cos).add_(self._partners(part).mul_(self._signed_sin))
        return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)

    @cached_property
    def _cos(self) -> torch.Tensor:
        return self.cos.unsqueeze(1)

    @cached_property
    def _signed_sin(self) -> torch.Tensor:
        """What the partners are multiplied by: with its sign turned for the first of a pair."""
        sin = self.sin.unsqueeze(1).clone()
        first = sin[..., 0::2] if self.interleaved else sin[..., : sin.shape[-1] // 2]
        first.neg_()
        return sin

    def _partners(self, part: torch.Tensor) -> torch.Tensor:
        """Each number's partner in its pair: a copy."""
        if self.interleaved:
            return torch.stack((part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
        return part.roll(part.shape[-1] // 2, -1)


@dataclass(frozen=True)
class Ropes:
    """What a step's layers rotate by: those with a window by `local`, all others by `full`. None rotates nothing."""

    full: Rope | None
    local: Rope | None


class RotaryEmbedding:
    """Makes a step's `Rope`. Not a module: its frequencies are constants, which no checkpoint fills."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self._base = inverse_frequencies(config, length=0)

    def __call__(self, batch: Batch, *, dtype: torch.dtype) -> Rope:
        """The angles of a batch's tokens.

        Dynamic and long frequencies depend on a sequence's length so far, of each sequence by itself. Keys already in
        the cache keep the angles that they were given.
        """
        angles = torch.cat(
            [
                self._angles(batch.positions[sequence.start : sequence.stop], self._frequencies(sequence.length))
                for sequence in batch.sequences
            ]
        )
        scale = self.config.attention_factor
        return Rope((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype), self.config.interleaved)

    def _frequencies(self, length: int) -> torch.Tensor:
        if self.config.kind not in (RopeKind.DYNAMIC, RopeKind.LONGROPE):
            return self._base
        return inverse_frequencies(self.config, length=length)

    def _angles(self, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        products = positions[:, None].float() * frequencies.to(positions.device)  # [T, R/2]
        if self.config.interleaved:
            return products.repeat_interleave(2, dim=-1)
        return torch.cat((products, products), dim=-1)


def inverse_frequencies(config: RopeConfig, *, length: int) -> torch.Tensor:
    """float32 [R/2] on the CPU for a sequence of `length` tokens (which only dynamic and longrope look at)."""
    frequencies = _of_kind(config, length)
    if config.frequency_divisors:
        return frequencies / torch.tensor(config.frequency_divisors, dtype=torch.float32, device="cpu")
    return frequencies


def _of_kind(config: RopeConfig, length: int) -> torch.Tensor:
    match config.kind:
        case RopeKind.DEFAULT:
            return _plain(config)
        case RopeKind.LINEAR:
            return _plain(config) / config.factor
        case RopeKind.DYNAMIC:
            return _dynamic(config, length)
        case RopeKind.LLAMA3:
            return _llama3(config)
        case RopeKind.YARN:
            return _yarn(config)
        case RopeKind.LONGROPE:
            return _longrope(config, length)


def _exponents(config: RopeConfig) -> torch.Tensor:
    return torch.arange(0, config.dim, 2, dtype=torch.int64, device="cpu").float() / config.dim


def _plain(config: RopeConfig) -> torch.Tensor:
    """theta^(-2i/R) (Su et al. 2021, arXiv:2104.09864)."""
    return 1.0 / (config.theta ** _exponents(config))


def _dynamic(config: RopeConfig, length: int) -> torch.Tensor:
    """NTK-aware scaling: the base grows with the length beyond the trained one, and is theta up to it."""
    trained = config.max_position_embeddings
    if length <= trained:
        return _plain(config)
    # The reference computes the stretch with the length as a tensor, so in float32.
    stretch = (config.factor * torch.tensor(length, device="cpu") / trained) - (config.factor - 1)
    base = config.theta * stretch ** (config.dim / (config.dim - 2))
    return 1.0 / (base ** _exponents(config))


def _llama3(config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a ramp between."""
    plain = _plain(config)
    original, low, high = config.original_max_position_embeddings, config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * pi / plain
    scaled = torch.where(wavelength > original / low, plain / config.factor, plain)
    smooth = (original / wavelength - low) / (high - low)
    ramp = (1 - smooth) * scaled / config.factor + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(between, ramp, scaled)


def _yarn(config: RopeConfig) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): "by parts" between interpolated and original frequencies."""
    powers = config.theta ** _exponents(config)
    low, high = _correction_range(config)
    ramp = torch.arange(-(-config.dim // 2), dtype=torch.float32, device="cpu")
    kept = 1 - torch.clamp((ramp - low) / (high - low), 0, 1)
    return (1.0 / (config.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _correction_range(config: RopeConfig) -> tuple[float, float]:
    """The dims between which the ramp runs: those that turn beta_fast and beta_slow times in the trained length."""

    def dim_of(turns: float) -> float:
        return config.dim * log(config.original_max_position_embeddings / (turns * 2 * pi)) / (2 * log(config.theta))

    low, high = dim_of(config.beta_fast), dim_of(config.beta_slow)
    if config.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    return (low, high + 0.001) if low == high else (low, high)


def _longrope(config: RopeConfig, length: int) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): the long factors for sequences beyond the trained length."""
    long = length > config.original_max_position_embeddings
    factors = torch.tensor(config.long_factor if long else config.short_factor, dtype=torch.float32, device="cpu")
    return 1.0 / (factors * config.theta ** _exponents(config))
