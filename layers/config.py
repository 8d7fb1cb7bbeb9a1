"""From config.json to a frozen ModelConfig: the family is chosen, its file translates, every "auto" is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from layers.config_fields import Fields, shown
from layers.errors import ModelConfigError, UnsupportedModelError
from layers.family import Family
from layers.model_config import ModelConfig, RopeConfig, RopeKind
from layers.models import FAMILIES
from layers.multimodal import MULTIMODAL_MODELS, MultimodalModel, find_multimodal, multimodal_map, text_fields
from layers.weights import WeightMap

__all__ = ["ModelConfig", "RopeConfig", "RopeKind", "family_of", "parse_config", "weight_map"]


def parse_config(raw: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Read a configuration; `where` names it in messages.

    Raises UnsupportedModelError for an unknown family, ModelConfigError for whatever cannot be run.
    """
    if not isinstance(raw, Mapping):
        raise ModelConfigError(f"{where} must hold a JSON object, not {shown(raw)}")
    fields = Fields(raw, where)
    _refuse_quantized(fields)
    whole = find_multimodal(fields)
    if whole is None:
        return _choose(fields).read_config(fields)
    return _read_text_part(whole, fields)


def _read_text_part(whole: MultimodalModel, fields: Fields) -> ModelConfig:
    """The text part of a multimodal model."""
    inner, model_type = text_fields(whole, fields)
    _refuse_quantized(inner)
    family = next(family for family in FAMILIES if family.model_type == model_type)
    return replace(family.read_config(inner), multimodal=whole.model_type)


def family_of(config: ModelConfig) -> Family:
    """The family that read this configuration."""
    return next(family for family in FAMILIES if family.model_type == config.model_type)


def weight_map(config: ModelConfig) -> WeightMap:
    """How this model's checkpoints name their tensors."""
    inner = family_of(config).weight_map(config)
    if not config.multimodal:
        return inner
    return multimodal_map(next(whole for whole in MULTIMODAL_MODELS if whole.model_type == config.multimodal), inner)


def _choose(fields: Fields) -> Family:
    """By `architectures` first, then by `model_type`."""
    names = fields.texts("architectures") or ()
    for family in FAMILIES:
        if set(names) & set(family.architectures):
            return family
    model_type = fields.text("model_type", default="")
    for family in FAMILIES:
        # A sequence classifier of a known type has another head: running it as a language model would be wrong.
        if family.model_type == model_type and all(name.endswith(("ForCausalLM", "Model")) for name in names):
            return family
    raise UnsupportedModelError(
        f"{fields.where}: architectures {list(names)}, model_type {model_type!r}: not supported; known architectures: "
        + ", ".join(f"{architectures[0]} ({model_type})" for model_type, architectures in _known())
    )


def _known() -> list[tuple[str, tuple[str, ...]]]:
    families = [(family.model_type, family.architectures) for family in FAMILIES]
    return families + [(whole.model_type, whole.architectures) for whole in MULTIMODAL_MODELS]


def _refuse_quantized(fields: Fields) -> None:
    for key in ("quantization_config", "compression_config"):
        found = fields.raw.get(key)
        if found is None:
            continue
        method = found.get("quant_method", "of an unnamed method") if isinstance(found, Mapping) else shown(found)
        raise ModelConfigError(
            f"{fields.where}: {key} says that the checkpoint is already quantized ({method}); such checkpoints are not "
            "supported yet: use the unquantized original, and quantize it while it loads"
        )
