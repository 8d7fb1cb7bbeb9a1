"""Multimodal models of which the text part is run: where its configuration stands and how its tensors are called.

Names are given by prefix, as files of before and after transformers 4.52 have them; what belongs to the other parts is
named by prefix too and never read. Positions of images have several axes; those of text are all one, so the rotary
embedding is the plain one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from layers.config_fields import Fields
from layers.errors import ModelConfigError
from layers.weights import WeightMap

Keys = Mapping[str, float]

# Keys of the whole model that its text part falls back to.
SHARED = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype")
ROPES = ("rope_scaling", "rope_parameters")
PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
VISION = "the vision tower, which text does not need"
PROJECTOR = "the projector of images, which text does not need"
NEWLINE = "the vector between rows of an image, which text does not need"
TOWERS = (
    ("vision_tower.", VISION), ("multi_modal_projector.", PROJECTOR), ("image_newline", NEWLINE),
)  # fmt: skip
VISUAL = (("visual.", VISION),)

LLAMA: Keys = {
    "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32_000,
}  # fmt: skip
MISTRAL: Keys = {**LLAMA, "intermediate_size": 14_336}
QWEN2: Keys = {**LLAMA, "intermediate_size": 22_016, "vocab_size": 151_936}
QWEN2_VL: Keys = {
    "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 152_064, "rms_norm_eps": 1e-5, "max_window_layers": 80,
    "rope_theta": 1_000_000.0,
}  # fmt: skip
QWEN3_VL: Keys = {**QWEN2, "num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0}
GEMMA3: Keys = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "vocab_size": 262_208,
}  # fmt: skip


QWEN3_VL_MOE: Keys = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 151_936, "rope_theta": 500_000.0, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": True,
}  # fmt: skip


@dataclass(frozen=True)
class TextPart:
    """The text part of a multimodal model: the family that reads it, and the sizes that its file may leave out."""

    model_type: str
    sizes: Keys


@dataclass(frozen=True)
class MultimodalModel:
    """A multimodal model. `parts`: by the `model_type` of its text part, the first where none is given.

    `tied`: whether embedding and head are one where the configuration does not say. `unused` are prefixes of tensors,
    with and without a leading `model.`, and why they are not read.
    """

    model_type: str
    parts: Mapping[str, TextPart]
    tied: bool = False
    prefixes: tuple[tuple[str, str], ...] = PREFIXES
    unused: tuple[tuple[str, str], ...] = field(default=TOWERS)
    fused_transposed: bool = False  # published files hold all experts of a layer in one tensor, each [in, out]


LANGUAGE_MODELS = {
    "llama": TextPart("llama", LLAMA), "mistral": TextPart("mistral", MISTRAL), "qwen2": TextPart("qwen2", QWEN2),
}  # fmt: skip

MULTIMODAL_MODELS = (
    MultimodalModel("gemma3", {"gemma3_text": TextPart("gemma3_text", GEMMA3)}, tied=True),
    MultimodalModel("llava", LANGUAGE_MODELS),
    MultimodalModel("llava_next", LANGUAGE_MODELS),
    MultimodalModel("mistral3", {"mistral": TextPart("mistral", MISTRAL)}, tied=True),
    MultimodalModel("qwen2_vl", {"qwen2_vl_text": TextPart("qwen2", QWEN2_VL)}, unused=VISUAL),
    MultimodalModel("qwen2_5_vl", {"qwen2_5_vl_text": TextPart("qwen2", QWEN2_VL)}, unused=VISUAL),
    MultimodalModel("qwen3_vl", {"qwen3_vl_text": TextPart("qwen3", QWEN3_VL)}, unused=VISUAL),
    MultimodalModel(
        "qwen3_vl_moe",
        {"qwen3_vl_moe_text": TextPart("qwen3_moe", QWEN3_VL_MOE)},
        unused=VISUAL,
        fused_transposed=True,
    ),
)


def multimodal_model(model_type: str) -> MultimodalModel:
    """The multimodal model of this model_type, which is one of MULTIMODAL_NAMES."""
    return next(whole for whole in MULTIMODAL_MODELS if whole.model_type == model_type)


def text_fields(whole: MultimodalModel, fields: Fields) -> tuple[Fields, str]:
    """The text part's configuration and the model_type of its family.

    It stands in `text_config`; files of before that have its keys beside the others. Raises ModelConfigError for a
    kind of text part that the model is not known with.
    """
    inner = dict(fields.section("text_config")) or {key: fields.raw[key] for key in fields.raw if key != "model_type"}
    where = f"{fields.where}: text_config" if fields.section("text_config") else fields.where
    kind = Fields(inner, where).text("model_type", default=next(iter(whole.parts)))
    if kind not in whole.parts:
        raise ModelConfigError(
            f"{where}: model_type {kind!r} is not supported inside {whole.model_type}; known are "
            + ", ".join(whole.parts)
        )
    part = whole.parts[kind]
    shared = {key: fields.raw[key] for key in SHARED if fields.raw.get(key) is not None}
    given = {key: value for key, value in inner.items() if value is not None or key not in part.sizes}
    tied = _tied(whole, fields, Fields(inner, where))
    merged: dict[str, Any] = {**part.sizes, **shared, **given, "tie_word_embeddings": tied}
    merged |= {key: _without_axes(merged[key]) for key in ROPES if isinstance(merged.get(key), Mapping)}
    return Fields(merged, where), part.model_type


def _without_axes(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings of several axes ("mrope") as those of text, for which all axes are the same."""
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in rope.items()
    }


def _tied(whole: MultimodalModel, fields: Fields, inner: Fields) -> bool:
    """Either configuration may say so; files of before transformers 5 say it of the text part."""
    key = "tie_word_embeddings"
    return fields.flag(key, default=whole.tied) or inner.flag(key, default=False)


def other_parts(whole: MultimodalModel) -> tuple[tuple[str, str], ...]:
    """How the names of all other parts' tensors begin (tower, projector), and why text does not read them."""
    return tuple((start + prefix, reason) for prefix, reason in whole.unused for start in ("", "model."))


def multimodal_map(whole: MultimodalModel, inner: WeightMap) -> WeightMap:
    """The text part's map behind the prefixes of the whole."""
    renames = tuple((re.compile("^" + re.escape(theirs)), ours, "") for theirs, ours in whole.prefixes)
    return replace(
        inner,
        renames=(*renames, *inner.renames),
        unused=(*inner.unused, *other_parts(whole)),
        fused_transposed=whole.fused_transposed or inner.fused_transposed,
    )
