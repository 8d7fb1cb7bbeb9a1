"""e4m3fn to e4m3fnuz, over every code, against what torch makes of both types."""

from __future__ import annotations

import math

import pytest
import torch

from quant.errors import QuantError
from quant.fnuz import double_scale, stored_to_fnuz, weight_to_fnuz


def _codes() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("scale", [1.0, 0.0123, 2.0**-40])
def test_every_code_times_its_doubled_scale_is_what_it_was(scale: float) -> None:
    before = _codes().float() * scale
    stored = {"weight": _codes().view(16, 16), "weight_scale": torch.tensor([scale])}
    found = stored_to_fnuz(stored, scales=("weight_scale",))
    assert found["weight"].dtype == torch.float8_e4m3fnuz
    assert found["weight_scale"].tolist() == [2 * torch.tensor(scale).item()]
    after = (found["weight"].float() * found["weight_scale"]).view(256)
    assert torch.equal(after.nan_to_num(nan=-1e9), before.nan_to_num(nan=-1e9))


def test_the_codes_that_mean_something_else_are_rewritten_and_no_others() -> None:
    after = weight_to_fnuz(_codes()).view(torch.uint8).tolist()
    assert after == [{0x80: 0x00, 0x7F: 0x80, 0xFF: 0x80}.get(code, code) for code in range(256)]


def test_codes_are_torchs_cast_of_half_the_number() -> None:
    half = (_codes().float() / 2).to(torch.float8_e4m3fnuz).view(torch.uint8)
    assert torch.equal(weight_to_fnuz(_codes()).view(torch.uint8), half)


def test_the_weights_memory_is_used_again() -> None:
    weight = _codes().repeat(3).view(3, 256)
    found = weight_to_fnuz(weight)
    assert found.data_ptr() == weight.data_ptr()
    assert found.shape == (3, 256)


def test_nothing_is_converted_twice() -> None:
    once = weight_to_fnuz(_codes())
    with pytest.raises(QuantError, match="made of float8_e4m3fn, not of float8_e4m3fnuz"):
        weight_to_fnuz(once)


def test_input_and_cache_scales_double_where_they_are_named() -> None:
    stored = {"weight": _codes(), "input_scale": torch.tensor(0.5), "k_scale": torch.tensor(3.0), "g": torch.ones(1)}
    found = stored_to_fnuz(stored, scales=("input_scale", "k_scale"))
    assert {name: found[name].item() for name in ("input_scale", "k_scale", "g")} == {
        "input_scale": 1.0,
        "k_scale": 6.0,
        "g": 1.0,
    }


def test_a_missing_scale_is_named_and_nothing_is_touched() -> None:
    stored = {"weight": _codes()}
    with pytest.raises(QuantError, match="no scale weight_scale to double for e4m3fnuz: there is weight"):
        stored_to_fnuz(stored, scales=("weight_scale",))
    assert torch.equal(stored["weight"].view(torch.uint8), torch.arange(256, dtype=torch.uint8))


def test_every_e8m0_scale_doubles() -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    doubled = double_scale(scale.clone()).float().tolist()
    for code, number in enumerate(doubled):
        expected = math.ldexp(1.0, code - 126) if code < 254 else math.nan
        assert number == expected or (math.isnan(number) and math.isnan(expected)), code
