"""Reading the keys that all decoder families share; a family adds its own flags, defaults and windows."""

from __future__ import annotations

from dataclasses import dataclass

from layers.config_fields import Fields, shown
from layers.errors import ModelConfigError
from layers.model_config import ACTIVATION_NAMES, ModelConfig, RopeConfig
from quant.dtypes import DType

LARGEST_DEPTH = 10_000

_DTYPES = {
    "bfloat16": DType.BF16, "float16": DType.F16, "half": DType.F16, "float32": DType.F32, "float": DType.F32,
    "float64": DType.F64, "double": DType.F64,
}  # fmt: skip


@dataclass(frozen=True)
class Heads:
    """The attention's shape: query heads, key/value heads, numbers per head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Biases:
    """Which projections carry a bias."""

    qkv: bool = False
    o: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class Defaults:
    """What a family's reference implementation assumes where the configuration is silent."""

    rms_norm_eps: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"


def read_decoder(
    fields: Fields,
    *,
    model_type: str,
    architecture: str,
    heads: Heads,
    rope: RopeConfig | None,
    defaults: Defaults,
    biases: Biases,
    windows: tuple[int | None, ...],
    qk_norm: bool = False,
) -> ModelConfig:
    """The configuration, from the shared keys and what the family resolved. Raises ModelConfigError.

    A family that differs in more (norms, residuals, scales) replaces those fields in what this returns.
    """
    return ModelConfig(
        model_type=model_type,
        architecture=architecture,
        hidden_size=fields.positive_int("hidden_size"),
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=read_depth(fields),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        vocab_size=fields.positive_int("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default=defaults.rms_norm_eps),
        hidden_act=read_activation(fields, default=defaults.hidden_act),
        qkv_bias=biases.qkv,
        o_bias=biases.o,
        mlp_bias=biases.mlp,
        qk_norm=qk_norm,
        sliding_windows=windows,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=defaults.tie_word_embeddings),
        max_position_embeddings=read_length(fields, defaults),
        rope=rope,
        bos_token_id=_bos(fields, defaults),
        eos_token_ids=_eos(fields, defaults),
        dtype=_dtype(fields),
    )


def read_length(fields: Fields, defaults: Defaults) -> int:
    """The number of positions that the model is made for."""
    return fields.positive_int("max_position_embeddings", default=defaults.max_position_embeddings)


def read_depth(fields: Fields) -> int:
    """The number of decoder layers."""
    return fields.positive_int("num_hidden_layers", largest=LARGEST_DEPTH)


def read_heads(fields: Fields, *, kv_default: int | None = None, head_dim_default: int | None = None) -> Heads:
    """The attention's shape. A missing `num_key_value_heads` is `kv_default`, else as many as there are query heads;
    a null one always means the latter. A missing `head_dim` is `head_dim_default`, else hidden_size / heads."""
    num_heads = fields.positive_int("num_attention_heads")
    absent = kv_default if kv_default and not fields.has("num_key_value_heads") else num_heads
    num_kv_heads = fields.positive_int("num_key_value_heads", default=absent)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"{fields.where}: num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    head_dim = fields.optional_int("head_dim") or head_dim_default or _even_share(fields, num_heads)
    return Heads(num_heads, num_kv_heads, head_dim)


def _even_share(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.positive_int("hidden_size")
    if hidden_size % num_heads:
        raise ModelConfigError(
            f"{fields.where}: hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads}), "
            "and there is no head_dim"
        )
    return hidden_size // num_heads


def read_windows(
    fields: Fields, *, window: int | None, first: int = 0, full_every: int | None = None
) -> tuple[int | None, ...]:
    """One window per layer: `layer_types` decides where it is given; else layers from `first` on have `window`, but
    for every `full_every`-th layer."""
    depth = read_depth(fields)
    kinds = fields.texts("layer_types")
    if kinds is None:
        full = [layer < first or (full_every is not None and (layer + 1) % full_every == 0) for layer in range(depth)]
        return tuple(None if whole else window for whole in full)
    if len(kinds) != depth:
        raise ModelConfigError(f"{fields.where}: layer_types has {len(kinds)} entries, num_hidden_layers is {depth}")
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelConfigError(
                f"{fields.where}: layer_types[{layer}] is {kind!r}; known are full_attention and sliding_attention"
            )
        if kind == "sliding_attention" and window is None:
            raise ModelConfigError(
                f"{fields.where}: layer_types[{layer}] is 'sliding_attention', but no sliding_window is in force "
                f"(sliding_window: {shown(fields.raw.get('sliding_window'))}, "
                f"use_sliding_window: {shown(fields.raw.get('use_sliding_window'))})"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_activation(fields: Fields, *, default: str) -> str:
    """The name of the MLP's activation."""
    name = fields.text("hidden_act", default=default)
    if name not in ACTIVATION_NAMES:
        known = ", ".join(sorted(ACTIVATION_NAMES))
        key = fields.called.get("hidden_act", "hidden_act")
        raise ModelConfigError(f"{fields.where}: {key} {name!r} is not known; known are {known}")
    return name


def _bos(fields: Fields, defaults: Defaults) -> int | None:
    return fields.optional_int("bos_token_id", least=0) if fields.has("bos_token_id") else defaults.bos_token_id


def _eos(fields: Fields, defaults: Defaults) -> tuple[int, ...]:
    if fields.has("eos_token_id"):
        return fields.int_list("eos_token_id") or ()
    if isinstance(defaults.eos_token_id, int):
        return (defaults.eos_token_id,)
    return defaults.eos_token_id or ()


def _dtype(fields: Fields) -> DType | None:
    """`dtype`, or `torch_dtype` as older files call it; "auto" names none."""
    key = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    name = fields.text(key, default="auto").removeprefix("torch.")
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise ModelConfigError(f"{fields.where}: {key} {name!r} is not known; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]
