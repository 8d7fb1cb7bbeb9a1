"""The resident model of a folder that save-shards wrote: stored tensors from `safetensors`' own reader, as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from layers.decoder import DecoderModel, build_shell
from layers.eager import allocate
from layers.model_config import ModelConfig
from layers.weights import LayerSpec
from streaming.commands.resident import open_files


def saved_model(root: Path, config: ModelConfig, specs: Sequence[LayerSpec], *, device: str) -> DecoderModel:
    """The whole model in memory, filled with what the folder holds; nothing is quantized."""
    manifest = json.loads((root / "firstlayer_shards.json").read_text(encoding="utf-8"))
    model = build_shell(config, specs)
    with ExitStack() as stack, torch.inference_mode():
        _, get_tensor = open_files([root / file["name"] for file in manifest["files"]], stack)
        for param in (param for spec in specs for param in spec.params):
            module = param.name.rpartition(".")[0]
            for name, memory in allocate(param, device=device).items():
                model.assign(f"{module}.{name}", memory.copy_(get_tensor(f"{module}.{name}")))
    return model
