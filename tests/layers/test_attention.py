"""Attention against its formula in float64, and the steps around it: norms, rotation, the gated MLP."""

from __future__ import annotations

from math import cos, pi, sin, sqrt

import pytest
import torch

from layers.attention import attend
from layers.batch import make_batch
from layers.causal_mask import causal_mask
from layers.mlp import ACTIVATIONS, LARGEST_UNCUT, activated, gated
from layers.model_config import NormKind, RopeConfig, RopeKind
from layers.norm import RMSNorm
from layers.rotary import Rope, RotaryEmbedding, inverse_frequencies
from layers.weights import ParamKind, ParamSpec, Section
from quant.dtypes import DType
from quant.wide import Wide
from tests.layers.tiny import config_of, new_cache


def by_formula(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """One query at a time, over the keys that it may see."""
    heads, count, width = q.shape
    groups, length, _ = keys.shape
    out = torch.empty(heads, count, width, dtype=torch.float64)
    for head in range(heads):
        k, v = keys[head * groups // heads].double(), values[head * groups // heads].double()
        for row in range(count):
            place = length - count + row
            seen = slice(max(0, place + 1 - window) if window else 0, place + 1)
            scores = (k[seen] @ q[head, row].double()) / sqrt(width)
            out[head, row] = scores.softmax(0) @ v[seen]
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 13), (2, 13), (13, 13), (5, 40), (40, 40)])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (3, 3), (4, 1)])
def test_attention_is_its_formula(heads: int, groups: int, count: int, length: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(heads, count, 10, generator=generator) * 2
    keys, values = torch.randn(2, groups, length + 3, 10, generator=generator)[:, :, :length]  # as a cache gives them
    wanted = by_formula(q, keys, values, window)
    torch.testing.assert_close(attend(q, keys, values, window=window).double(), wanted, rtol=1e-5, atol=2e-6)


def test_a_mask_of_the_last_rows_is_the_end_of_the_whole_mask() -> None:
    whole = causal_mask(7, 7, window=3, device=torch.device("cpu"))
    assert whole.int().tolist()[4] == [0, 0, 1, 1, 1, 0, 0]
    assert torch.equal(causal_mask(2, 7, window=3, device=torch.device("cpu")), whole[5:])
    assert causal_mask(3, 3, window=None, device=torch.device("cpu")).int().tolist() == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "count", "length", "window"),
    [(9, 3, 64, 1, 613, None), (14, 2, 64, 201, 201, None), (7, 7, 20, 67, 311, None), (8, 2, 96, 130, 331, 77)],
)
def test_bits_of_attention_do_not_depend_on_the_number_of_threads(
    heads: int, groups: int, width: int, count: int, length: int, window: int | None, dtype: torch.dtype
) -> None:
    q = torch.randn(heads, count, width).to(dtype)
    keys, values = torch.randn(2, groups, length, width).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(attend(q, keys, values, window=window))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


# --- rotation


def plain_rope(**changes: object) -> RopeConfig:
    return RopeConfig(**{"kind": RopeKind.DEFAULT, "theta": 100.0, "dim": 4, "max_position_embeddings": 16, **changes})  # type: ignore[arg-type]


def test_frequencies_by_hand() -> None:
    assert inverse_frequencies(plain_rope(), length=1).tolist() == pytest.approx([1.0, 0.1])
    linear = plain_rope(kind=RopeKind.LINEAR, factor=4.0)
    assert inverse_frequencies(linear, length=1).tolist() == pytest.approx([0.25, 0.025])
    dynamic = plain_rope(kind=RopeKind.DYNAMIC, factor=2.0)
    assert inverse_frequencies(dynamic, length=16).tolist() == pytest.approx([1.0, 0.1])
    # twice the trained length: the base grows to 100 * (2 * 2 - 1)^(4 / 2) = 900
    assert inverse_frequencies(dynamic, length=32).tolist() == pytest.approx([1.0, 1 / 30])
    long = plain_rope(
        kind=RopeKind.LONGROPE, short_factor=(1.0, 2.0), long_factor=(4.0, 5.0), original_max_position_embeddings=8
    )
    assert inverse_frequencies(long, length=8).tolist() == pytest.approx([1.0, 0.05])
    assert inverse_frequencies(long, length=9).tolist() == pytest.approx([0.25, 0.02])
    # wavelengths 2 pi and 20 pi; below 16/4 kept, above 16/1 divided by the factor, between on a ramp
    llama3 = plain_rope(kind=RopeKind.LLAMA3, factor=8.0, original_max_position_embeddings=16)
    smooth = (16 / (2 * pi) - 1) / 3
    assert inverse_frequencies(llama3, length=1).tolist() == pytest.approx([(1 - smooth) / 8 + smooth, 0.1 / 8])


