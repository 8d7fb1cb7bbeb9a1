"""Reading the rotary embedding's settings: `rope_scaling` of old configurations and `rope_parameters` of new ones.

The resolution follows transformers 5 (modeling_rope_utils.py): `rope_type` before `type`; `rope_theta` and
`partial_rotary_factor` inside the dictionary before those beside it; `original_max_position_embeddings` beside it
before the one inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log, sqrt
from typing import Any

from layers.config_fields import Fields, shown
from layers.errors import ModelConfigError
from layers.model_config import RopeConfig, RopeKind

DEFAULT_THETA = 10_000.0
ALIASES = {"su": "longrope"}  # what the first Phi-3 files call it


def read_rope(
    fields: Fields,
    *,
    head_dim: int,
    max_position_embeddings: int,
    original_default: int | None = None,
    theta_default: float = DEFAULT_THETA,
    partial_default: float = 1.0,
    aliases: Mapping[str, str] = ALIASES,
) -> RopeConfig:
    """The rotary settings of a model whose heads are `head_dim` wide.

    `original_default` stands in for a missing `original_max_position_embeddings` (else max_position_embeddings),
    `theta_default` and `partial_default` for a missing `rope_theta` and `partial_rotary_factor`.
    Raises ModelConfigError for an unknown kind and for missing or impossible values.
    """
    raw = _merged(fields)
    inner = Fields(raw, where=f"{fields.where}: {_source_key(fields)}")
    kind = _kind(inner, aliases)
    theta = inner.optional_number("rope_theta", above=1.0) or fields.number(
        "rope_theta", default=theta_default, above=1.0
    )
    partial = inner.optional_number("partial_rotary_factor") or fields.number(
        "partial_rotary_factor", default=partial_default
    )
    original = (
        fields.optional_int("original_max_position_embeddings")
        or inner.optional_int("original_max_position_embeddings")
        or original_default
        or max_position_embeddings
    )
    plain = RopeConfig(kind, theta, _rotated(fields, head_dim, partial), max_position_embeddings, partial)
    if fields.raw.get("rope_freq_factors") is not None:
        plain = replace(plain, frequency_divisors=fields.numbers("rope_freq_factors", count=plain.dim // 2))
    return _scaled(plain, inner, original)


def score_stretch(fields: Fields, rope: RopeConfig) -> float:
    """By what latent attention multiplies its scores where positions are stretched: mscale squared, of
    `mscale_all_dim`; 1 where that is absent or 0 (transformers, yarn_apply_mscale)."""
    if rope.kind is RopeKind.DEFAULT:
        return 1.0
    inner = Fields(_merged(fields), where=f"{fields.where}: {_source_key(fields)}")
    return _mscale(rope.factor, _or_zero(inner, "mscale_all_dim")) ** 2


def _scaled(plain: RopeConfig, inner: Fields, original: int) -> RopeConfig:
    """The settings with what their kind adds to them."""
    match plain.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR | RopeKind.DYNAMIC:
            if plain.kind is RopeKind.DYNAMIC and plain.dim == 2:
                raise ModelConfigError(f"{inner.where}: dynamic scaling needs more than 2 rotated dims of a head")
            return replace(plain, factor=inner.number("factor"))
        case RopeKind.LLAMA3:
            return _llama3(plain, inner, original)
        case RopeKind.YARN:
            return _yarn(plain, inner, original)
        case RopeKind.LONGROPE:
            return _longrope(plain, inner, original)


def _source_key(fields: Fields) -> str:
    return "rope_scaling" if fields.section("rope_scaling") else "rope_parameters"


def _merged(fields: Fields) -> dict[str, Any]:
    """Both dictionaries as one; a key that both hold with different values is an error."""
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    for key in sorted(old.keys() & new.keys()):
        if old[key] != new[key]:
            raise ModelConfigError(
                f"{fields.where}: rope_scaling has {key} = {shown(old[key])}, "
                f"but rope_parameters has {key} = {shown(new[key])}"
            )
    merged = {**new, **old}
    nested = sorted(key for key, value in merged.items() if isinstance(value, Mapping))
    if nested:
        raise ModelConfigError(
            f"{fields.where}: rotary settings per kind of layer ({', '.join(nested)}) are not supported for this model"
        )
    return merged


def _kind(inner: Fields, aliases: Mapping[str, str]) -> RopeKind:
    name = inner.text("rope_type", default=inner.text("type", default="default"))
    known = [kind.value for kind in RopeKind]
    resolved = aliases.get(name, name)
    if resolved not in known:
        raise ModelConfigError(f"{inner.where}: rope_type {name!r} is not known; known are {', '.join(known)}")
    return RopeKind(resolved)


def _rotated(fields: Fields, head_dim: int, partial: float) -> int:
    if partial > 1.0:
        raise ModelConfigError(f"{fields.where}: partial_rotary_factor must be at most 1, not {partial:g}")
    dim = int(head_dim * partial)
    # An odd number of rotated dims is rounded up to the next pair, which must still lie inside the head.
    if dim < 1 or dim + dim % 2 > head_dim:
        raise ModelConfigError(
            f"{fields.where}: head_dim {head_dim} with partial_rotary_factor {partial:g} rotates {dim} dims; "
            "rotation works on pairs inside the head"
        )
    return dim


def _llama3(plain: RopeConfig, inner: Fields, original: int) -> RopeConfig:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise ModelConfigError(
            f"{inner.where}: high_freq_factor ({high:g}) must be greater than low_freq_factor ({low:g})"
        )
    return replace(
        plain,
        factor=inner.number("factor"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(plain: RopeConfig, inner: Fields, original: int) -> RopeConfig:
    """YaRN (Peng et al. 2023, arXiv:2309.00071); the attention factor is that of its section 3.4."""
    factor = inner.optional_number("factor") or plain.max_position_embeddings / original
    attention = inner.optional_number("attention_factor")
    if attention is None:
        mscale, all_dim = _or_zero(inner, "mscale"), _or_zero(inner, "mscale_all_dim")
        both = mscale and all_dim
        attention = _mscale(factor, mscale) / _mscale(factor, all_dim) if both else _mscale(factor, 1.0)
    return replace(
        plain,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=_or_zero(inner, "beta_fast") or 32.0,
        beta_slow=_or_zero(inner, "beta_slow") or 1.0,
        truncate=inner.flag("truncate", default=True),
    )


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * log(scale) + 1.0


def _or_zero(inner: Fields, key: str) -> float:
    """A number where 0 and absence both mean "not given", as the reference reads it."""
    value = inner.raw.get(key)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return 0.0
    return inner.number(key)


def _longrope(plain: RopeConfig, inner: Fields, original: int) -> RopeConfig:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753), with Phi-3's default attention factor."""
    factor = inner.optional_number("factor") or plain.max_position_embeddings / original
    attention = inner.optional_number("attention_factor")
    if attention is None:
        if factor > 1.0 and original == 1:
            raise ModelConfigError(f"{inner.where}: original_max_position_embeddings must be at least 2, not 1")
        attention = 1.0 if factor <= 1.0 else sqrt(1 + log(factor) / log(original))
    pairs = -(-plain.dim // 2)
    return replace(
        plain,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        short_factor=inner.numbers("short_factor", count=pairs),
        long_factor=inner.numbers("long_factor", count=pairs),
    )
