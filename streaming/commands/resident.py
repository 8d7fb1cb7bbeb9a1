"""The resident model that `verify` compares with: tensors from `safetensors`', torch's or `gguf`'s own reader, schemes
and an eager forward pass. Nothing of the loading path has a part in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
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
from streaming.commands.resident_gguf import gguf_parts, halves_from_pairs, open_gguf

Names = Sequence[str]
GetTensor = Callable[[str], torch.Tensor]
_PICKLES = (".bin", ".pt", ".pth")
_OWN_NAMES = (
    ("embed_tokens", "tok_embeddings"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_proj", "attention.wq"), ("self_attn.k_proj", "attention.wk"), ("self_attn.v_proj", "attention.wv"),
    ("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"), ("lm_head", "output"),
)  # fmt: skip
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "adapter")


def resident_model(
    root: Path,
    config: ModelConfig,
    specs: Sequence[LayerSpec],
    *,
    device: str,
    load_format: str = "auto",
    unused: Collection[str] = (),
    unwrapped: Mapping[str, str] | None = None,
) -> DecoderModel:
    """The whole model in memory, filled eagerly. `load_format`: which of a folder's files are the model.

    `unused`: names that are left out. `unwrapped`: what names are read as -> what they are on disk, where they differ.
    """
    with ExitStack() as stack, torch.inference_mode():
        on_disk, get = _open(root, config, stack, load_format)
        aliases = unwrapped or {name: name for name in on_disk}
        names = [name for name, stored in aliases.items() if stored not in unused]

        def get_tensor(name: str) -> torch.Tensor:
            return get(aliases[name])

        model = build_shell(config, specs)
        fill_shell(model, specs, weight_map(config), names=names, get_tensor=get_tensor, device=device)
    return model


def run_resident(
    model: DecoderModel,
    token_ids: Sequence[int],
    kernels: Kernels,
    *,
    dtype: DType,
    device: str,
    cache_dtype: str = "auto",
    scales: Sequence[tuple[float, float]] | None = None,
    int8_activations: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Every decoder layer's output [T, hidden], and float32 logits [T, vocab]."""
    config = model.config
    context = StepContext(kernels=kernels, int8_activations=int8_activations)
    with torch.inference_mode():
        cache = KVCache(
            config, max_tokens=len(token_ids), dtype=dtype, device=device, cache_dtype=cache_dtype, scales=scales
        )
        batch = make_batch([(token_ids, cache)], vocab_size=config.vocab_size, device=device)
        hidden, rope, outputs = model.embed(batch.token_ids, context), model.rope(batch), {}
        for index, layer in enumerate(model.layers):
            hidden = outputs[f"layers.{index}"] = layer(hidden, batch, rope, context)
        batch.advance()
        return outputs, model.head(hidden, context)


def _open(root: Path, config: ModelConfig, stack: ExitStack, load_format: str) -> tuple[Names, GetTensor]:
    if load_format == "tensorizer":
        from streaming.commands.resident_tensorizer import SUFFIX, open_tensorizer

        return open_tensorizer([root] if root.is_file() else sorted(root.glob(f"*{SUFFIX}")), stack)
    if parts := gguf_parts(root, load_format):
        return open_gguf(parts, config)
    if load_format == "mistral" or (load_format == "auto" and _is_own_layout(root)):
        return _open_own_layout(root, config, stack)
    if pickles := _pickles_of(root, load_format):
        return _open_pickles(pickles)
    return _open_safetensors(root, stack)


def _open_safetensors(root: Path, stack: ExitStack) -> tuple[Names, GetTensor]:
    folder = root if root.is_dir() else root.parent
    index = folder / "model.safetensors.index.json"
    if root.is_file():
        files = [root]
    elif index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({folder / name for name in named.values()})
    else:
        files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("adapter", "consolidated")))
    return open_files(files, stack)


def open_files(files: Sequence[Path], stack: ExitStack) -> tuple[Names, GetTensor]:
    """The tensors of safetensors files: their names, and what gives one by its name."""
    from safetensors import safe_open

    opened = [stack.enter_context(safe_open(file, framework="pt")) for file in files]
    where = {name: handle for handle in opened for name in handle.keys()}  # noqa: SIM118  (not a mapping)
    return list(where), lambda name: where[name].get_tensor(name)


def _pickles_of(root: Path, load_format: str) -> list[Path]:
    """The files of torch.save that are the model; none where there are safetensors files."""
    if root.is_file():
        return [root] if root.suffix in _PICKLES else []
    suffixes = {"safetensors": (), "pt": _PICKLES[1:], "npcache": _PICKLES[:1]}.get(load_format)
    if suffixes is None:
        suffixes = () if any(root.glob("*.safetensors")) else _PICKLES
    index = root / "pytorch_model.bin.index.json"
    if index.is_file() and ".bin" in suffixes:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({root / name for name in named.values()})
    found = ([p for p in root.glob(f"*{suffix}") if not p.name.startswith(_NO_WEIGHTS)] for suffix in suffixes)
    return sorted(next((files for files in found if files), []))


def _open_pickles(files: Sequence[Path]) -> tuple[Names, GetTensor]:
    """Mapped, not read, where the file is a zip archive; only tensors are unpickled."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with open(file, "rb") as opened:
            mapped = opened.read(2) == b"PK"
        saved = torch.load(file, weights_only=True, map_location="cpu", mmap=mapped)
        own = _tensors_of(saved)
        tensors |= own or next(filter(None, (_tensors_of(v) for v in saved.values() if isinstance(v, dict))), {})
    return list(tensors), tensors.__getitem__


def _tensors_of(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in saved.items() if isinstance(value, torch.Tensor)}


def _is_own_layout(root: Path) -> bool:
    """Whether Mistral's own layout is all that there is."""
    folder, files = (root, list(root.glob("*.safetensors*"))) if root.is_dir() else (root.parent, [root])
    return bool(files) and (folder / "params.json").is_file() and all(p.name.startswith("consolidated") for p in files)


def _open_own_layout(root: Path, config: ModelConfig, stack: ExitStack) -> tuple[Names, GetTensor]:
    """Meta's and Mistral's own names; a pair of rows that a rotary embedding turns together are neighbours there."""
    files = [root] if root.is_file() else sorted(root.glob("consolidated*.safetensors"))
    pickles = [] if files else sorted(root.glob("consolidated*.pth"))
    stored, get_stored = _open_pickles(pickles) if pickles else open_files(files, stack)
    by_name = {ours: theirs for ours in _wanted(config) if (theirs := _own_name(ours)) in set(stored)}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def get_tensor(name: str) -> torch.Tensor:
        wide, count = get_stored(by_name[name]), heads.get(name.split(".")[-2])
        return wide if count is None else halves_from_pairs(wide, count)

    return list(by_name), get_tensor


def _own_name(ours: str) -> str:
    for hub, own in _OWN_NAMES:
        ours = ours.replace(hub, own)
    return ours.removeprefix("model.")


def _wanted(config: ModelConfig) -> list[str]:
    parts = [hub for hub, _ in _OWN_NAMES if "." in hub or hub.endswith("layernorm")]
    blocks = [f"model.layers.{i}.{part}" for i in range(config.num_layers) for part in parts]
    return [f"{module}.weight" for module in ("model.embed_tokens", "model.norm", "lm_head", *blocks)]
