"""Quantization configurations: what they may say, and which scheme each module gets from them."""

from __future__ import annotations

from typing import Any

import pytest

from quant.errors import QuantError
from quant.module_policy import Module, ModulePolicy, decide_schemes
from quant.policy import default_policy
from quant.policy_file import parse_quantization_config
from quant.registry import scheme_by_name
from quant.wide import Wide


def fused(name: str, *parts: str) -> Module:
    parent = name.rpartition(".")[0]
    return Module(f"{name}.weight", "linear", tuple((f"{parent}.{part}", name) for part in parts))


def plain(name: str, kind: str = "linear") -> Module:
    return Module(f"{name}.weight", kind, ((name,),))


QKV = "model.layers.{}.self_attn.qkv_proj"
MODULES = [
    *(fused(QKV.format(layer), "q_proj", "k_proj", "v_proj") for layer in (1, 10)),
    *(plain(f"model.layers.{layer}.mlp.down_proj") for layer in (1, 10)),
    plain("model.layers.1.mlp.gate"),
    plain("lm_head", "head"),
]


def decide(raw: dict[str, Any], *, default: str = "none", head: bool = False) -> ModulePolicy:
    policy = default_policy(scheme_by_name(default), quantize_head=head)
    return decide_schemes(MODULES, parse_quantization_config(raw), default=policy)


def names(policy: ModulePolicy) -> dict[str, str]:
    """Module -> scheme, of those that are not wide."""
    found = {name.removesuffix(".weight"): scheme.name for name, scheme in policy.schemes.items()}
    return {name: scheme for name, scheme in found.items() if scheme != "none"}


def rule(match: str, scheme: str = "int8_per_channel", **more: object) -> dict[str, object]:
    return {"match": match, "scheme": scheme, **more}


def test_without_rules_the_default_decides() -> None:
    assert set(names(decide({}, default="fp8_per_channel"))) == {
        QKV.format(1), QKV.format(10), "model.layers.1.mlp.down_proj", "model.layers.10.mlp.down_proj"
    }  # fmt: skip
    assert "lm_head" in names(decide({}, default="fp8_per_channel", head=True))
    assert names(decide({})) == {}


def test_the_first_rule_wins_and_ignore_comes_before_all() -> None:
    raw = {"rules": [rule("layers.1.mlp"), rule("down_proj", "fp8_per_block")], "ignore": ["layers.10"]}
    found = names(decide(raw, default="fp8_per_tensor"))
    assert found["model.layers.1.mlp.down_proj"] == "int8_per_channel"
    assert "model.layers.10.mlp.down_proj" not in found
    assert found[QKV.format(1)] == "fp8_per_tensor"


@pytest.mark.parametrize(
    "match", ["qkv_proj", "self_attn", r"re:.*\.(q|k|v)_proj$", "model.layers.1.self_attn.qkv_proj"]
)
def test_a_fused_module_goes_by_its_own_name_and_by_its_parts(match: str) -> None:
    assert names(decide({"rules": [rule(match)]}))[QKV.format(1)] == "int8_per_channel"


def test_parts_that_are_named_one_by_one_are_one_module_when_they_agree() -> None:
    raw = {"rules": [rule("q_proj"), rule("v_proj"), rule("k_proj")]}
    assert set(names(decide(raw))) == {QKV.format(1), QKV.format(10)}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"rules": [rule("q_proj")]},
            (
                "qkv_proj is one weight: q_proj would be int8_per_channel (rule 'q_proj'), but "
                "k_proj would be none (no rule); give all its parts the same scheme (and 1 more weights)"
            ),
        ),
        (
            {"rules": [rule("qkv_proj")], "ignore": ["model.layers.10.self_attn.v_proj"]},
            (
                "layers.10.self_attn.qkv_proj is one weight: q_proj would be int8_per_channel (rule 'qkv_proj'), but "
                "v_proj would be none (ignored by 'model.layers.10.self_attn.v_proj')"
            ),
        ),
    ],
)
def test_a_fused_module_that_is_torn_apart_is_one_clear_line(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(QuantError) as caught:
        decide(raw)
    assert words in str(caught.value)


def test_percentiles_tell_schemes_apart() -> None:
    with pytest.raises(QuantError, match="is one weight"):
        decide({"rules": [rule("q_proj", percentile=99), rule("qkv_proj")]})
    policy = decide({"rules": [rule("down_proj", percentile=99.5)]})
    scheme = policy.scheme_for("linear", "model.layers.1.mlp.down_proj.weight")
    assert scheme == type(scheme)(percentile=99.5)  # type: ignore[call-arg]


def test_routers_and_the_head_are_quantized_only_by_a_rule_that_names_them() -> None:
    assert set(names(decide({"rules": [rule("mlp.gate"), rule("lm_head")]}))) == {"model.layers.1.mlp.gate", "lm_head"}
    assert "lm_head" not in names(decide({"rules": [rule("Linear")]}))
    assert QKV.format(1) in names(decide({"rules": [rule("Linear")]}))


def test_patterns_that_name_nothing_are_told() -> None:
    raw = {"rules": [rule("gate_proj"), rule("down_proj"), rule("layers.1.mlp")], "ignore": ["lm_head", "norm"]}
    assert decide(raw).unmatched == ("norm", "gate_proj")


def test_what_no_module_is_stays_wide() -> None:
    assert decide({}, default="fp8_per_block").scheme_for("norm", "model.norm.weight") == Wide()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"targets": []}, "the configuration has 'targets', which is not known; known are default, rules, ignore"),
        ({"rules": {}}, "rules is '{}': a list is needed"),
        ({"rules": "q_proj"}, "rules is 'q_proj': a list is needed"),
        ({"ignore": "q_proj"}, "ignore is 'q_proj': a list is needed"),
        ({"rules": ["q_proj"]}, "rules[0] is 'q_proj': an object with"),
        ({"rules": [rule("a"), {"match": "b"}]}, "rules[1] has no 'scheme'"),
        ({"rules": [{"scheme": "none"}]}, "rules[0] has no 'match'"),
        (
            {"rules": [rule("a", bits=4)]},
            "rules[0] has 'bits', which is not known; known are match, scheme, percentile",
        ),
        ({"rules": [rule("a", "fp9")]}, "rules[0].scheme: quantization 'fp9' is not known"),
        ({"rules": [{"match": "a", "scheme": 8}]}, "rules[0].scheme is '8': a scheme's name is needed"),
        ({"rules": [{"match": 1, "scheme": "none"}]}, "rules[0].match is '1': a pattern of module names is needed"),
        ({"rules": [rule("re:(")]}, "rules[0].match: pattern 're:(': is no regular expression"),
        ({"rules": [rule("a", "none", percentile=99)]}, "rules[0] ('a'): quantization 'none' takes no percentile"),
        ({"rules": [rule("a", percentile=0)]}, "rules[0] ('a'): percentile 0: a number above 0"),
        ({"ignore": [None]}, "ignore[0] is 'None': a pattern of module names is needed"),
        ({"ignore": [""]}, "ignore[0]: pattern '': names nothing"),
        ({"default": "fp9"}, "default: quantization 'fp9' is not known"),
        ({"default": True}, "default is 'True': a scheme's name is needed"),
    ],
)
def test_what_a_configuration_may_not_say(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(QuantError) as caught:
        parse_quantization_config(raw)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
