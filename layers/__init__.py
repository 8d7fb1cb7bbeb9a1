"""Modules and architectures, and where a parameter's numbers come from and how they are cut. Imports no torch itself.

Public names are imported from their modules when they are first asked for (PEP 562), so that the planning path never
pays for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layers.architecture import is_optional_bias, is_tied, layer_specs
    from layers.batch import Batch, BatchSequence, make_batch
    from layers.config import family_of, parse_config, weight_map
    from layers.context import StepContext
    from layers.decoder import DecoderModel, build_shell, stored_names
    from layers.eager import fill_shell
    from layers.errors import LogitsError, ModelConfigError, ShardError, UnsupportedModelError, WeightError
    from layers.kv_cache import KVCache, kv_cache_nbytes
    from layers.model_config import ModelConfig, RopeConfig, RopeKind
    from layers.sampler import Sampler
    from layers.sampling_params import SamplingParams
    from layers.weights import Dropped, LayerSpec, ParamKind, ParamSpec, Rename, Section, Stacked, Target, WeightMap

_NAMES = {
    "layers.architecture": ("is_optional_bias", "is_tied", "layer_specs"),
    "layers.batch": ("Batch", "BatchSequence", "make_batch"),
    "layers.config": ("family_of", "parse_config", "weight_map"),
    "layers.context": ("StepContext",),
    "layers.decoder": ("DecoderModel", "build_shell", "stored_names"),
    "layers.eager": ("fill_shell",),
    "layers.errors": ("LogitsError", "ModelConfigError", "ShardError", "UnsupportedModelError", "WeightError"),
    "layers.kv_cache": ("KVCache", "kv_cache_nbytes"),
    "layers.model_config": ("ModelConfig", "RopeConfig", "RopeKind"),
    "layers.sampler": ("Sampler",),
    "layers.sampling_params": ("SamplingParams",),
    "layers.weights": (
        "Dropped", "LayerSpec", "ParamKind", "ParamSpec", "Rename", "Section", "Stacked", "Target", "WeightMap",
    ),
}  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Batch",
    "BatchSequence",
    "DecoderModel",
    "Dropped",
    "KVCache",
    "LayerSpec",
    "LogitsError",
    "ModelConfig",
    "ModelConfigError",
    "ParamKind",
    "ParamSpec",
    "Rename",
    "RopeConfig",
    "RopeKind",
    "Sampler",
    "SamplingParams",
    "Section",
    "ShardError",
    "Stacked",
    "StepContext",
    "Target",
    "UnsupportedModelError",
    "WeightError",
    "WeightMap",
    "build_shell",
    "family_of",
    "fill_shell",
    "is_optional_bias",
    "is_tied",
    "kv_cache_nbytes",
    "layer_specs",
    "make_batch",
    "parse_config",
    "stored_names",
    "weight_map",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
