"""What a family of models is: how its configuration is read and what its checkpoints call things. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layers.config_fields import Fields
from layers.model_config import ModelConfig
from layers.weights import WeightMap


@dataclass(frozen=True)
class Family:
    """One file of `layers.models`. The first architecture is the one that a configuration without any is given."""

    model_type: str
    architectures: tuple[str, ...]
    read_config: Callable[[Fields], ModelConfig]
    weight_map: Callable[[ModelConfig], WeightMap]
