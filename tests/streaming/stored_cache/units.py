"""Units of made-up tensors that are the same wherever the same seed makes them."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import torch

from streaming.stored_cache import StoredCache, open_stored_cache

KEY = {"model": "a"}
LIMIT = 1 << 30


def unit_of(seed: int, *, most: int = 40_000) -> dict[str, torch.Tensor]:
    """A weight of some bytes up to `most`, and what goes with it."""
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, columns = rng.randint(1, 40), rng.randint(1, most // 40)
    weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=made)
    scale = torch.rand((rows, 1), generator=made)
    kinds = [
        {"weight": weight, "weight_scale": scale},
        {"weight": weight.view(torch.float8_e4m3fn), "weight_scale": scale.bfloat16()},
        {"weight": weight.view(torch.uint8), "weight_scale": scale, "weight_zero_point": weight[:, :1].contiguous()},
        {"weight": weight.to(torch.bfloat16)},
    ]
    return kinds[seed % len(kinds)]


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Room for the same tensors."""
    return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether all bits are the same."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


class Opened:
    """A cache and what it warned of; closed at the end of the block."""

    def __init__(self, root: Path, *, key: dict[str, object] | None = None, limit: int = LIMIT) -> None:
        self.warnings: list[str] = []
        self.cache = open_stored_cache(root, key or KEY, limit_nbytes=limit, warn=self.warnings.append)
        self._closing = closing(self.cache)

    def __enter__(self) -> StoredCache:
        return self.cache

    def __exit__(self, *error: object) -> None:
        self.cache.close()


def fill(root: Path, seeds: range, *, key: dict[str, object] | None = None, most: int = 40_000) -> Path:
    """A model's folder with these units, closed again."""
    opened = Opened(root, key=key)
    with opened as cache:
        for seed in seeds:
            cache.put(f"u{seed}", unit_of(seed, most=most))
        assert cache.is_writing
    assert not opened.warnings
    return opened.cache.file.parent


def loaded(cache: StoredCache, seed: int, *, most: int = 40_000) -> bool | None:
    """Whether the unit came as its seed says (True) or not at all (None); False is a fault of the cache."""
    wanted = unit_of(seed, most=most)
    into = empty_like(wanted)
    return same(into, wanted) if cache.load(f"u{seed}", into) else None
