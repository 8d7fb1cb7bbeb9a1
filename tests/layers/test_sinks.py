"""Attention with sinks against its formula in float64, in pieces of any size and with any number of threads."""

from __future__ import annotations

import pytest
import torch

from layers import scored_attention
from layers.mlp import clamped_gated
from layers.sinks import attend_with_sinks
from quant.kernels import Kernels
from streaming.panel_pool import PanelPool

SCALE = 0.4
KERNELS = Kernels.detect()


def by_formula(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """One query at a time, over the keys that it may see and the sink, whose value is zero."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        k, v = (part[head * part.shape[0] // q.shape[0]].double() for part in (keys, values))
        for row in range(q.shape[1]):
            place = keys.shape[1] - q.shape[1] + row
            seen = slice(max(0, place + 1 - window) if window else 0, place + 1)
            shares = ((k[seen] @ q[head, row].double()) * SCALE).exp()
            out[head, row] = shares @ v[seen] / (shares.sum() + sinks[head].double().exp())
    return out


@pytest.mark.parametrize("scores", [1, 70, 1 << 20])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 13), (2, 13), (13, 13), (5, 40)])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (3, 3), (4, 1)])
def test_attention_with_sinks_is_its_formula(
    heads: int, groups: int, count: int, length: int, window: int | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scored_attention, "SCORES", scores)
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(heads, count, 10, generator=generator) * 2
    keys, values = torch.randn(2, groups, length + 3, 10, generator=generator)[:, :, :length]  # as a cache gives them
    sinks = torch.randn(heads, generator=generator) * 2
    found = attend_with_sinks(q, keys, values, sinks, window=window, scale=SCALE, kernels=KERNELS)
    torch.testing.assert_close(found.double(), by_formula(q, keys, values, sinks, window), rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("same_threads_afterwards")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "length", "window"), [(1, 1613, None), (201, 201, None), (67, 311, 90)])
def test_bits_depend_neither_on_threads_nor_on_the_heads_that_are_computed_together(
    count: int, length: int, window: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(count)
    q = torch.randn(8, count, 40, generator=generator).to(dtype)
    keys, values = torch.randn(2, 2, length, 40, generator=generator).to(dtype)
    sinks = torch.randn(8, generator=generator).to(dtype)
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        pool = PanelPool(threads)
        kernels = Kernels.detect(run=pool)
        found.append(attend_with_sinks(q, keys, values, sinks, window=window, scale=SCALE, kernels=kernels))
        halves = [
            attend_with_sinks(
                q[4 * group :][:4], keys[group : group + 1], values[group : group + 1], sinks[4 * group :][:4],
                window=window, scale=SCALE, kernels=kernels,
            )
            for group in range(2)
        ]  # fmt: skip
        found.append(torch.cat(halves))
        pool.close()
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_without_a_scale_it_is_that_of_the_width_and_a_great_sink_takes_all() -> None:
    q, keys, values = torch.randn(3, 2, 7, 16).bfloat16()
    none, all_of_it = torch.full((2,), -1e30), torch.full((2,), 1e30)
    found = attend_with_sinks(q, keys, values, none, window=None, scale=None, kernels=KERNELS)
    assert found.dtype is torch.bfloat16
    same = attend_with_sinks(q, keys, values, none, window=None, scale=0.25, kernels=KERNELS)
    assert torch.equal(found, same)
    assert not attend_with_sinks(q, keys, values, all_of_it, window=None, scale=None, kernels=KERNELS).any()


@pytest.mark.usefixtures("same_threads_afterwards")
@pytest.mark.parametrize("shape", [(1, 40_001), (300, 77)])
def test_the_clamped_activation_is_its_formula_for_any_number_of_threads(shape: tuple[int, int]) -> None:
    gate, up = torch.randn(shape[0], 2 * shape[1], generator=torch.Generator().manual_seed(2)).mul_(5).chunk(2, dim=-1)
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.append(clamped_gated(gate, up, limit=3.0, alpha=1.7))
    assert all(torch.equal(found[0], other) for other in found[1:])
    low = gate.double().minimum(torch.tensor(3.0))
    high = up.double().clamp(-3, 3) + 1
    torch.testing.assert_close(found[0].double(), high * low / (1 + (-1.7 * low).exp()), rtol=1e-5, atol=1e-6)
