"""One layer alone, its faults, and the words that the debug log has for every item."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from quant.registry import scheme_names
from streaming.errors import LayerLoadError, OptionError
from streaming.llm import LLM
from streaming.one_layer import load_one_layer, only_layer
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.streaming.resident import resident_model, same_bits


@pytest.mark.parametrize("quantization", scheme_names())
def test_a_layer_alone_is_that_layer_of_the_whole_model(four_layers: Path, quantization: str) -> None:
    found = LLM.load_layer(four_layers, 2, quantization=quantization)
    expected = {
        name: tensor
        for name, tensor in resident_model(four_layers, quantization=quantization).named_parameters()
        if name.startswith("model.layers.2.")
    }
    assert found.keys() == expected.keys()
    assert all(same_bits(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", ["head", "embed"])
def test_head_and_table_can_be_loaded_alone(four_layers: Path, name: str) -> None:
    expected = dict(resident_model(four_layers).named_parameters())
    found = LLM.load_layer(four_layers, name)
    assert set(found) == {"head": {"model.norm.weight", "lm_head.weight"}, "embed": {"model.embed_tokens.weight"}}[name]
    assert all(same_bits(tensor, expected[name]) for name, tensor in found.items())


def test_no_byte_of_another_layer_is_read(four_layers: Path) -> None:
    whole = prepare(str(four_layers), LoadOptions(quantization="fp8_per_tensor"))
    one = only_layer(whole, 1)
    layer = next(layer for layer in whole.plan.layers if layer.name == "layers.1")
    wanted = {(item.tensor.file, item.file_offset, item.nbytes) for item in layer.items}
    taken = {(one.read_plan.files[p.file], p.file_offset, p.nbytes) for p in one.read_plan.pieces}
    assert taken == wanted
    assert one.plan.kept_nbytes == layer.kept_nbytes


def test_a_layer_that_is_not_there_is_named_with_those_that_are(four_layers: Path) -> None:
    with pytest.raises(OptionError, match=r"layer 9 is not one of layers.0, .*, head, embed"):
        LLM.load_layer(four_layers, 9)


def test_a_fault_names_layer_stage_and_tensor(four_layers: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(four_layers, tmp_path / "model"))
    prepared = prepare(str(folder), LoadOptions())
    layer = next(layer for layer in prepared.plan.layers if layer.name == "layers.3")
    os.truncate(layer.items[0].tensor.file, layer.items[0].tensor.offset)  # type: ignore[arg-type]
    with pytest.raises(LayerLoadError, match=r"layer layers.3, stage read, tensor .*(shrank|was changed)"):
        load_one_layer(prepared, 3)


def test_the_debug_log_names_tensor_target_part_and_rank_slice(
    four_layers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="streaming.item_words"):
        LLM.load_layer(four_layers, 0, quantization="fp8_per_tensor")
    lines = [record.getMessage() for record in caplog.records if record.name == "streaming.item_words"]
    assert len(lines) == 9
    assert (
        "layers.0: model.layers.0.self_attn.k_proj.weight BF16 [32, 64] -> model.layers.0.self_attn.qkv_proj.weight "
        "[fp8_per_tensor] part 'k', rows 0 to 32 (rank 0 of 1)"
    ) in lines
    assert (
        "layers.0: model.layers.0.input_layernorm.weight BF16 [64] -> model.layers.0.input_layernorm.weight [none], "
        "rows 0 to 64 (rank 0 of 1)"
    ) in lines


def test_the_summary_splits_the_time_and_counts_what_was_quantized(four_layers: Path) -> None:
    with LLM(four_layers, quantization="fp8_per_channel") as llm:
        llm.logits([1, 2])
        llm.wait_loaded()
        stats = llm.stats()
    assert {"import", "shell", "read", "slice", "quantize", "forward"} <= set(stats.stages)
    assert stats.layers_by_scheme == {"none": 2, "fp8_per_channel": 4}
    assert 0 < stats.quantize_s <= stats.stages["quantize"]
