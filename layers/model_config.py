"""What a model is, with every "auto" resolved: the frozen values that the rest of the package is built from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from quant.dtypes import DType

# The activations of the MLP; `layers.mlp` has a function for each.
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


class NormKind(Enum):
    """What the norms of a model compute."""

    RMS = "rms"  # x over its root mean square, rounded to the activations' dtype, times the weight
    RMS_FLOAT32 = "rms float32"  # the same, rounded only after the weight
    RMS_PLUS_ONE = "rms plus one"  # times (1 + weight), rounded only after that
    LAYER = "layer"  # mean taken off and variance made one, times the weight


class HeadNorm(Enum):
    """What a norm of queries and keys, where there is one, takes its mean over, and which weights it has."""

    SHARED = "shared"  # each head by itself, all heads with one weight [head_dim]
    OWN = "own"  # each head by itself, with weights of its own: one matrix [heads, head_dim]
    LISTED = "listed"  # the same, stored as a tensor [head_dim] for each head
    WHOLE = "whole"  # all heads together, one weight [heads * head_dim]


class Residual(Enum):
    """Where a layer's norms stand and what is added to what."""

    PRE = "pre"  # a norm before attention and one before the MLP, each added to what came in
    POST = "post"  # a norm behind attention and one behind the MLP, before each is added
    SANDWICH = "sandwich"  # both
    PARALLEL = "parallel"  # one norm, whose output attention and MLP both get; both are added to what came in


class MLPKind(Enum):
    """The feed-forward part of a layer."""

    GATED = "gated"  # down(act(gate(x)) * up(x))
    PLAIN = "plain"  # fc2(act(fc1(x)))


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Fields that a kind does not use keep their defaults.

    `dim` of a head's `head_dim` numbers are rotated (fewer under `partial_rotary_factor`). `attention_factor`
    multiplies cos and sin; it is resolved here for yarn and longrope, and 1.0 for the others. The two numbers that are
    rotated together lie half of `dim` apart, or side by side where they are `interleaved`.
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
    interleaved: bool = False
    frequency_divisors: tuple[float, ...] = ()  # GGUF keeps llama3's scaling as one divisor for each frequency


@dataclass(frozen=True)
class ClampedSwiGLU:
    """(up + 1) * gate * sigmoid(alpha * gate), gate no greater than `limit`, up between -limit and limit."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class GroupedChoice:
    """How a router of DeepSeek's chooses experts, and weighs those it has chosen.

    Scores are sigmoids, or a softmax. `groups` of experts are ranked by the sum of their `summed` best scores, and only
    experts of the `top_groups` best are chosen. `correction_bias`: a float32 number for each expert is added to its
    score for the choice alone. `scale` multiplies the weights of the chosen.
    """

    sigmoid: bool
    groups: int = 1
    top_groups: int = 1
    summed: int = 1
    correction_bias: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class MoEConfig:
    """A model's sparse layers: those where `sparse` is true. Each token goes to `top_k` of `num_experts` experts, whose
    scores add up to one where `renormalize`; `softmax_chosen`: they are the softmax of the chosen experts' logits, in
    the dtype of those. `shared_intermediate_size` is that of the expert that every token passes, 0 where there is none;
    its output is scaled by a gate of its own where `shared_gate`. Router and experts may have biases; `clamped` stands
    for the gated activation of the experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse: tuple[bool, ...]
    renormalize: bool
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    grouped: GroupedChoice | None = None
    softmax_chosen: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    clamped: ClampedSwiGLU | None = None


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1): sizes of a token's latents and of a head.

    A token's keys and values of all heads are made of one latent of `kv_lora_rank` numbers; beside it stand
    `qk_rope_head_dim` rotated numbers that all heads share as a part of their keys. Queries pass through a latent of
    their own, but where `q_lora_rank` is None. The model's `head_dim` is what is rotated, qk_rope_head_dim.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query, and of its key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up_head_dim(self) -> int:
        """Numbers that a head makes of a latent: a key's part without position, and a value."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def latent_dim(self) -> int:
        """Numbers that are kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the supported families.

    `sliding_windows` has one entry per layer: None attends to everything before, W to the last W positions (the
    token's own included). `dtype` is None where the configuration names none. `rms_norm_eps` is the epsilon of the
    norms, of whatever kind. `multimodal` names the model whose text part this is.

    Positions are told by `rope` (layers with a window use `local_rope` where there is one), or by a table of
    `learned_positions` rows that the first layer adds to the embeddings; then `rope` is None. `embed_scale` multiplies
    the embeddings, `residual_scale` what attention and MLP add, `logit_scale` the logits; None and 1.0 change nothing.
    `attention_scale` stands for 1 / sqrt(head_dim). A softcap c turns x into c * tanh(x / c). `attention_sinks`: each
    head has a learned score that takes part in its softmax and that no value belongs to.
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
    rope: RopeConfig | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: DType | None
    multimodal: str = ""
    norm: NormKind = NormKind.RMS
    norm_bias: bool = False
    qk_norm_over: HeadNorm = HeadNorm.SHARED
    residual: Residual = Residual.PRE
    mlp: MLPKind = MLPKind.GATED
    head_bias: bool = False
    local_rope: RopeConfig | None = None
    learned_positions: int = 0
    embed_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_sinks: bool = False
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None

    @property
    def q_rows(self) -> int:
        """Output features of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Output features of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
