"""What a model is, with every "auto" resolved: the frozen values that the rest of the package is built from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quant.dtypes import DType

# The activations of the gated MLP; `layers.mlp` has a function for each.
ACTIVATION_NAMES = frozenset(
    {"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu"}
)


class RopeKind(Enum):
    """How rotary frequencies are derived; the value is the configuration's `rope_type`."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"  # NTK-aware base, growing with the sequence beyond max_position_embeddings
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"  # two sets of factors, chosen by the sequence's length


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields that a kind does not use keep their defaults.

    `dim` of a head's `head_dim` numbers are rotated (fewer under `partial_rotary_factor`). `attention_factor`
    multiplies cos and sin; it is resolved here for yarn and longrope, and 1.0 for the others.
    """

    kind: RopeKind
    theta: float
    dim: int
    max_position_embeddings: int
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    frequency_divisors: tuple[float, ...] = ()  # GGUF keeps llama3's scaling as one divisor for each frequency


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the supported families.

    `sliding_windows` has one entry per layer: None attends to everything before, W to the last W positions (the
    token's own included). `dtype` is None where the configuration names none.
    """

    model_type: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: DType | None

    @property
    def q_rows(self) -> int:
        """Output features of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Output features of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
