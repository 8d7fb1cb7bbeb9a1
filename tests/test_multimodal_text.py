"""The text parts of multimodal models against transformers, under the names that files have and have had."""

from __future__ import annotations

import json
import shutil
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from layers.config import parse_config, weight_map
from layers.errors import ModelConfigError, UnsupportedModelError
from layers.family_names import MULTIMODAL_NAMES
from layers.multimodal import MULTIMODAL_MODELS
from layers.weights import Dropped, Target
from streaming import LLM, LoadOptions, open_encoder
from streaming.prepare import prepare
from tests.layers.tiny import BASE, run, some_ids
from tests.test_against_transformers import open_eagerly, reference_logits

TEXT: dict[str, Any] = {**BASE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "vision_use_head": False,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7,
}  # fmt: skip
CLIP = {**SIGLIP, "model_type": "clip_vision_model"}
QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
QWEN25_VISION = {
    "depth": 1, "hidden_size": 16, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 16, "patch_size": 4,
    "fullatt_block_indexes": [0],
}  # fmt: skip
QWEN3_VISION = {
    "depth": 1, "hidden_size": 16, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 16, "patch_size": 4,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 300.0}

# name -> (model_type, text_config, vision_config, keys of the whole)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, "model_type": "gemma3_text"},
        SIGLIP,
        {"mm_tokens_per_image": 4, "image_token_index": 99, "boi_token_index": 97, "eoi_token_index": 98},
    ),
    "llava, llama": ("llava", {"model_type": "llama"}, CLIP, {"image_token_index": 99}),
    "llava, mistral (pixtral)": ("llava", {"model_type": "mistral"}, PIXTRAL, {"image_token_index": 99}),
    "llava, qwen2, tied": (
        "llava",
        {"model_type": "qwen2", "tie_word_embeddings": True},
        SIGLIP,
        {"image_token_index": 99},
    ),
    "llava_next": ("llava_next", {"model_type": "llama"}, CLIP, {"image_token_index": 99}),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "head_dim": 16},
        PIXTRAL,
        {"image_token_index": 99, "tie_word_embeddings": False},
    ),
    "qwen2_vl": ("qwen2_vl", {"rope_parameters": MROPE}, QWEN2_VISION, {"tie_word_embeddings": True}),
    "qwen2_5_vl": ("qwen2_5_vl", {"rope_parameters": MROPE}, QWEN25_VISION, {}),
    "qwen3_vl": (
        "qwen3_vl",
        {"head_dim": 12, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
        QWEN3_VISION,
        {"tie_word_embeddings": True},
    ),
}


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module("transformers")
    package.logging.set_verbosity_error()
    return package


