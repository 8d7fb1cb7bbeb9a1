"""From config.json to a frozen ModelConfig: the family is chosen, its file translates, every "auto" is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from layers.config_fields import Fields, shown
from layers.errors import ModelConfigError, UnsupportedModelError
from layers.family import Family
from layers.family_names import FAMILY_NAMES, MULTIMODAL_NAMES
from layers.model_config import ModelConfig, RopeConfig, RopeKind
from layers.models import load_family
from layers.weights import WeightMap

__all__ = ["ModelConfig", "RopeConfig", "RopeKind", "encoder_prefixes", "family_of", "parse_config", "weight_map"]


def parse_config(raw: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Read a configuration; `where` names it in messages.

    Raises UnsupportedModelError for an unknown family, ModelConfigError for whatever cannot be run.
    """
    if not isinstance(raw, Mapping):
        raise ModelConfigError(f"{where} must hold a JSON object, not {shown(raw)}")
    fields = Fields(raw, where)
    whole = _choose_multimodal(fields)
    if whole is None:
        return load_family(_choose(fields)).read_config(fields)
    return _read_text_part(whole, fields)


def _read_text_part(model_type: str, fields: Fields) -> ModelConfig:
    """The text part of a multimodal model."""
    from layers.multimodal import multimodal_model, text_fields

    inner, family = text_fields(multimodal_model(model_type), fields)
    return replace(load_family(family).read_config(inner), multimodal=model_type)


def encoder_prefixes(raw: Mapping[str, Any], *, where: str = "config.json") -> tuple[str, ...]:
    """How the names of a multimodal model's other tensors begin, those of tower and projector; none of a text model.

    The text part may be of any kind. Raises UnsupportedModelError for an unknown family.
    """
    fields = Fields(raw, where)
    whole = _choose_multimodal(fields)
    if whole is None:
        _choose(fields)
        return ()
    from layers.multimodal import multimodal_model, other_parts

    return tuple(prefix for prefix, _ in other_parts(multimodal_model(whole)))


def family_of(config: ModelConfig) -> Family:
    """The family that read this configuration."""
    return load_family(config.model_type)


def weight_map(config: ModelConfig) -> WeightMap:
    """How this model's checkpoints name their tensors."""
    inner = family_of(config).weight_map(config)
    if not config.multimodal:
        return inner
    from layers.multimodal import multimodal_map, multimodal_model

    return multimodal_map(multimodal_model(config.multimodal), inner)


def _choose_multimodal(fields: Fields) -> str | None:
    """The multimodal model of these `architectures`, or of this `model_type` where there are none."""
    names = fields.texts("architectures") or ()
    for model_type, architectures in MULTIMODAL_NAMES.items():
        if set(names) & set(architectures):
            return model_type
    model_type = fields.text("model_type", default="")
    return model_type if model_type in MULTIMODAL_NAMES and not names else None


def _choose(fields: Fields) -> str:
    """The family's model_type: by `architectures` first, then by `model_type`."""
    names = fields.texts("architectures") or ()
    for model_type, architectures in FAMILY_NAMES.items():
        if set(names) & set(architectures):
            return model_type
    model_type = fields.text("model_type", default="")
    # A sequence classifier of a known type has another head: running it as a language model would be wrong.
    if model_type in FAMILY_NAMES and all(name.endswith(("ForCausalLM", "Model")) for name in names):
        return model_type
    raise UnsupportedModelError(
        f"{fields.where}: architectures {list(names)}, model_type {model_type!r}: not supported; known architectures: "
        + ", ".join(f"{known[0]} ({kind})" for kind, known in (*FAMILY_NAMES.items(), *MULTIMODAL_NAMES.items()))
    )
