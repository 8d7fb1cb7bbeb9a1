"""Small sparse models, and experts of theirs that come and go within a capacity."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from streaming import expert_loading, model_run
from streaming.device import Device, open_device
from streaming.expert_cache import ExpertCache
from streaming.expert_fetching import StoredUnits
from streaming.expert_loading import open_experts
from streaming.load_plan import LoadPlan
from streaming.prepare import Prepared
from streaming.reader import Reader
from streaming.residency import Residency
from streaming.trace import Tracer
from tests.layers.family_cases import FAMILY_CASES
from tests.test_against_transformers import write_checkpoint

MANY: Mapping[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "hidden_size": 64, "head_dim": 16,
    "num_hidden_layers": 3, "vocab_size": 160, "norm_topk_prob": True,
}  # fmt: skip
"""A qwen3_moe of three layers with 16 experts, of which 4 are chosen."""

Folder = Callable[[str], Path]


def folder_of(root: Path) -> Folder:
    """The folder of a family's small model, written by transformers when it is first asked for; "many": see above."""
    written = set[str]()

    def of(name: str) -> Path:
        if name not in written:
            family, changes = ("qwen3_moe", dict(MANY)) if name == "many" else FAMILY_CASES[name]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write_checkpoint(import_module("transformers"), family, changes, folder=root / name)
            written.add(name)
        return root / name

    return of


def bound_experts(monkeypatch: pytest.MonkeyPatch, capacity_nbytes: int, stored: StoredUnits | None = None) -> None:
    """Models that are opened with `moe_load="routed_first"` from now on have so much memory for experts."""

    def opened(prepared: Prepared, device: Device, residency: Residency, tracer: Tracer, **how: Any) -> Any:
        how |= {"capacity_nbytes": capacity_nbytes, "stored": stored}
        return open_experts(prepared, device, residency, tracer, **how)

    def device(name: str, plan: LoadPlan, reader: Reader, **_: Any) -> Device:
        return open_device(name, plan, reader, bounded_experts=True)

    monkeypatch.setattr(model_run, "open_device", device)
    monkeypatch.setattr(expert_loading, "open_experts", opened)


def cache_of(llm: Any) -> ExpertCache:
    """The experts of a model that is bound."""
    found = llm._model.runner.experts
    assert isinstance(found, ExpertCache)
    return found