def write_whole(transformers: ModuleType, name: str, folder: Path) -> Any:
    """A random multimodal model of transformers, saved by it. Returns the model."""
    model_type, text, vision, whole = CASES[name]
    config = transformers.CONFIG_MAPPING[model_type](text_config={**TEXT, **text}, vision_config=vision, **whole)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in parameter_name and model_type != "gemma3"
            parameter.copy_(1.0 + 0.2 * values if norm else 0.25 * values)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def wholes(transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Filled as they are asked for, and kept."""
    root = tmp_path_factory.mktemp("wholes")

    class Wholes(dict[str, tuple[Path, Any]]):
        def __missing__(self, name: str) -> tuple[Path, Any]:
            folder = root / str(len(self))
            self[name] = folder, write_whole(transformers, name, folder)
            return self[name]

    return Wholes()


@pytest.mark.parametrize("name", CASES)
def test_logits_of_text_equal_those_of_transformers(name: str, wholes: dict[str, tuple[Path, Any]]) -> None:
    folder, reference = wholes[name]
    model, _ = open_eagerly(folder)
    for length in (1, 7, 19):
        prompt = some_ids(length, vocab_size=97, seed=length)
        wanted = reference_logits(reference, prompt)
        assert wanted.std() > 0.5
        torch.testing.assert_close(run(model, prompt), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_the_text_part_is_read(name: str, wholes: dict[str, tuple[Path, Any]]) -> None:
    folder, reference = wholes[name]
    plan = prepare(str(folder), LoadOptions()).plan
    text = reference.model.language_model.state_dict()
    head = {} if name in ("gemma3", "qwen2_vl", "qwen3_vl", "llava, qwen2, tied") else {"": reference.lm_head.weight}
    assert plan.read_nbytes == sum(tensor.nbytes for tensor in (*text.values(), *head.values()))
    assert plan.dropped
    assert all("text does not need" in reason for reason in plan.dropped.values())


@pytest.mark.parametrize("name", CASES)
def test_the_encoder_is_whatever_text_does_not_read(name: str, wholes: dict[str, tuple[Path, Any]]) -> None:
    folder, reference = wholes[name]
    stored = load_file(folder / "model.safetensors")
    text = reference.model.language_model.state_dict()
    heads = [key for key in stored if "lm_head" in key]
    found = dict(open_encoder(folder).items())
    assert len(stored) == len(found) + len(text) + len(heads)
    assert all(torch.equal(tensor, stored[key]) for key, tensor in found.items())
    assert set(found) == set(prepare(str(folder), LoadOptions()).plan.dropped)


def renamed(folder: Path, out: Path, *, new: bool) -> None:
    """The folder with the text's and the head's tensors named as before transformers 4.52, or as after."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        bare = name.replace("language_model.", "").removeprefix("model.")
        text = bare.startswith(("layers.", "embed_tokens.", "norm."))
        if new:
            plain = "lm_head.weight" if bare.startswith("lm_head") else f"model.{bare}"
            tensors[f"model.language_model.{bare}" if text else plain] = tensor
        else:
            tensors[f"language_model.{'model.' if text else ''}{bare}" if text or "lm_head" in bare else bare] = tensor
    out.mkdir()
    shutil.copy(folder / "config.json", out)
    save_file(tensors, out / "model.safetensors")


@pytest.mark.parametrize("new", [True, False], ids=["new names", "old names"])
@pytest.mark.parametrize("name", ["gemma3", "llava, llama", "mistral3"])
def test_both_generations_of_names_are_streamed(
    name: str, new: bool, wholes: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, reference = wholes[name]
    renamed(folder, tmp_path / "model", new=new)
    names = load_file(tmp_path / "model" / "model.safetensors")
    assert any(each.startswith("model.language_model." if new else "language_model.model.") for each in names)
    prompt = some_ids(19, vocab_size=97, seed=2)
    with LLM(tmp_path / "model", dtype="float32") as llm:
        torch.testing.assert_close(llm.logits(prompt), reference_logits(reference, prompt), rtol=1e-5, atol=1e-4)


def test_a_whole_without_a_text_section_is_read_from_its_own_keys(
    wholes: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Qwen2-VL's first files hold the text's keys beside the others, and its tensors as a text model has them."""
    folder, reference = wholes["qwen2_vl"]
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 300.0}
    flat = {
        **{key: value for key, value in text.items() if key not in ("model_type", "rope_parameters")},
        **raw,
        **rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    tensors = load_file(folder / "model.safetensors")
    names = {
        name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.") for name in tensors
    }
    save_file({names[name]: tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    model, _ = open_eagerly(tmp_path)
    prompt = some_ids(19, vocab_size=97, seed=2)
    torch.testing.assert_close(run(model, prompt), reference_logits(reference, prompt), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("whole", MULTIMODAL_MODELS, ids=lambda whole: whole.model_type)
def test_sizes_that_a_text_section_leaves_out_are_those_of_transformers(whole: Any, transformers: ModuleType) -> None:
    """Published files leave out what equals the text model's defaults."""
    for kind, part in whole.parts.items():
        raw = {"architectures": list(MULTIMODAL_NAMES[whole.model_type]), "text_config": {"model_type": kind}}
        config = parse_config(raw)
        theirs = transformers.CONFIG_MAPPING[kind]()
        assert part.sizes
        assert config.hidden_size == theirs.hidden_size
        assert config.intermediate_size == theirs.intermediate_size
        assert config.num_layers == theirs.num_hidden_layers
        assert config.num_heads == theirs.num_attention_heads
        assert config.num_kv_heads == theirs.num_key_value_heads
        assert config.head_dim == (
            getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        )
        assert config.vocab_size == theirs.vocab_size
        assert config.rms_norm_eps == theirs.rms_norm_eps
        ropes = theirs.rope_parameters
        assert config.rope is not None
        assert config.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]


def test_a_text_part_of_another_kind_is_refused_by_name() -> None:
    raw = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "mamba"}}
    with pytest.raises(ModelConfigError, match=r"text_config: model_type 'mamba' .* llava; known are llama, mistral"):
        parse_config(raw)
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration"):
        parse_config({"architectures": ["IdeficsForVisionText2Text"], "text_config": {"model_type": "llama"}})


def test_either_section_may_tie_the_head() -> None:
    def tied(whole: dict[str, Any], text: dict[str, Any], architecture: str = "LlavaForConditionalGeneration") -> bool:
        return parse_config({"architectures": [architecture], "text_config": text, **whole}).tie_word_embeddings

    yes, no = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
    assert [tied({}, {}), tied(yes, {}), tied({}, yes), tied(no, yes), tied(no, no)] == [False, True, True, True, False]
    gemma = "Gemma3ForConditionalGeneration"
    assert (tied({}, {}, gemma), tied(no, {}, gemma)) == (True, False)


def test_other_parts_are_told_by_the_beginning_of_the_name_and_not_by_a_word_in_it() -> None:
    names = weight_map(parse_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}))
    for start in ("", "model."):
        assert isinstance(names.locate(f"{start}vision_tower.vision_model.encoder.layers.0.norm.weight"), Dropped)
        assert isinstance(names.locate(f"{start}multi_modal_projector.linear_1.bias"), Dropped)
    kept = names.locate("language_model.model.layers.3.vision_tower.weight")
    assert kept == Target("model.layers.3.vision_tower.weight")
