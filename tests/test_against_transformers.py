"""Logits against transformers, from checkpoints that transformers itself wrote: every family, every kind of rotation.

The models are tiny and random, with weights large enough that a wrong mask, angle or bias moves the logits by far more
than the tolerance.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from layers.architecture import layer_specs
from layers.config import ModelConfig, parse_config, weight_map
from layers.decoder import DecoderModel, build_shell
from layers.eager import fill_shell
from layers.mlp import ACTIVATIONS
from layers.rotary import inverse_frequencies
from layers.sampler import keep_min_p, keep_top_k, keep_top_p, penalize_repetition
from quant.dtypes import DType, to_torch
from tests.layers.family_cases import FAMILY_CASES
from tests.layers.real_configs import CONFIGS
from tests.layers.tiny import ALL_WIDE, BASE, new_cache, rope_of, run, some_ids

LENGTHS = (1, 2, 7, 19, 40)  # ascending: transformers keeps the widest "dynamic" frequencies that it has seen


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module("transformers")
    package.logging.set_verbosity_error()
    return package


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.4, 1.5, 1.7],
    "long_factor": [1.0, 1.6, 2.7, 4.4, 6.8, 9.1], "original_max_position_embeddings": 16,
}  # fmt: skip

# name -> (model_type, changes); head_dim is 12 unless it is changed: 6 frequencies
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama mlp bias": ("llama", {"mlp_bias": True, "hidden_act": "gelu"}),
    "llama head_dim": ("llama", {"head_dim": 20, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "llama full heads": ("llama", {"num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
    "llama odd sizes": ("llama", {"hidden_size": 42, "num_attention_heads": 7, "num_key_value_heads": 7,
                                  "intermediate_size": 101, "vocab_size": 131}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
                                "max_position_embeddings": 16}),
    "llama llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 100.0}}),
    "llama yarn": ("llama", {"rope_parameters": {**YARN, "rope_theta": 100.0}}),
    "llama yarn untruncated": ("llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 4.0,
                                                             "beta_slow": 0.5, "rope_theta": 50.0}}),
    "llama yarn mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.4, "mscale_all_dim": 0.7}}),
    "llama yarn attention factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.31}}),
    "llama longrope": ("llama", {"rope_parameters": {**LONGROPE, "rope_theta": 100.0}}),
    "llama longrope factors": ("llama", {"rope_parameters": {**LONGROPE, "factor": 4.0, "attention_factor": 1.2}}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral no window": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2 layer types": ("qwen2", {"use_sliding_window": True, "sliding_window": 3,
                                    "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 bias, windows, yarn": ("qwen3", {"head_dim": 16, "attention_bias": True, "use_sliding_window": True,
                                            "sliding_window": 9, "max_window_layers": 0, "rope_parameters": YARN}),
    "phi3": ("phi3", {"sliding_window": 11}),
    "phi3 longrope, partial": ("phi3", {"head_dim": 16, "tie_word_embeddings": True, "partial_rotary_factor": 0.75,
                                        "original_max_position_embeddings": 16, "rope_parameters": LONGROPE,
                                        "hidden_size": 64}),
    **FAMILY_CASES,
}  # fmt: skip
GROWING = ("llama dynamic", "llama longrope", "llama longrope factors", "phi3 longrope, partial")


@dataclass(frozen=True)
class Pair:
    """The same checkpoint in both implementations."""

    reference: Any
    model: DecoderModel
    config: ModelConfig


@pytest.fixture(scope="session")
def pairs(transformers: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Filled as they are asked for, and kept."""
    root = tmp_path_factory.mktemp("checkpoints")

    class Pairs(dict[str, Pair]):
        def __missing__(self, name: str) -> Pair:
            reference = write_checkpoint(transformers, *CASES[name], folder=root / name.replace(" ", "_"))
            self[name] = Pair(reference, *open_eagerly(root / name.replace(" ", "_")))
            return self[name]

    return Pairs()


