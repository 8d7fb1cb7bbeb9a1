"""Two numbers to a byte and an odd number of inputs: the last byte's other half is nothing, everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.weights import ParamKind, ParamSpec, Section
from quant.dtypes import DType, to_torch
from quant.int4 import IntPerGroup
from quant.registry import scheme_by_name
from quant.requantize import requantize
from quant.scheme import Scheme
from streaming import LLM
from streaming.quality_measures import weight_noise
from tests.streaming.resident import resident_model, run_resident, same_bits

IDS = [3, 1, 4, 1, 5, 9]
ODD = 101
NIBBLES = ("int4_per_group", "int4_per_group:64:asym", "mxfp4", "nvfp4")
SCHEMES = [*map(scheme_by_name, NIBBLES), IntPerGroup(ordered=True), scheme_by_name("mxfp8")]


def stored_of(scheme: Scheme, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    stored = {
        name: torch.empty(spec.shape, dtype=to_torch(spec.dtype))
        for name, spec in scheme.storage((rows,), columns, wide=DType.F32).items()
    }
    scheme.quantize_into(weight, scheme.section_views(stored, (rows,), 0))
    return stored


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", NIBBLES)
def test_streamed_equals_eager_and_is_near_the_wide_model(
    tiny_folder: Callable[[TinyModel], Path], quantization: str, dtype: str
) -> None:
    folder = tiny_folder(TinyModel(layers=2, intermediate_size=ODD))  # down_proj has 101 inputs
    expected = run_resident(resident_model(folder, quantization=quantization, dtype=dtype), IDS, dtype=dtype).logits
    wide = run_resident(resident_model(folder, dtype=dtype), IDS, dtype=dtype).logits
    with LLM(folder, quantization=quantization, dtype=dtype) as llm:
        assert same_bits(llm.logits(IDS), expected)
    assert 1 - torch.cosine_similarity(expected.double(), wide.double(), dim=-1).min() < 0.1


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_stored_weight_comes_back_as_wide_as_it_was(scheme: Scheme) -> None:
    """And is what it would be before one more column of zeros."""
    weight = torch.randn(64, ODD, generator=torch.Generator().manual_seed(1))
    wide = scheme.dequantize(stored_of(scheme, weight), (64,), dtype=torch.float32, in_features=ODD)
    assert wide.shape == (64, ODD)
    assert (wide - weight).square().mean() < 0.02 * weight.square().mean()
    padded = torch.cat([weight, torch.zeros(64, 1)], dim=1)
    even = scheme.dequantize(stored_of(scheme, padded), (64,), dtype=torch.float32, in_features=ODD + 1)
    assert torch.equal(even[:, :ODD], wide)


@pytest.mark.parametrize("target", ["fp8_per_channel", "fp8_per_tensor", "mxfp4", "int4_per_group"])
@pytest.mark.parametrize("source", SCHEMES, ids=lambda scheme: scheme.name)
def test_from_one_form_to_another_by_way_of_the_numbers_that_are_there(source: Scheme, target: str) -> None:
    weight = torch.randn(48, ODD, generator=torch.Generator().manual_seed(2))
    held, into = stored_of(source, weight), scheme_by_name(target)
    out = {name: torch.zeros_like(tensor) for name, tensor in stored_of(into, weight[:40]).items()}
    requantize(source, held, into, out, first=8, rows=40, total=48, in_features=ODD, dtype=torch.float32)
    wide = source.dequantize(held, (48,), dtype=torch.float32)[8:, :ODD]
    expected = stored_of(into, wide)
    assert all(same_bits(out[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", NIBBLES)
def test_the_noise_of_weights_is_that_of_their_own_numbers(name: str) -> None:
    scheme, rows = scheme_by_name(name), 1030  # longer than a strip
    weight = torch.randn(rows, ODD, generator=torch.Generator().manual_seed(3))
    param = ParamSpec("m.weight", (rows, ODD), (Section("", rows),), ParamKind.LINEAR, DType.F32, scheme)
    noise = weight_noise(param, stored_of(scheme, weight), weight)
    assert noise.count == rows * ODD
    assert 0 < noise.noise < 0.02 * noise.signal
