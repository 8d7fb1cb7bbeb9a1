"""--quantization-config and --scale-percentile on whole models: what is kept in which scheme, and every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.write_tiny_model import TinyModel, write_tiny_model
from layers.weights import ParamKind
from quant.float8 import Fp8PerChannel
from quant.int8 import Int8PerChannel
from quant.percentile import with_percentile
from quant.registry import scheme_by_name
from quant.scheme import Scheme
from quant.wide import Wide
from streaming.errors import OptionError
from streaming.llm import LLM
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from tests.layers.tiny import OneScheme
from tests.streaming.resident import resident_model, run_resident, same_bits


def kept(prepared: Prepared) -> dict[str, str]:
    """Module -> scheme, of all that could be quantized."""
    kinds = (ParamKind.LINEAR, ParamKind.HEAD)
    params = [param for spec in prepared.specs for param in spec.params if param.kind in kinds]
    return {param.name.removesuffix(".weight"): param.scheme.name for param in params}


def refusal(**options: Any) -> str:
    with pytest.raises(OptionError) as caught:
        LoadOptions(**options)
    return str(caught.value)


MIXED = {
    "default": "fp8_per_channel",
    "rules": [{"match": "mlp.down_proj", "scheme": "int8_per_channel", "percentile": 99}],
    "ignore": ["model.layers.1"],
}


def test_each_module_is_kept_as_its_rule_says(four_layers: Path) -> None:
    found = kept(prepare(str(four_layers), LoadOptions(quantization_config=MIXED)))
    for layer in (0, 2, 3):
        assert found[f"model.layers.{layer}.self_attn.qkv_proj"] == "fp8_per_channel"
        assert found[f"model.layers.{layer}.mlp.down_proj"] == "int8_per_channel"
    assert {scheme for name, scheme in found.items() if ".layers.1." in name} == {"none"}
    assert found["lm_head"] == "none"


def test_json_text_a_file_and_a_mapping_say_the_same(four_layers: Path, tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(MIXED), encoding="utf-8")
    ways = (MIXED, json.dumps(MIXED), f"\n {json.dumps(MIXED)}", str(path))
    plans = [kept(prepare(str(four_layers), LoadOptions(quantization_config=way))) for way in ways]
    assert all(plan == plans[0] for plan in plans)


def test_the_option_is_the_default_of_rules_without_one(four_layers: Path) -> None:
    rules = {"rules": [{"match": "down_proj", "scheme": "none"}]}
    options = LoadOptions(quantization="fp8_per_block", quantize_head=True, quantization_config=rules)
    found = kept(prepare(str(four_layers), options))
    assert found["model.layers.0.mlp.down_proj"] == "none"
    assert found["model.layers.0.self_attn.o_proj"] == found["lm_head"] == "fp8_per_block"
    assert options.quantization_words == "fp8_per_block with rules"


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize(
    "name", ["gate_up_proj", "model.layers.0.mlp.gate_up_proj", "language_model.model.layers.0.mlp"]
)
def test_fused_names_and_wrapped_ones_are_known(family: str, name: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(family=family))
    rules = {"rules": [{"match": name, "scheme": "int8_per_channel"}]}
    found = kept(prepare(str(folder), LoadOptions(quantization_config=rules)))
    assert found["model.layers.0.mlp.gate_up_proj"] == "int8_per_channel"
    assert found["model.layers.0.self_attn.qkv_proj"] == "none"


def test_a_tied_head_is_quantized_by_its_name(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(tied=True))
    rules = {"rules": [{"match": "lm_head", "scheme": "int8_per_channel"}]}
    prepared = prepare(str(folder), LoadOptions(quantization_config=rules))
    assert kept(prepared)["lm_head"] == "int8_per_channel"
    assert not prepared.warnings


def test_a_pattern_that_names_nothing_is_a_warning(four_layers: Path) -> None:
    rules = {"rules": [{"match": "mlp.gate", "scheme": "none"}], "ignore": ["lm_head", "model.layers.40"]}
    prepared = prepare(str(four_layers), LoadOptions(quantization="fp8_per_tensor", quantization_config=rules))
    assert prepared.warnings == (
        "--quantization-config: 'model.layers.40' names no weight of this model that could be quantized",
        "--quantization-config: 'mlp.gate' names no weight of this model that could be quantized",
    )


def test_a_fused_weight_that_is_torn_apart_is_refused(four_layers: Path) -> None:
    rules = {"rules": [{"match": "q_proj", "scheme": "int8_per_channel"}]}
    with pytest.raises(OptionError, match=r"^--quantization-config: .*qkv_proj is one weight: q_proj .* but k_proj"):
        prepare(str(four_layers), LoadOptions(quantization_config=rules))


class _Literal:
    """The mixed configuration, written out."""

    def scheme_for(self, kind: str, name: str) -> Scheme:
        if kind != "linear" or ".layers.1." in name:
            return Wide()
        return Int8PerChannel(percentile=99) if "down_proj" in name else Fp8PerChannel()


def test_a_mixed_model_streams_to_the_bits_of_the_resident_one(four_layers: Path) -> None:
    expected = run_resident(resident_model(four_layers, policy=_Literal()), [5, 9, 7])
    with LLM(four_layers, quantization_config=MIXED) as llm:
        assert same_bits(llm.logits([5, 9, 7]), expected.logits)
        llm.wait_loaded()
        # a layer in two schemes counts for both; the embedding and the head are wide layers
        assert llm.stats().layers_by_scheme == {"fp8_per_channel": 3, "int8_per_channel": 3, "none": 3}


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel"])
def test_percentile_scales_stream_to_the_bits_of_the_resident_model(scheme: str, four_layers: Path) -> None:
    policy = OneScheme(with_percentile(scheme_by_name(scheme), 97.5))
    expected = run_resident(resident_model(four_layers, policy=policy), [5, 9, 7])
    with LLM(four_layers, quantization=scheme, scale_percentile=97.5) as llm:
        assert same_bits(llm.logits([5, 9, 7]), expected.logits)
    with LLM(four_layers, quantization=scheme) as llm:
        assert not same_bits(llm.logits([5, 9, 7]), expected.logits)


def test_options_that_do_not_go_together_are_refused(four_layers: Path, tmp_path: Path) -> None:
    assert refusal(quantization="fp8_per_block", quantization_config={"default": "none"}) == (
        "--quantization fp8_per_block and --quantization-config, whose default is none: give one of the two"
    )
    assert refusal(scale_percentile=99.9).startswith("--scale-percentile 99.9: quantization 'none' takes no percentile")
    assert refusal(quantization="fp8_per_block", scale_percentile=0.0) == (
        "--scale-percentile 0.0: percentile 0.0: a number above 0 and at most 100 is needed"
    )
    assert (
        refusal(quantize_head=True, quantization_config={}) == "--quantize-head needs a --quantization other than none"
    )
    assert LoadOptions(quantize_head=True, quantization_config={"default": "fp8_per_block"}).quantize_head


def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_text("[" + " " * (1 << 20) + "]", encoding="utf-8")
    (tmp_path / "latin.json").write_bytes(b"\xff{}")
    for given, words in {
        str(tmp_path / "none.json"): "cannot be read (No such file or directory)",
        str(tmp_path): "cannot be read (Is a directory)",
        str(large): "is larger than 1,048,576 bytes",
        str(tmp_path / "latin.json"): "cannot be read ('utf-8' codec",
        "{": "is not JSON",
        '{"a":' * 100_000: "is not JSON",
        "[1]": "is a list; a JSON object is needed",
        '{"rule": []}': "has 'rule', which is not known",
        "a\0b": "cannot be read (embedded null byte)",
    }.items():
        message = refusal(quantization_config=given)
        assert message.startswith("--quantization-config")
        assert words in message
        assert "\n" not in message


def test_shards_are_saved_with_them_and_loaded_without(four_layers: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    firstlayer = [sys.executable, "-m", "streaming", "save-shards", str(four_layers), "--out", str(out), "--quiet"]
    percentile = ["--quantization", "fp8_per_channel", "--scale-percentile", "90"]
    subprocess.run([*firstlayer, *percentile], check=True, timeout=60)
    with pytest.raises(OptionError, match="--scale-percentile: the shards are read as they were saved"):
        prepare(str(out), LoadOptions(quantization="fp8_per_channel", scale_percentile=90))
    with LLM(out) as saved, LLM(four_layers, quantization="fp8_per_channel", scale_percentile=90) as made:
        assert same_bits(saved.logits([1, 2, 3]), made.logits([1, 2, 3]))
