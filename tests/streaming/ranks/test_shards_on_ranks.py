"""Shards of several ranks, run by ranks that are processes of their own: the logits of the model that was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from streaming import LLM
from streaming.sharded import part_name
from tests.streaming.ranks.rank_pool import RankPool
from tests.streaming.resident import same_bits
from tests.streaming.test_cut_combinations import Folders as Models
from tests.streaming.test_sharded import save
from tests.streaming.test_sharded_on_ranks import BOTH, FOUR, TWO, flags

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = [3, 1, 159, 4, 100, 1, 5, 70]  # tokens whose rows are on different ranks


def logits(model: Path, **options: Any) -> torch.Tensor:
    with LLM(model, **options) as llm:
        found: torch.Tensor = llm.logits([token % llm.prepared.config.vocab_size for token in IDS])
        llm.wait_loaded()
        return found


STAGES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("mesh", "scheme", "tied"),
    [
        (TWO, "none", False),
        (FOUR, "fp8_per_block", True),
        (FOUR, "int4_per_group:32", False),
        (STAGES, "fp8_per_block", False),
        (STAGES, "none", True),
    ],
)
def test_ranks_compute_the_same_from_their_shards(
    pooled: RankPool,
    tiny_folder: Callable[[TinyModel], Path],
    tmp_path: Path,
    mesh: dict[str, Any],
    scheme: str,
    tied: bool,
) -> None:
    model = tiny_folder(TinyModel(layers=2, intermediate_size=176, files=1, tied=tied))
    check(model, tmp_path / "out", mesh, scheme)


def test_ranks_with_experts_compute_the_same_from_their_shards(pooled: RankPool, tmp_path: Path) -> None:
    """Two groups of two ranks that have the same dense layers, and experts on all four."""
    folder, _ = Models(tmp_path).of("qwen2_moe")
    check(folder, tmp_path / "out", BOTH, "fp8_per_block")


def check(model: Path, out: Path, mesh: dict[str, Any], scheme: str) -> None:
    assert save(model, out, "--quantization", scheme, *flags(mesh)) == 0
    assert same_bits(logits(out, **mesh), logits(model, quantization=scheme, **mesh))


def test_a_rank_whose_file_is_missing_is_named(
    pooled: RankPool, tiny_folder: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    assert save(tiny_folder(TinyModel(layers=1, files=1)), tmp_path / "out", *flags(TWO)) == 0
    (tmp_path / "out" / part_name(1)).unlink()
    with pytest.raises(Exception, match=f"rank 1.*{part_name(1)}"), LLM(tmp_path / "out", **TWO) as llm:
        llm.logits(IDS)
