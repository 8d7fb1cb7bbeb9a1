"""The resident model that a streamed one must equal: safetensors' own reader, `layers` and `quant`, nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from layers.architecture import SchemeChoice, layer_specs
from layers.batch import make_batch
from layers.config import parse_config, weight_map
from layers.context import StepContext
from layers.decoder import DecoderModel, build_shell
from layers.eager import fill_shell
from layers.kv_cache import KVCache
from quant.dtypes import DType
from quant.kernels import Kernels
from quant.registry import scheme_by_name
from tests.layers.tiny import OneScheme

DTYPES = {"bfloat16": DType.BF16, "float32": DType.F32}


@dataclass(frozen=True)
class Run:
    """What one prompt gave: every decoder layer's output [T, D], and float32 logits [T, V]."""

    outputs: dict[str, torch.Tensor]
    logits: torch.Tensor


def resident_model(
    folder: Path, *, quantization: str = "none", dtype: str = "bfloat16", policy: SchemeChoice | None = None
) -> DecoderModel:
    """The whole model, filled eagerly; with a policy, each parameter in the scheme that it says."""
    config = parse_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    specs = layer_specs(config, dtype=DTYPES[dtype], policy=policy or OneScheme(scheme_by_name(quantization)))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    model = build_shell(config, specs)
    with torch.inference_mode():
        fill_shell(model, specs, weight_map(config), names=tensors, get_tensor=tensors.__getitem__)
    return model


def run_resident(model: DecoderModel, token_ids: Sequence[int], *, dtype: str = "bfloat16") -> Run:
    """One prompt through the whole model."""
    context = StepContext(kernels=Kernels.detect())
    outputs = {}
    with torch.inference_mode():
        cache = KVCache(model.config, max_tokens=len(token_ids), dtype=DTYPES[dtype])
        batch = make_batch([(token_ids, cache)], vocab_size=model.config.vocab_size)
        hidden, rope = model.embed(batch.token_ids, context), model.rope(batch)
        for index, layer in enumerate(model.layers):
            hidden = outputs[f"layers.{index}"] = layer(hidden, batch, rope, context)
        return Run(outputs, model.head(hidden, context))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit are the same (0.0 and -0.0 are not)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
