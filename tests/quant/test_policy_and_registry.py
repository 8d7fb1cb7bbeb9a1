"""Schemes by name, the policy that gives each parameter its scheme, and what importing the package costs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import quant
from quant.errors import QuantError
from quant.policy import QuantPolicy, Rule, default_policy
from quant.registry import scheme_by_name, scheme_names

FP8 = scheme_by_name("fp8_per_channel")


def test_the_names_of_the_command_line() -> None:
    known = ("none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel")
    assert set(known) <= set(scheme_names())
    assert [scheme_by_name(name).name for name in known] == list(known)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(QuantError, match=r"'fp7'.*none, fp8_per_tensor, fp8_per_channel, fp8_per_block, int8"):
        scheme_by_name("fp7")


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("linear", "model.layers.0.self_attn.qkv_proj.weight", "fp8_per_channel"),
        ("linear", "model.layers.0.mlp.gate_up_proj.weight", "fp8_per_channel"),
        ("linear", "model.layers.0.mlp.gate_proj.weight", "fp8_per_channel"),
        ("linear", "model.layers.0.mlp.gate.weight", "none"),
        ("linear", "model.layers.0.mlp.router.weight", "none"),
        ("norm", "model.norm.weight", "none"),
        ("embedding", "model.embed_tokens.weight", "none"),
        ("bias", "model.layers.0.self_attn.qkv_proj.bias", "none"),
        ("head", "lm_head.weight", "none"),
    ],
)
def test_the_default_policy(kind: str, name: str, expected: str) -> None:
    assert default_policy(FP8).scheme_for(kind, name).name == expected


def test_the_head_is_quantized_when_that_is_asked_for() -> None:
    policy = default_policy(FP8, quantize_head=True)
    assert policy.scheme_for("head", "lm_head.weight").name == "fp8_per_channel"
    assert policy.scheme_for("embedding", "model.embed_tokens.weight").name == "none"


def test_the_first_rule_that_matches_wins() -> None:
    def rule(pattern: str, scheme: str) -> Rule:
        return Rule(frozenset({"linear"}), re.compile(pattern), scheme_by_name(scheme))

    policy = QuantPolicy((rule("down_proj", "int8_per_channel"), rule("proj", "fp8_per_block")))
    assert policy.scheme_for("linear", "layers.0.down_proj.weight").name == "int8_per_channel"
    assert policy.scheme_for("linear", "layers.0.up_proj.weight").name == "fp8_per_block"
    assert policy.scheme_for("linear", "layers.0.other.weight").name == "none"


def test_every_public_name_is_there() -> None:
    assert sorted(quant.__all__) == dir(quant)
    for name in quant.__all__:
        assert getattr(quant, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = quant.nothing


def test_schemes_policies_and_storage_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import quant\n"
        "from quant.dtypes import DType\n"
        "from quant.policy import default_policy\n"
        "from quant.registry import scheme_by_name, scheme_names\n"
        "for name in scheme_names():\n"
        "    default_policy(scheme_by_name(name)).scheme_for('linear', 'a.weight')\n"
        "    scheme_by_name(name).storage((3, 4), 5, wide=DType.BF16)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
