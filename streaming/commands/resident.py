"""The resident model that `verify` compares with: tensors from `safetensors`' or `gguf`'s own reader, schemes and an
eager forward pass. Nothing of the loading path has a part in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from layers.batch import make_batch
from layers.config import weight_map
from layers.context import StepContext
from layers.decoder import DecoderModel, build_shell
from layers.eager import fill_shell
from layers.kv_cache import KVCache
from layers.model_config import ModelConfig
from layers.weights import LayerSpec
from quant.dtypes import DType
from quant.kernels import Kernels

Names = Sequence[str]
GetTensor = Callable[[str], torch.Tensor]


def resident_model(root: Path, config: ModelConfig, specs: Sequence[LayerSpec], *, device: str) -> DecoderModel:
    """The whole model in memory, filled eagerly."""
    with ExitStack() as stack, torch.inference_mode():
        names, get_tensor = _open(root, config, stack)
        model = build_shell(config, specs)
        fill_shell(model, specs, weight_map(config), names=names, get_tensor=get_tensor, device=device)
    return model


def run_resident(
    model: DecoderModel, token_ids: Sequence[int], kernels: Kernels, *, dtype: DType, device: str
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Every decoder layer's output [T, hidden], and float32 logits [T, vocab]."""
    config = model.config
    context = StepContext(kernels=kernels)
    with torch.inference_mode():
        cache = KVCache(config, max_tokens=len(token_ids), dtype=dtype, device=device)
        batch = make_batch([(token_ids, cache)], vocab_size=config.vocab_size, device=device)
        hidden, rope, outputs = model.embed(batch.token_ids, context), model.rope(batch), {}
        for index, layer in enumerate(model.layers):
            hidden = outputs[f"layers.{index}"] = layer(hidden, batch, rope, context)
        batch.advance()
        return outputs, model.head(hidden, context)


def _open(root: Path, config: ModelConfig, stack: ExitStack) -> tuple[Names, GetTensor]:
    if root.is_file() and root.suffix == ".gguf":
        return _open_gguf(root, config)
    return _open_safetensors(root, stack)


def _open_safetensors(root: Path, stack: ExitStack) -> tuple[Names, GetTensor]:
    from safetensors import safe_open

    folder = root if root.is_dir() else root.parent
    index = folder / "model.safetensors.index.json"
    if root.is_file():
        files = [root]
    elif index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({folder / name for name in named.values()})
    else:
        files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("adapter", "consolidated")))
    opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
    where = {name: handle for handle in opened for name in handle.keys()}  # noqa: SIM118  (not a mapping)
    return list(where), lambda name: where[name].get_tensor(name)


def _open_gguf(root: Path, config: ModelConfig) -> tuple[Names, GetTensor]:
    import gguf

    reader = gguf.GGUFReader(root)
    field = reader.get_field("general.architecture")
    assert field is not None
    architecture = str(field.contents())
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    by_name = {ours: stored[theirs] for ours in _wanted(config) if (theirs := _gguf_name(names, ours)) in stored}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if architecture == "llama" else {}

    def get_tensor(name: str) -> torch.Tensor:
        tensor = by_name[name]
        shape = [int(size) for size in reversed(tensor.shape)]
        wide = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(shape)
        count = heads.get(name.split(".")[-2])
        return wide if count is None else _halves_from_pairs(wide, count)

    return list(by_name), get_tensor


def _wanted(config: ModelConfig) -> list[str]:
    fused = config.model_type == "phi3"  # gguf calls phi3's fused gate_up as others' up
    projections = ["self_attn.qkv_proj", "mlp.gate_up_proj"] if fused else [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
    ]  # fmt: skip
    parts = [
        *projections, "self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
        "self_attn.q_norm", "self_attn.k_norm",
    ]  # fmt: skip
    blocks = [f"model.layers.{i}.{part}" for i in range(config.num_layers) for part in parts]
    modules = ["model.embed_tokens", "model.norm", "lm_head", *blocks]
    return [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]


def _gguf_name(names: Any, ours: str) -> str | None:
    found: str | None = names.get_name(ours, try_suffixes=(".weight", ".bias"))
    return found


def _halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs lie side by side in llama's GGUF files (rows 0, 1 of a head); here they lie half a head apart."""
    rows = weight.shape[0] // heads
    return weight.view(heads, rows // 2, 2, -1).transpose(1, 2).reshape(weight.shape)
