"""One scale for the parts of a fused weight: literal numbers."""

from __future__ import annotations

import torch

from quant.joint_scale import joint_scale, requantize_to_joint


def _codes(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).to(torch.float8_e4m3fn)


def test_parts_with_a_smaller_scale_are_quantized_again() -> None:
    # Under 0.5 the first part holds 224, -1 and 0.25; under 2: 112, -0.5, 0.125. The second part keeps its codes.
    weight = _codes([448.0, -2.0, 0.5], [448.0, -3.5, 0.001953125])
    joint = requantize_to_joint(weight, torch.tensor([0.5, 2.0]), (1, 1))
    assert joint.tolist() == [2.0]
    assert weight.float().tolist() == [[112.0, -0.5, 0.125], [448.0, -3.5, 0.001953125]]


def test_a_code_that_falls_between_two_is_rounded_to_the_even_one() -> None:
    weight = _codes([1.125], [1.0])  # 1.125 * 3 / 4 = 0.84375, between 0.8125 and 0.875: the even mantissa is 0.875's
    assert requantize_to_joint(weight, torch.tensor([3.0, 4.0]), (1, 1)).tolist() == [4.0]
    assert weight.float().tolist() == [[0.875], [1.0]]


def test_equal_scales_leave_every_byte_alone() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(4, 64)
    before = weight.view(torch.uint8).clone()
    assert requantize_to_joint(weight, torch.tensor([0.3, 0.3, 0.3]), (1, 2, 1)).tolist() == [torch.tensor(0.3).item()]
    assert torch.equal(weight.view(torch.uint8), before)


def test_the_maximum_alone_would_be_wrong() -> None:
    weight = _codes([2.0], [2.0])
    scales = torch.tensor([0.25, 1.0])
    joint = requantize_to_joint(weight, scales, (1, 1))
    assert (weight.float() * joint).tolist() == [[0.5], [2.0]]


def test_static_input_scales_become_the_largest() -> None:
    assert joint_scale(torch.tensor([0.5, 3.0, 2.0])).tolist() == [3.0]
    assert bool(joint_scale(torch.tensor([0.5, float("nan")])).isnan().all())
