"""Mistral's own layout: params.json's twin, names, the order of q's and k's rows, and which files are the model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from layers.config import parse_config
from layers.errors import ModelConfigError
from streaming import LLM, LoadOptions
from streaming.checkpoint import decode_rows, open_checkpoint
from streaming.checkpoint.mistral_names import hub_name
from streaming.commands.verify import compare
from streaming.errors import CheckpointError, CheckpointFormatError
from streaming.prepare import prepare
from tests.layers.tiny import some_ids

MISTRAL: Mapping[str, Any] = {
    "dim": 64, "n_layers": 1, "head_dim": 16, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-05,
    "vocab_size": 40, "rope_theta": 1000000.0, "sliding_window": 32,
}  # fmt: skip
# Meta-Llama-3.1-8B's own file, the sizes of the layers apart
META: Mapping[str, Any] = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.3,
    "multiple_of": 1024, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
SHAPES: Mapping[str, tuple[int, ...]] = {
    "tok_embeddings.weight": (40, 64), "norm.weight": (64,), "output.weight": (40, 64),
    "layers.0.attention_norm.weight": (64,), "layers.0.ffn_norm.weight": (64,),
    "layers.0.attention.wq.weight": (64, 64), "layers.0.attention.wk.weight": (32, 64),
    "layers.0.attention.wv.weight": (32, 64), "layers.0.attention.wo.weight": (64, 64),
    "layers.0.feed_forward.w1.weight": (96, 64), "layers.0.feed_forward.w2.weight": (64, 96),
    "layers.0.feed_forward.w3.weight": (96, 64),
}  # fmt: skip
A, B = "consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"
INDEX = "consolidated.safetensors.index.json"


def random_tensors(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(
    root: Path, params: Mapping[str, Any] = MISTRAL, tensors: Mapping[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    """A folder of one consolidated file; None takes a key of params.json away."""
    root.mkdir(exist_ok=True)
    values = {key: value for key, value in {**params, **changes}.items() if value is not None}
    (root / "params.json").write_text(json.dumps(values))
    save_file(dict(random_tensors() if tensors is None else tensors), root / "consolidated.safetensors")
    return root


def problems(root: Path, load_format: str = "mistral") -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root, load_format=load_format)
    return caught.value.problems


def test_names_are_turned_into_hugging_faces(tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path))
    assert found.format == "safetensors"
    assert {name: list(info.shape) for name, info in found.tensors.items()} == {
        "model.embed_tokens.weight": [40, 64],
        "model.norm.weight": [64],
        "lm_head.weight": [40, 64],
        "model.layers.0.input_layernorm.weight": [64],
        "model.layers.0.post_attention_layernorm.weight": [64],
        "model.layers.0.self_attn.q_proj.weight": [64, 64],
        "model.layers.0.self_attn.k_proj.weight": [32, 64],
        "model.layers.0.self_attn.v_proj.weight": [32, 64],
        "model.layers.0.self_attn.o_proj.weight": [64, 64],
        "model.layers.0.mlp.gate_proj.weight": [96, 64],
        "model.layers.0.mlp.down_proj.weight": [64, 96],
        "model.layers.0.mlp.up_proj.weight": [96, 64],
    }
    assert all(info.name == name for name, info in found.tensors.items())
    assert {info.name.split(".")[-2]: info.rope_heads for info in found.tensors.values() if info.rope_heads} == {
        "q_proj": 4,
        "k_proj": 2,
    }


@pytest.mark.parametrize("name", ["layers.0.attention.wq.qscale_weight", "layers.x.ffn_norm.weight", "vision.norm"])
def test_a_name_that_is_not_known_stays_as_it_is(name: str) -> None:
    assert hub_name(name) == name


def meta_rotated(rows: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Meta's rotary embedding of [heads, D]: neighbours are a complex number (meta-llama/llama, `apply_rotary_emb`)."""
    dim = rows.shape[-1]
    angles = position / theta ** (torch.arange(0, dim, 2).double() / dim)
    turned = torch.view_as_complex(rows.double().reshape(-1, dim // 2, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).reshape(rows.shape)


def hub_rotated(rows: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Hugging Face's: halves are turned together (transformers, `rotate_half`)."""
    dim = rows.shape[-1]
    angles = (position / theta ** (torch.arange(0, dim, 2).double() / dim)).repeat(2)
    halves = torch.cat((-rows[:, dim // 2 :], rows[:, : dim // 2]), dim=1).double()
    return rows.double() * angles.cos() + halves * angles.sin()


def test_scores_are_those_of_the_reference_with_its_own_rotary_embedding(tmp_path: Path) -> None:
    """The direction of the permutation: q and k of the stored rows, turned as Meta turns them, have the same products
    as those of our rows, turned as Hugging Face turns them. Unpermuted ones have others."""
    root = write(tmp_path)
    stored, content = random_tensors(), (root / "consolidated.safetensors").read_bytes()
    x, y = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    ours = {}
    for which in "qk":
        info = open_checkpoint(root).tensors[f"model.layers.0.self_attn.{which}_proj.weight"]
        raw = content[info.offset : info.offset + info.nbytes]
        ours[which] = decode_rows(info, raw, rows=(0, info.shape[0]))
    q, k = stored["layers.0.attention.wq.weight"] @ x, stored["layers.0.attention.wk.weight"] @ y
    expected = (meta_rotated(q.view(4, 16), 7, 1e4)[::2] * meta_rotated(k.view(2, 16), 3, 1e4)).sum(1)
    unpermuted = (hub_rotated(q.view(4, 16), 7, 1e4)[::2] * hub_rotated(k.view(2, 16), 3, 1e4)).sum(1)
    q, k = ours["q"] @ x, ours["k"] @ y
    found = (hub_rotated(q.view(4, 16), 7, 1e4)[::2] * hub_rotated(k.view(2, 16), 3, 1e4)).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (unpermuted - expected).abs().min() > 1


def test_mistrals_params_become_a_config(tmp_path: Path) -> None:
    assert open_checkpoint(write(tmp_path)).config == {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128_000,
        "vocab_size": 40,
        "sliding_window": 32,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


YARN = {"factor": 16.0, "original_max_position_embeddings": 16384, "alpha": 2.0, "beta": 64.0}
CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n_kv_heads": None, "head_dim": None}, {"num_key_value_heads": 4, "head_dim": 16}),
    ({"sliding_window": None, "rope_theta": None}, {"sliding_window": None, "rope_theta": 10000.0}),
    ({"max_seq_len": 32768}, {"max_position_embeddings": 32768}),
    ({"max_seq_len": 32768, "max_position_embeddings": 262144}, {"max_position_embeddings": 262144}),
    ({"tied_embeddings": True}, {"tie_word_embeddings": True}),
    ({"vocab_size": None}, {"vocab_size": 40}),
    (
        {"yarn": YARN},
        {"max_position_embeddings": 262144, "rope_scaling": {
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 64.0,
            "beta_slow": 2.0,
        }},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_each_key_has_its_effect(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path, **changes))
    assert {key: found.config[key] for key in expected} == expected
    assert found.notes == ()
    parse_config(found.config)


@pytest.mark.parametrize(("apply", "factor"), [(True, 1 + 0.1 * 2.772588722239781), (False, 1.0)])
def test_yarn_scales_attention_only_where_it_says_so(apply: bool, factor: float, tmp_path: Path) -> None:
    config = parse_config(open_checkpoint(write(tmp_path, yarn={**YARN, "apply_scale": apply})).config)
    assert config.rope is not None
    assert config.rope.attention_factor == pytest.approx(factor)


META_CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [  # expected: config.json of the models on the hub
    ({}, {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128}),
    ({"dim": 8192, "n_heads": 64, "multiple_of": 4096}, {"intermediate_size": 28672}),
    ({"dim": 2048, "ffn_dim_multiplier": 1.5, "multiple_of": 256}, {"intermediate_size": 8192}),
    ({"use_scaled_rope": None}, {"rope_scaling": None, "max_position_embeddings": 8192}),
    ({"vocab_size": 32000, "use_scaled_rope": False}, {"eos_token_id": 2, "max_position_embeddings": 4096}),
    ({"n_kv_heads": None}, {"num_key_value_heads": 32}),
    (
        {"dim": 4096, "ffn_dim_multiplier": None, "multiple_of": 256, "vocab_size": -1, "use_scaled_rope": None},
        {"intermediate_size": 11008, "vocab_size": 40},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), META_CHANGES)
def test_metas_params_become_a_config(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    tensors = {"tok_embeddings.weight": torch.zeros(40, 2)}
    config = open_checkpoint(write(tmp_path, META, tensors, **changes)).config
    assert {key: config[key] for key in expected} == expected
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    parse_config(config)


@pytest.mark.parametrize(
    ("changes", "factor", "noted"),
    [({}, 8.0, True), ({"dim": 3072, "n_heads": 24}, 32.0, True), ({"rope_scaling_factor": 16}, 16.0, False)],
)
def test_llama_3s_stretched_frequencies(changes: dict[str, Any], factor: float, noted: bool, tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path, META, {"tok_embeddings.weight": torch.zeros(40, 2)}, **changes))
    assert found.config["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert any(f"{factor:g} is taken" in note for note in found.notes) == noted


def test_keys_that_are_not_known_are_noted(tmp_path: Path) -> None:
    (note,) = open_checkpoint(write(tmp_path, max_batch_size=8, logit_cap=30.0)).notes
    assert "keys that are not known have no effect: logit_cap" in note


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"moe": {"num_experts": 8}}, "moe: a mixture of experts is not supported"),
    ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization: a quantized model is not supported"),
    ({"vision_encoder": {"hidden_size": 1024}}, "vision_encoder: a model with a vision encoder is not supported"),
    ({"llama_4_scaling": {"beta": 0.1}}, r"llama_4_scaling: attention scaled by position \(llama_4_scaling\) is not"),
    ({"kv_lora_rank": 512}, "kv_lora_rank: multi-head latent attention is not supported"),
    ({"sliding_window": [None, 4096]}, "sliding_window is a list"),
    ({"causal": False}, "causal is false"),
    ({"hidden_dim": None}, "has neither hidden_dim nor multiple_of"),
    ({"dim": None}, "dim"),
    ({"n_heads": 0}, "n_heads"),
    ({"n_layers": "32"}, "n_layers"),
    ({"norm_eps": -1.0}, "norm_eps"),
    ({"yarn": {"factor": 4.0}}, "yarn.*original_max_position_embeddings"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_cannot_be_read_is_refused_in_words(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=words) as caught:
        open_checkpoint(write(tmp_path, **changes))
    assert str(tmp_path / "params.json") in str(caught.value)


EVIL: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**63,
    10**400,
    1e-300,
    1e308,
    float("inf"),
    float("nan"),
    "8",
    "",
    [],
    [1],
    {},
    {"a": 1},
)


@settings(max_examples=150, deadline=None)
@given(
    meta=st.booleans(),
    changes=st.dictionaries(st.sampled_from(sorted({*MISTRAL, *META, "yarn", "max_seq_len"})), st.sampled_from(EVIL)),
)
def test_whatever_params_hold_is_refused_in_words_or_read(
    meta: bool, changes: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.getbasetemp() / "evil params"
    write(root, META if meta else MISTRAL, {"tok_embeddings.weight": torch.zeros(40, 2)})
    (root / "params.json").write_text(json.dumps({**(META if meta else MISTRAL), **changes}))
    try:
        parse_config(open_checkpoint(root).config)
    except (CheckpointError, ModelConfigError):
        return


def test_rows_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path, n_heads=3, n_kv_heads=2))
    assert "'layers.0.attention.wq.weight' is [64, 64]: its rows are not 3 heads of an even size" in problem


def parts_of(root: Path) -> Path:
    """The same in two numbered files with an index."""
    write(root)
    (root / "consolidated.safetensors").unlink()
    tensors = list(random_tensors().items())
    save_file(dict(tensors[:5]), root / A)
    save_file(dict(tensors[5:]), root / B)
    placed = {name: A if number < 5 else B for number, (name, _) in enumerate(tensors)}
    (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return root


@pytest.mark.parametrize("with_index", [True, False])
def test_numbered_files_are_one_model(with_index: bool, tmp_path: Path) -> None:
    root = parts_of(tmp_path)
    if not with_index:
        (root / INDEX).unlink()
    found = open_checkpoint(root)
    assert [Path(str(file)).name for file in found.files] == [A, B]
    assert len(found.tensors) == len(SHAPES)
    (root / B).unlink()
    (problem,) = problems(root)
    assert f"1 of 2 files missing: {B} (the download is incomplete)" in problem


def test_files_that_each_hold_a_part_of_every_tensor_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path)
    (root / "consolidated.safetensors").rename(root / "consolidated.00.safetensors")
    save_file(random_tensors(), root / "consolidated.01.safetensors")
    (problem,) = problems(root)
    assert "and 11 more tensors" in problem
    assert "files that are a model cut for several GPUs are not supported" in problem


def test_every_problem_is_in_one_report(tmp_path: Path) -> None:
    root = parts_of(tmp_path)
    (root / "params.json").write_text("{")
    (root / A).write_bytes(b"short")
    with pytest.raises(CheckpointFormatError) as caught:
        open_checkpoint(root)
    assert ["params.json" in caught.value.problems[0], A in caught.value.problems[1]] == [True, True]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert any("params.json: is missing" in problem for problem in problems(tmp_path))
    (write(tmp_path) / "consolidated.safetensors").unlink()
    (problem,) = problems(tmp_path)
    assert "no weights in Mistral's own layout; looked for consolidated*.safetensors" in problem


def test_auto_takes_it_only_where_nothing_else_is_there(tmp_path: Path) -> None:
    root = write(tmp_path)
    for path in (root, root / "consolidated.safetensors"):
        assert open_checkpoint(path).config["model_type"] == "mistral"
    save_file({"x": torch.zeros(2)}, root / "model.safetensors")
    (root / "config.json").write_text('{"model_type": "llama"}')
    assert set(open_checkpoint(root).tensors) == {"x"}
    assert open_checkpoint(root, load_format="mistral").config["hidden_size"] == 64


OWN = {
    "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
}  # fmt: skip


def own_layout(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor as Mistral keeps it. The rows: what transformers' convert_mistral_weights_to_hf.py undoes with
    `w.view(heads, dim // heads // 2, 2, columns).transpose(1, 2)`."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = weight.shape[0] // 16
        weight = weight.view(heads, 2, 8, -1).transpose(1, 2).reshape(weight.shape).contiguous()
    for theirs, ours in OWN.items():
        name = name.replace(theirs, ours)
    return name.removeprefix("model."), weight


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_the_same_model_in_both_layouts_gives_the_same_bits(family: str, pickled: bool, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    write_tiny_model(folder, model=TinyModel(family=family, layers=2, files=1))
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    params = {
        "dim": 64, "n_layers": 2, "head_dim": 16, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 160,
        "norm_eps": config["rms_norm_eps"], "rope_theta": config.get("rope_theta", 1e4),
        **({"hidden_dim": 96} if family == "mistral" else {"multiple_of": 96, "ffn_dim_multiplier": 0.5}),
        **({"sliding_window": config["sliding_window"]} if config.get("sliding_window") else {}),
    }  # fmt: skip
    own = tmp_path / "own"
    tensors = dict(own_layout(name, weight) for name, weight in weights.items())
    write(own, params, tensors)
    if pickled:  # as Meta wrote it
        (own / "consolidated.safetensors").unlink()
        torch.save(tensors, own / "consolidated.00.pth")
    ids = some_ids(9, vocab_size=160, seed=1)
    with LLM(str(folder)) as llm, LLM(str(own), load_format="mistral") as other:
        assert torch.equal(other.logits(ids), llm.logits(ids))
    options = argparse.Namespace(quantization="none", quiet=True, json=False)
    report = compare(prepare(str(own), LoadOptions(load_format="mistral")), [1, 5, 7], options)
    assert (report.differences, report.logits) == ([], 2 * 3 * 160)
