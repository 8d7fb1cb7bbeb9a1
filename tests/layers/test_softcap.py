"""Capped scores against their formula in float64, in pieces of any size and with any number of threads."""

from __future__ import annotations

from math import tanh

import pytest
import torch

from layers import scored_attention
from layers.softcap import attend_capped, soft_cap
from quant.kernels import Kernels
from streaming.panel_pool import PanelPool

CAP, SCALE = 1.5, 0.4
KERNELS = Kernels.detect()


def by_formula(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """One query at a time, over the keys that it may see."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        k, v = (part[head * part.shape[0] // q.shape[0]].double() for part in (keys, values))
        for row in range(q.shape[1]):
            place = keys.shape[1] - q.shape[1] + row
            seen = slice(max(0, place + 1 - window) if window else 0, place + 1)
            scores = CAP * torch.tanh((k[seen] @ q[head, row].double()) * SCALE / CAP)
            out[head, row] = scores.softmax(0) @ v[seen]
    return out


@pytest.mark.parametrize("scores", [1, 70, 1 << 20])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 13), (2, 13), (13, 13), (5, 40)])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (3, 3), (4, 1)])
def test_capped_attention_is_its_formula(
    heads: int, groups: int, count: int, length: int, window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_attention, "SCORES", scores)
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(heads, count, 10, generator=generator) * 2
    keys, values = torch.randn(2, groups, length + 3, 10, generator=generator)[:, :, :length]  # as a cache gives them
    found = attend_capped(q, keys, values, window=window, scale=SCALE, cap=CAP, kernels=KERNELS)
    torch.testing.assert_close(found.double(), by_formula(q, keys, values, window), rtol=1e-5, atol=2e-6)


def test_without_a_scale_it_is_that_of_the_width_and_half_precision_comes_back_as_it_came() -> None:
    q, keys, values = torch.randn(3, 2, 7, 16).bfloat16()
    found = attend_capped(q, keys, values, window=None, scale=None, cap=CAP, kernels=KERNELS)
    same = attend_capped(q, keys, values, window=None, scale=0.25, cap=CAP, kernels=KERNELS)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, same)


@pytest.mark.usefixtures("same_threads_afterwards")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "length", "window"), [(1, 1613, None), (201, 201, None), (67, 311, 90)])
def test_bits_of_capped_attention_do_not_depend_on_the_number_of_threads(
    count: int, length: int, window: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(count)
    q = torch.randn(8, count, 40, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, length, 40, generator=generator).to(dtype)
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        pool = PanelPool(threads)
        kernels = Kernels.detect(run=pool)
        found.append(attend_capped(q, keys, values, window=window, scale=SCALE, cap=CAP, kernels=kernels))
        pool.close()
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.usefixtures("same_threads_afterwards")
@pytest.mark.parametrize("shape", [(1, 256_003), (9, 40_001), (300, 77)])
def test_bits_of_capped_logits_do_not_depend_on_the_number_of_threads(shape: tuple[int, int]) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 40
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.append(soft_cap(logits.clone(), cap=30.0))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert found[0][-1, -1].item() == pytest.approx(30 * tanh(logits[-1, -1].item() / 30), rel=1e-5)