def write_checkpoint(transformers: ModuleType, model_type: str, changes: dict[str, Any], *, folder: Path) -> Any:
    """A random model of transformers, saved by it. Returns the model."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CONFIG_MAPPING[model_type](
        **{**BASE, **tokens, **deepcopy(changes)}
    )  # it changes what it is given
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(len(json.dumps(changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            one = 0.0 if model_type.startswith("gemma") else 1.0  # its norms count from one themselves
            parameter.copy_(one + 0.2 * values if "norm" in name and name.endswith("weight") else 0.25 * values)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # near the scores, so that it changes many choices
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def open_eagerly(folder: Path, *, dtype: DType = DType.F32) -> tuple[DecoderModel, ModelConfig]:
    """The checkpoint through our own configuration, weight map and eager loader."""
    config = parse_config(json.loads((folder / "config.json").read_text()))
    specs = layer_specs(config, dtype=dtype, policy=ALL_WIDE)
    model = build_shell(config, specs)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        fill_shell(model, specs, weight_map(config), names=file.keys(), get_tensor=file.get_tensor)
    return model, config


def reference_logits(reference: Any, prompt: Sequence[int], *, cache: Any = None) -> torch.Tensor:
    name = "cache" if "cache" in signature(reference.forward).parameters else "past_key_values"  # renamed in 5.24
    with torch.inference_mode():
        out = reference(input_ids=torch.tensor([list(prompt)]), use_cache=cache is not None, **{name: cache})
    logits: torch.Tensor = out.logits[0].float()
    return logits


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[name]
    for length in LENGTHS:
        prompt = some_ids(length, seed=length)
        wanted = reference_logits(pair.reference, prompt)
        assert wanted.std() > 0.5
        torch.testing.assert_close(run(pair.model, prompt), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_a_step_at_a_time_equals_the_prompt_at_once(
    name: str, pairs: dict[str, Pair], transformers: ModuleType
) -> None:
    pair, prompt = pairs[name], some_ids(24, seed=3)
    cache = new_cache(pair.config, max_tokens=24)
    parts = [prompt[:9], prompt[9:10], prompt[10:14], *([token] for token in prompt[14:])]
    stepwise = torch.cat([run(pair.model, part, caches=[cache]) for part in parts])
    if name in GROWING:  # the angles of old keys stay as they were: the reference is transformers, step by step
        past = transformers.DynamicCache(config=pair.reference.config)
        wanted = torch.cat([reference_logits(pair.reference, part, cache=past) for part in parts])
        torch.testing.assert_close(stepwise, wanted, rtol=1e-5, atol=1e-4)
    else:
        torch.testing.assert_close(stepwise, run(pair.model, prompt), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "llama longrope", "mistral", "qwen3", "deepseek_v3"])
def test_sequences_of_a_batch_do_not_see_each_other(name: str, pairs: dict[str, Pair]) -> None:
    model = pairs[name].model
    prompts = [some_ids(5, seed=1), some_ids(30, seed=2), some_ids(1, seed=3)]
    alone = torch.cat([run(model, prompt) for prompt in prompts])
    torch.testing.assert_close(run(model, *prompts), alone, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(DType.BF16, 0.25), (DType.F16, 0.03)])
@pytest.mark.parametrize(
    "name",
    [
        "llama tied", "qwen3 bias, windows, yarn", "phi3 longrope, partial", "gpt2", "glm", "olmo2",
        "stablelm parallel, norms, bias", "gemma", "gemma2", "gemma3", "phi", "granite", "cohere norms, bias",
        "deepseek_v2", "deepseek_v2 groups, yarn, bias",
        "gpt_oss square, no attention bias",
    ],
)  # fmt: skip
def test_half_precision_stays_as_near_to_float32_as_the_reference(
    name: str, dtype: DType, tolerance: float, transformers: ModuleType, tmp_path: Path
) -> None:
    reference = write_checkpoint(transformers, *CASES[name], folder=tmp_path)
    model, config = open_eagerly(tmp_path, dtype=dtype)
    prompt = some_ids(24, seed=5)
    exact = reference_logits(reference, prompt)
    wanted = reference_logits(reference.to(to_torch(dtype)), prompt)
    cache = new_cache(config, max_tokens=24, dtype=dtype)
    ours = run(model, prompt, caches=[cache])
    scale = exact.std()
    assert (ours - wanted).abs().max() < tolerance * scale
    assert (ours - exact).square().mean().sqrt() < 1.3 * (wanted - exact).square().mean().sqrt()


@pytest.mark.parametrize("name", CONFIGS)
def test_real_configurations_mean_what_transformers_makes_of_them(name: str, transformers: ModuleType) -> None:
    config = parse_config(CONFIGS[name])
    rope = rope_of(config)
    theirs = transformers.CONFIG_MAPPING[config.model_type].from_dict(deepcopy(CONFIGS[name]))
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.rms_norm_eps == theirs.rms_norm_eps
    rotary = rotary_class(config.model_type)(theirs)
    length = rope.original_max_position_embeddings
    torch.testing.assert_close(inverse_frequencies(rope, length=length), rotary.inv_freq, rtol=0, atol=0)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
    if rope.kind.value == "longrope":
        rotary(torch.zeros(1), torch.tensor([[length]]))  # one token beyond the trained length
        frequencies = inverse_frequencies(rope, length=length + 1)
        torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=0, atol=0)


def rotary_class(model_type: str) -> Any:
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    return getattr(module, "".join(map(str.capitalize, model_type.split("_"))) + "RotaryEmbedding")


@pytest.mark.parametrize("length", [1, 16, 17, 23, 400])
def test_dynamic_frequencies_grow_as_those_of_transformers(length: int, transformers: ModuleType) -> None:
    changes = CASES["llama dynamic"][1]
    config = parse_config({"architectures": ["LlamaForCausalLM"], **BASE, **changes})
    rotary = rotary_class("llama")(transformers.CONFIG_MAPPING["llama"](**{**BASE, **deepcopy(changes)}))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    angles = torch.arange(length)[:, None].float() * inverse_frequencies(rope_of(config), length=length)
    torch.testing.assert_close(torch.cat((angles, angles), -1).cos(), cos[0], rtol=0, atol=0)
    torch.testing.assert_close(torch.cat((angles, angles), -1).sin(), sin[0], rtol=0, atol=0)


def test_the_old_form_of_rotary_settings_means_the_same_as_the_new() -> None:
    common = {"architectures": ["LlamaForCausalLM"], **BASE}
    for settings in (LLAMA3, YARN, LONGROPE, {"rope_type": "linear", "factor": 3.0}):
        new = {**common, "rope_parameters": {**settings, "rope_theta": 777.0}}
        inner = {("type" if key == "rope_type" else key): value for key, value in settings.items()}
        old = {**common, "rope_theta": 777.0, "rope_scaling": inner}
        assert parse_config(old) == parse_config(new)
        assert parse_config(old) != replace(parse_config(new), rope=parse_config(common).rope)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_those_of_transformers(name: str, transformers: ModuleType) -> None:
    x = torch.linspace(-9, 9, 1001)
    wanted = transformers.activations.ACT2FN[name](x)
    torch.testing.assert_close(ACTIVATIONS[name](x), wanted, rtol=1e-6, atol=1e-7)


def test_the_filters_of_the_sampler_equal_the_processors_of_transformers(transformers: ModuleType) -> None:
    scores = torch.randn(997, generator=torch.Generator().manual_seed(4)) * 3
    scores[[5, 50, 500]] = scores.max() - 0.5  # equal scores
    previous = [3, 3, 700, int(scores.argmax()), int(scores.argmin())]
    ids = torch.tensor([previous])
    both = [(keep_top_k(scores, top_k=k), transformers.TopKLogitsWarper(k)) for k in (1, 2, 3, 40, 997, 2000)]
    both += [(keep_top_p(scores, top_p=p), transformers.TopPLogitsWarper(p)) for p in (1e-9, 0.1, 0.5, 0.9, 0.999)]
    both += [(keep_min_p(scores, min_p=p), transformers.MinPLogitsWarper(p)) for p in (0.001, 0.05, 0.5, 1.0)]
    both += [
        (penalize_repetition(scores, previous, penalty=p), transformers.RepetitionPenaltyLogitsProcessor(p))
        for p in (0.8, 1.3)
    ]
    for ours, processor in both:
        assert torch.equal(ours, processor(ids, scores[None].clone())[0])
