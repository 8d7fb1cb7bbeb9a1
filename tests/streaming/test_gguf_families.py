"""Each family as a GGUF file gives the logits of transformers' own model.

The files are written here as llama.cpp's converter does it (convert_hf_to_gguf.py): the gguf package's table of names,
q and k of llama's kin interleaved, 1 on top of gemma's norms, and numbers of config.json under the package's keys.
"""

from __future__ import annotations

import argparse
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from streaming import LLM, LoadOptions
from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.gguf_families import GGUF_FAMILIES
from streaming.commands.verify import compare
from streaming.errors import CheckpointError
from streaming.prepare import prepare
from tests.layers.tiny import some_ids
from tests.streaming.checkpoint.build import write_gguf
from tests.test_against_transformers import write_checkpoint

TANH = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 16}
GEMMA2 = {**TANH, "sliding_window": 6, "query_pre_attn_scalar": 16, "num_hidden_layers": 3}
GEMMA3 = {**TANH, "sliding_window": 5, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}
SCALES = {
    "embedding_multiplier": 3.7, "logits_scaling": 1.9, "residual_multiplier": 0.43, "attention_multiplier": 0.31,
}  # fmt: skip

# name -> GGUF's architecture, transformers' model_type, changes to its configuration
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama bias": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("llama", "mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}),
    "phi3": ("phi3", "phi3", {"sliding_window": 11}),
    "gemma": ("gemma", "gemma", TANH),
    "gemma2": ("gemma2", "gemma2", {**GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3", "gemma3_text", GEMMA3),
    "olmo2": ("olmo2", "olmo2", {"num_key_value_heads": 4}),
    "granite": ("granite", "granite", {**SCALES, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", "stablelm", {"hidden_size": 64}),
    "stablelm parallel, bias": (
        "stablelm", "stablelm", {"hidden_size": 64, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "gpt2": ("gpt2", "gpt2", {"tie_word_embeddings": True}),
    "gpt2 untied": ("gpt2", "gpt2", {"tie_word_embeddings": False, "n_inner": 80}),
    "phi": ("phi2", "phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "hidden_size": 64}),
    "cohere": ("command-r", "cohere", {"tie_word_embeddings": True, "logit_scale": 0.6}),
    "cohere norms": ("command-r", "cohere", {"tie_word_embeddings": True, "use_qk_norm": True, "logit_scale": 0.6}),
}  # fmt: skip
# config.json's key -> the package's name of the metadata key
KEYS = {
    "hidden_size": "EMBEDDING_LENGTH", "intermediate_size": "FEED_FORWARD_LENGTH", "num_hidden_layers": "BLOCK_COUNT",
    "max_position_embeddings": "CONTEXT_LENGTH", "use_parallel_residual": "USE_PARALLEL_RESIDUAL",
    "attn_logit_softcapping": "ATTN_LOGIT_SOFTCAPPING", "final_logit_softcapping": "FINAL_LOGIT_SOFTCAPPING",
    "embedding_multiplier": "EMBEDDING_SCALE", "residual_multiplier": "RESIDUAL_SCALE",
    "logits_scaling": "LOGIT_SCALE", "logit_scale": "LOGIT_SCALE",
}  # fmt: skip
ATTENTION_KEYS = {
    "num_attention_heads": "HEAD_COUNT", "num_key_value_heads": "HEAD_COUNT_KV", "rms_norm_eps": "LAYERNORM_RMS_EPS",
    "layer_norm_eps": "LAYERNORM_EPS", "sliding_window": "SLIDING_WINDOW", "attention_multiplier": "SCALE",
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module("transformers")
    package.logging.set_verbosity_error()
    return package


def metadata(config: Any, architecture: str) -> dict[str, Any]:
    ours_all = (*KEYS, *ATTENTION_KEYS, "head_dim")
    values = {**{key: getattr(config, key, None) for key in ours_all}, **config.to_dict()}
    if architecture == "gpt2":  # whose keys have other names
        values |= {
            "intermediate_size": config.n_inner or 4 * config.n_embd,
            "layer_norm_eps": config.layer_norm_epsilon,
        }
    found = {getattr(gguf.Keys.LLM, theirs): values.get(ours) for ours, theirs in KEYS.items()}
    found |= {getattr(gguf.Keys.Attention, theirs): values.get(ours) for ours, theirs in ATTENTION_KEYS.items()}
    logit_scale = values.get("logits_scaling") or values.get("logit_scale")
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    rope = values.get("rope_parameters") or {"rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)
    found |= {
        gguf.Keys.LLM.LOGIT_SCALE: logit_scale,
        gguf.Keys.Attention.KEY_LENGTH: head_dim,
        gguf.Keys.Attention.VALUE_LENGTH: head_dim,
        gguf.Keys.Rope.FREQ_BASE: float(rope["rope_theta"]),
        gguf.Keys.Rope.DIMENSION_COUNT: int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    return {key.format(arch=architecture): value for key, value in found.items() if value is not None}


def converted(name: str, weight: torch.Tensor, config: Any, architecture: str) -> np.ndarray[Any, Any]:
    if architecture in ("llama", "granite") and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        size = weight.shape[0] // heads
        weight = weight.reshape(heads, 2, size // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    if architecture == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        weight = weight.T
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight + 1
    return weight.contiguous().numpy()


def write_model(path: Path, model: Any, architecture: str) -> Path:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    weights = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    tensors = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): converted(name, weight, model.config, architecture)
        for name, weight in weights.items()
    }
    return write_gguf(path, architecture=architecture, keys=metadata(model.config, architecture), tensors=tensors)


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _, _ in CASES.values()} == set(GGUF_FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_a_family_as_gguf_gives_the_references_logits(name: str, transformers: ModuleType, tmp_path: Path) -> None:
    architecture, model_type, changes = CASES[name]
    reference = write_checkpoint(transformers, model_type, changes, folder=tmp_path / "hub")
    path = write_model(tmp_path / "model.gguf", reference, architecture)
    ids = some_ids(19, vocab_size=101, seed=1)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    with LLM(str(path), dtype="float32") as llm, LLM(str(tmp_path / "hub"), dtype="float32") as hub:
        found = llm.logits(ids)
        torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(hub.logits(ids)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_family_as_gguf_is_verified(name: str, transformers: ModuleType, tmp_path: Path) -> None:
    """`verify`'s resident side reads the file with the gguf package alone."""
    architecture, model_type, changes = CASES[name]
    reference = write_checkpoint(transformers, model_type, changes, folder=tmp_path / "hub")
    path = write_model(tmp_path / "model.gguf", reference, architecture)
    options = argparse.Namespace(quantization="none", quiet=True, json=False)
    report = compare(prepare(str(path), LoadOptions(dtype="float32")), [1, 5, 7, 30], options)
    assert report.differences == []
    assert report.logits == 2 * 4 * 101


def test_gemmas_norms_lose_the_1_on_top_before_they_are_rounded(transformers: ModuleType, tmp_path: Path) -> None:
    """As bfloat16 the weights are those of the original, which 1 on top would round to 8 bits."""
    reference = write_checkpoint(transformers, "gemma", TANH, folder=tmp_path / "hub").bfloat16().float()
    path = write_model(tmp_path / "model.gguf", reference, "gemma")
    found = LLM.load_layer(path, 0, dtype="bfloat16")
    (norm,) = (value for name, value in found.items() if name.endswith("input_layernorm.weight"))
    assert torch.equal(norm, reference.state_dict()["model.layers.0.input_layernorm.weight"].bfloat16())


@pytest.mark.parametrize(("layers", "scalar"), [(46, 48 / 4), (26, 16.0)])
def test_gemma_2s_largest_model_scales_scores_by_its_own_number(layers: int, scalar: float, tmp_path: Path) -> None:
    keys = {
        "embedding_length": 48, "feed_forward_length": 80, "block_count": layers, "attention.head_count": 4,
        "attention.key_length": 16, "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6,
        "context_length": 64, "attention.sliding_window": 8,
    }  # fmt: skip
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture="gemma2",
        keys={f"gemma2.{key}": value for key, value in keys.items()},
        tensors={"token_embd.weight": np.zeros((40, 48), np.float32)},
    )
    assert open_checkpoint(path).config["query_pre_attn_scalar"] == scalar


@pytest.mark.parametrize(
    ("architecture", "keys", "tensor", "words"),
    [
        ("olmo2", {"attention.sliding_window": 8}, "blk.0.attn_q_norm.weight", "OLMo 3 is not supported as GGUF yet"),
        ("stablelm", {"attention.layer_norm_epsilon": 1e-5}, "blk.0.attn_q_norm.weight", "heads have norms of their"),
    ],
)
def test_variants_that_are_not_known_are_refused(
    architecture: str, keys: dict[str, Any], tensor: str, words: str, tmp_path: Path
) -> None:
    usual = {
        "embedding_length": 48, "feed_forward_length": 80, "block_count": 1, "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6, "context_length": 64, **keys,
    }  # fmt: skip
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture=architecture,
        keys={f"{architecture}.{key}": value for key, value in usual.items()},
        tensors={"token_embd.weight": np.zeros((40, 48), np.float32), tensor: np.ones((4, 12), np.float32)},
    )
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
