"""A lookup that remembers says what the weight map says, name by name."""

from __future__ import annotations

import re

import pytest

from layers.config import parse_config, weight_map
from layers.name_lookup import NameLookup
from layers.weights import Dropped, Rename, Stacked, Target, WeightMap
from tests.layers.tiny import ARCHITECTURES, raw_config

ENDS = (
    "self_attn.q_proj.weight", "self_attn.k_proj.bias", "self_attn.dense.weight", "self_attn.rotary_emb.inv_freq",
    "self_attn.q_layernorm.norms.0.weight", "self_attn.k_layernorm.norms.1.weight", "mlp.fc1.weight", "mlp.fc2.bias",
    "mlp.gate_up_proj.weight", "mlp.c_fc.weight", "attn.c_attn.weight", "attn.c_proj.bias", "attn.bias",
    "attn.masked_bias", "ln_1.weight", "ln_2.bias", "input_layernorm.weight", "post_self_attn_layernorm.weight",
    "post_mlp_layernorm.weight", "experts.3.up_proj.weight",
)  # fmt: skip
STARTS = ("model.layers.", "transformer.h.", "h.", "layers.", "language_model.model.layers.", "visual.blocks.")
NUMBERS = ("0", "1", "2", "07", "12", "424242424", "999999999", "1234567890")


def names() -> list[str]:
    outside = ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight", "", ".", "model.layers.3", "7.x"]
    return outside + [f"{start}{number}.{end}" for end in ENDS for start in STARTS for number in NUMBERS]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_finds_what_its_map_finds(family: str) -> None:
    whole = weight_map(parse_config(raw_config(family)))
    lookup = NameLookup(whole)
    assert [lookup.locate(name) for name in names()] == [whole.locate(name) for name in names()]


def test_a_multimodal_model_finds_what_its_map_finds() -> None:
    whole = weight_map(parse_config({"architectures": ["LlavaForConditionalGeneration"], "text_config": {}}))
    lookup = NameLookup(whole)
    assert [lookup.locate(name) for name in names()] == [whole.locate(name) for name in names()]


def test_names_that_differ_by_the_number_are_decided_once() -> None:
    class Counted(WeightMap):
        asked: list[str] = []  # noqa: RUF012 - a list for all of this one test

        def locate(self, name: str) -> Target | Dropped:
            self.asked.append(name)
            return super().locate(name)

    lookup = NameLookup(Counted(stacked=(Stacked("k_proj", "qkv_proj", 1, 2),), num_layers=40))
    for layer in range(40):
        found = lookup.locate(f"model.layers.{layer}.self_attn.k_proj.weight")
        assert found == Target(f"model.layers.{layer}.self_attn.qkv_proj.weight", 1, 2)
    assert len(Counted.asked) == 1
    assert lookup.locate("model.layers.40.self_attn.k_proj.weight") == Dropped(
        "layer 40 lies beyond num_hidden_layers = 40"
    )


@pytest.mark.parametrize(
    "rules",
    [
        WeightMap(structure=(Rename("layers.1", "first"),)),
        WeightMap(renames=((re.compile(r"^layers\.[1-3]\."), "early.", ""),)),
        WeightMap(renames=((re.compile(r"^layers\.\d\."), "short.", ""),)),
        WeightMap(renames=((re.compile(r"^layers\.\d{2}\."), "long.", ""),)),
        WeightMap(renames=((re.compile(r"^layers\.(\d+)\.w"), r"layers.w\1", ""),)),
        WeightMap(substrings=(Rename("layers.2.", "second."),)),
        WeightMap(prefixes=(Rename("layers.1", None, "the second ten"),)),
        WeightMap(unused=(("layers.2", "the third ten"),)),
        WeightMap(structure=(Rename("layers.*", ""),)),
        WeightMap(structure=(Rename("layers.*.w", "model.layers.5.w"),), num_layers=4),
        WeightMap(structure=(Rename("layers.*.*", "model.layers.4242.*.*"),), num_layers=4),
    ],
)
def test_rules_that_tell_numbers_apart_are_followed(rules: WeightMap) -> None:
    lookup = NameLookup(rules)
    found = [f"layers.{number}.w" for number in range(30)] + [f"layers.{number}.3.w.x" for number in range(30)]
    assert [lookup.locate(name) for name in found] == [rules.locate(name) for name in found]
