"""Every name that the scales of an fp8 KV cache have had, and names that only look like one."""

from __future__ import annotations

import pytest

from layers.kv_scales import KVScaleName, kv_scale_name

NAMES = {
    "model.layers.3.self_attn.kv_scale": "kv",
    "model.layers.3.self_attn.attn.kv_scale": "kv",
    "model.layers.3.self_attn.attn.k_scale": "k",
    "model.layers.3.self_attn.attn.v_scale": "v",
    "model.layers.3.self_attn.k_proj.k_scale": "k",
    "model.layers.3.self_attn.v_proj.v_scale": "v",
    "model.layers.3.self_attn.qkv_proj.k_scale": "k",
    "model.layers.3.self_attn.k_scale": "k",
    "model.layers.3.self_attn.v_scale": "v",
    "model.layers.3.self_attn.k_proj.output_scale": "k",
    "model.layers.3.self_attn.v_proj.output_scale": "v",
    "layers.3.attention.k_scale": "k",
    "transformer.h.3.attn.v_scale": "v",
    "model.language_model.layers.3.self_attn.k_scale": "k",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_is_known_under_each_of_its_names(name: str) -> None:
    found = kv_scale_name(name)
    assert found is not None
    assert (found.layer, found.part) == (3, NAMES[name])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.k_proj.weight_scale",
        "model.layers.3.self_attn.k_proj.input_scale",
        "model.layers.3.self_attn.k_proj.v_scale",
        "model.layers.3.self_attn.q_proj.output_scale",
        "model.layers.3.self_attn.o_proj.output_scale",
        "model.layers.3.self_attn.q_scale",
        "model.layers.3.self_attn.k_zero_point",
        "model.layers.3.mlp.k_scale",
        "model.layers.self_attn.k_scale",
        "model.layers.3.self_attn.k_scale.weight",
        "model.layers.3.self_attn.k_scale\n",
        "k_scale",
        "",
    ],
)
def test_what_only_looks_like_one_is_none(name: str) -> None:
    assert kv_scale_name(name) is None


def test_the_layer_is_the_number_behind_layers() -> None:
    assert kv_scale_name("model.layers.127.self_attn.kv_scale") == KVScaleName(127, "kv")
