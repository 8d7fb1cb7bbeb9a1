"""The parts of a multimodal model, and which of its tensors belong to which by their names. [no-torch]

The language part is what runs here; the encoder is everything else (vision tower, projector), for those who run it
elsewhere. What belongs to it is told by prefix, as the family declares it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.members import CONFIG
from streaming.errors import CheckpointError, OptionError

_NOT_ASKED = "of the language part, which was not asked for"

ReasonOf = Callable[[str], str | None]


class Part(Enum):
    """Which part of a model is asked for."""

    LANGUAGE = "language"
    ENCODER = "encoder"


def reasons(config: Mapping[str, Any], part: Part) -> ReasonOf:
    """A function from a tensor's name to why it does not belong to this part of the model; None where it does.

    Raises ModelConfigError for a configuration that cannot be read, OptionError where the model has no such part.
    """
    return _outside_language(config) if part is Part.LANGUAGE else _outside_encoder(config)


def encoder_beginnings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of the encoder's tensors begin. Raises as `reasons` does."""
    from layers.config import encoder_prefixes
    from layers.family_names import MULTIMODAL_NAMES

    if prefixes := encoder_prefixes(config):
        return prefixes
    what = ", ".join(map(str, config.get("architectures") or [config.get("model_type")]))
    raise OptionError(
        f"--part encoder: {what} is a text model, which has no encoder; models that have one: "
        + ", ".join(MULTIMODAL_NAMES)
    )


def check_has_part(folder: Path, part: Part) -> None:
    """Raise OptionError for a folder whose config.json is a text model's, before an encoder is fetched into it."""
    from layers.errors import ModelConfigError

    if part is Part.LANGUAGE:
        return
    try:
        encoder_beginnings(read_json_object(folder / CONFIG))
    except (CheckpointError, ModelConfigError):
        return  # opening says what is wrong with it


def gguf_has_none(model: str | Path) -> OptionError:
    """What to raise where the encoder of a GGUF model is asked for."""
    return OptionError(f"--part encoder: {model} is a GGUF model, whose files hold language alone")


def _outside_language(config: Mapping[str, Any]) -> ReasonOf:
    from layers.config import parse_config, weight_map
    from layers.name_lookup import NameLookup
    from layers.weights import Dropped

    names = NameLookup(weight_map(parse_config(config)))

    def reason_of(name: str) -> str | None:
        target = names.locate(name)
        return target.reason if isinstance(target, Dropped) else None

    return reason_of


def _outside_encoder(config: Mapping[str, Any]) -> ReasonOf:
    beginnings = encoder_beginnings(config)
    return lambda name: None if name.startswith(beginnings) else _NOT_ASKED