def test_pairs_of_a_head_turn_by_position_times_frequency() -> None:
    config = config_of(head_dim=4, num_attention_heads=1, num_key_value_heads=1)
    cache = new_cache(config, max_tokens=9)
    cache.advance(5)
    batch = make_batch([([1, 2], cache)], vocab_size=101)  # positions 5 and 6
    rope = RotaryEmbedding(plain_rope())(batch, dtype=torch.float32)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]])
    for row, position in enumerate((5, 6)):
        fast, slow = position * 1.0, position * 0.1
        wanted = [
            cos(fast) * 1 - sin(fast) * 3, cos(slow) * 2 - sin(slow) * 4,
            cos(fast) * 3 + sin(fast) * 1, cos(slow) * 4 + sin(slow) * 2,
        ]  # fmt: skip
        assert rope.rotate(x)[row, 0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_head_that_is_partly_rotated_keeps_its_rest() -> None:
    rope = Rope(torch.zeros(3, 4), torch.ones(3, 4))
    x = torch.arange(18.0).reshape(3, 1, 6)
    assert rope.rotate(x)[1, 0].tolist() == [-8, -9, 6, 7, 10, 11]


def test_interleaved_pairs_lie_side_by_side() -> None:
    config = config_of(head_dim=6, num_attention_heads=1, num_key_value_heads=1)
    cache = new_cache(config, max_tokens=9)
    cache.advance(5)
    batch = make_batch([([1], cache)], vocab_size=101)  # position 5
    rope = RotaryEmbedding(plain_rope(interleaved=True))(batch, dtype=torch.float32)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 7.0, 8.0]]])
    fast, slow = 5 * 1.0, 5 * 0.1
    wanted = [
        cos(fast) * 1 - sin(fast) * 2, cos(fast) * 2 + sin(fast) * 1,
        cos(slow) * 3 - sin(slow) * 4, cos(slow) * 4 + sin(slow) * 3, 7.0, 8.0,
    ]  # fmt: skip
    assert rope.rotate(x)[0, 0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_angles_are_scaled_rounded_once_and_each_sequence_is_as_long_as_itself() -> None:
    config = config_of()
    long = plain_rope(
        kind=RopeKind.LONGROPE, short_factor=(1.0, 2.0), long_factor=(4.0, 5.0), original_max_position_embeddings=2,
        attention_factor=1.5,
    )  # fmt: skip
    caches = [new_cache(config, max_tokens=3) for _ in range(2)]
    batch = make_batch([([1, 1], caches[0]), ([1, 1, 1], caches[1])], vocab_size=101)
    rope = RotaryEmbedding(long)(batch, dtype=torch.bfloat16)
    wanted = torch.tensor([1.0, 0.05]).cos() * 1.5, torch.tensor([0.25, 0.02]).cos() * 1.5
    assert rope.cos.shape == (5, 4)
    assert torch.equal(rope.cos[1], torch.cat((wanted[0], wanted[0])).bfloat16())  # a sequence of two tokens
    assert torch.equal(rope.cos[3], torch.cat((wanted[1], wanted[1])).bfloat16())  # one of three


# --- norm and MLP


def norm_of(weight: torch.Tensor, dtype: DType, kind: NormKind = NormKind.RMS) -> RMSNorm:
    spec = ParamSpec("n.weight", (len(weight),), (Section("", len(weight)),), ParamKind.NORM, dtype, Wide())
    norm = RMSNorm(spec, eps=0.5, kind=kind)
    norm.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    return norm


def test_the_norm_by_hand() -> None:
    norm = norm_of(torch.tensor([1.0, 10.0]), DType.F32)
    found = norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    assert found[0].tolist() == pytest.approx([3 / sqrt(12.5 + 0.5), 40 / sqrt(12.5 + 0.5)])
    assert found[1].tolist() == [0.0, 0.0]


def test_the_norm_of_half_precision_sums_in_float32_and_rounds_before_the_weight() -> None:
    x = (torch.randn(3, 2000) * 300).half()  # squares overflow half precision
    weight = torch.randn(2000).half()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 0.5).sqrt()
    wanted = weight * exact.half()
    torch.testing.assert_close(norm_of(weight, DType.F16)(x), wanted, rtol=2e-3, atol=0)


def test_where_the_kinds_of_norm_round() -> None:
    x, weight = (torch.randn(2, 50, generator=torch.Generator().manual_seed(6)) * 3).bfloat16()
    exact = x.float() / (x.float().square().mean() + 0.5).sqrt()
    plus_one = norm_of(weight, DType.BF16, NormKind.RMS_PLUS_ONE)(x)
    late = norm_of(weight, DType.BF16, NormKind.RMS_FLOAT32)(x)
    early = norm_of(weight, DType.BF16)(x)
    torch.testing.assert_close(plus_one, (exact * (1 + weight.float())).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(late, (exact * weight.float()).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(early, exact.bfloat16() * weight, rtol=0, atol=0)
    assert not torch.equal(early, late)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width"), [(300, 1003), (2, 40_001)])
@pytest.mark.parametrize("name", ["gelu_new", "gelu", "silu"])
def test_bits_of_a_plain_activation_do_not_depend_on_the_number_of_threads(
    name: str, count: int, width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(count, width).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(activated(x, activation=ACTIVATIONS[name]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0], ACTIVATIONS[name](x), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width"), [(173, 1003), (96, 1536), (31, 8192), (2, 40_001)])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_bits_of_the_gate_do_not_depend_on_the_number_of_threads(
    name: str, count: int, width: int, dtype: torch.dtype
) -> None:
    gate, up = torch.split(torch.randn(count, 2 * width).to(dtype), width, dim=1)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(gated(gate, up, activation=ACTIVATIONS[name]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("count", "width"), [(1, 5), (3, LARGEST_UNCUT - 1), (7, 5000), (2, 3 * LARGEST_UNCUT + 7)])
def test_the_gate_in_pieces_is_the_gate_at_once(count: int, width: int) -> None:
    gate, up = torch.split(torch.randn(count, 2 * width), width, dim=1)
    exact = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    got = gated(gate, up, activation=torch.nn.functional.silu)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
