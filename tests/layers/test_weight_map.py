"""The five kinds of naming rule, their order, and the view that only renames: a golden table for each."""

from __future__ import annotations

import re

import pytest

from layers.errors import WeightError
from layers.weights import Dropped, Rename, Stacked, Target, WeightMap

EVERY_KIND = WeightMap(
    structure=(
        Rename("transformer.h.*.attn", "model.layers.*.self_attn"),
        Rename("transformer.h.*", "model.layers.*"),
        Rename("transformer", "model"),
    ),
    renames=(
        (re.compile(r"\.attn_bias$"), None, "a mask"),
        (re.compile(r"ln_(\d)\."), r"norm_\1.", ""),
        (re.compile(r"norm_1\."), "input_layernorm.", ""),
    ),
    substrings=(Rename("query", "q_proj"), Rename(".dropout.", ".none.")),
    stacked=(Stacked("q_proj", "qkv_proj", 0, 1), Stacked("kv_proj", "qkv_proj", 1, 3)),
    prefixes=(Rename("encoder.", None, "the encoder"), Rename("decoder.", "model."), Rename("model.lm_", "lm_")),
    suffixes=(Rename(".scale", ".weight"), Rename(".counter", None, "a counter")),
    unused=(("vision_tower.", "the vision tower"),),
    num_layers=2,
    transposed=(re.compile(r"\.qkv_proj\.weight$"),),
)

TABLE = {
    "kept": ("model.norm.weight", Target("model.norm.weight")),
    "structure, the first that fits": (
        "transformer.h.1.attn.o_proj.weight",
        Target("model.layers.1.self_attn.o_proj.weight"),
    ),
    "structure, whole modules only": ("transformers.h.1.x", Target("transformers.h.1.x")),
    "structure, then two expressions": ("transformer.h.0.ln_1.bias", Target("model.layers.0.input_layernorm.bias")),
    "an expression that drops": ("transformer.h.0.attn_bias", Dropped("a mask")),
    "substring, once, then stacked": (
        "transformer.h.0.attn.query.query",
        Target("model.layers.0.self_attn.qkv_proj.query", 0, 1),
    ),
    "a run of parts": ("model.layers.0.kv_proj.bias", Target("model.layers.0.qkv_proj.bias", 1, 3)),
    "stacked, whole module only": ("model.layers.0.my_q_proj.bias", Target("model.layers.0.my_q_proj.bias")),
    "transposed by the parameter's name": (
        "model.layers.0.q_proj.weight",
        Target("model.layers.0.qkv_proj.weight", 0, 1, transposed=True),
    ),
    "a prefix that drops": ("encoder.norm.weight", Dropped("the encoder")),
    "a prefix, the first that fits": ("decoder.lm_head.weight", Target("model.lm_head.weight")),
    "prefix and suffix": ("decoder.norm.scale", Target("model.norm.weight")),
    "a suffix that drops": ("model.norm.counter", Dropped("a counter")),
    "unused by its name on disk": ("vision_tower.norm.counter", Dropped("the vision tower")),
    "a layer too many, once it is renamed": (
        "decoder.layers.2.norm.scale",
        Dropped("layer 2 lies beyond num_hidden_layers = 2"),
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_where_a_name_goes_under_rules_of_every_kind(case: str) -> None:
    name, expected = TABLE[case]
    assert EVERY_KIND.locate(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.h.0.attn.query", "model.layers.0.self_attn.q_proj"),
        ("decoder.layers.1.q_proj", "model.layers.1.q_proj"),
        ("encoder.norm.counter", "encoder.norm.counter"),
        ("transformer.h.0.attn_bias", "model.layers.0.attn_bias"),
        ("vision_tower.norm", "vision_tower.norm"),
        ("model.layers.7.norm.scale", "model.layers.7.norm.weight"),
    ],
)
def test_the_rename_only_view_neither_stacks_nor_drops(name: str, expected: str) -> None:
    assert EVERY_KIND.rename(name) == expected


def test_a_module_may_be_renamed_to_nothing() -> None:
    assert WeightMap(structure=(Rename("backbone", ""),)).locate("backbone.norm.weight") == Target("norm.weight")


@pytest.mark.parametrize(("first", "stop"), [(1, 1), (2, 1), (-1, 1)])
def test_a_rule_for_what_is_no_run_of_parts_is_refused(first: int, stop: int) -> None:
    with pytest.raises(WeightError, match=r"q_proj -> qkv_proj: \[.*\) is no run of parts"):
        Stacked("q_proj", "qkv_proj", first, stop)
