"""`--kernels fast`: packed copies from the second token on, counted in the budget, and the same tokens every time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.linear import Linear
from layers.sampling_params import SamplingParams
from quant.packed import FbgemmLinear
from quant.tiled_int4 import Int4Tiled, most_rows
from streaming import LLM, BudgetError
from streaming.options import LoadOptions
from streaming.prepare import prepare

INT8 = "int8_per_channel"
PACKED = (INT8, *(("int4_per_group:asym",) if most_rows() else ()))
MODEL = TinyModel(layers=2, intermediate_size=128, dtype="bfloat16", seed=7)
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    return tiny_folder(MODEL)


@pytest.fixture
def rows_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each packed product was given."""
    seen: list[int] = []

    def watched(real: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
        def linear(self: FbgemmLinear | Int4Tiled, x: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor | None:
            seen.append(x.shape[0])
            found = real(self, x, *args, **how)
            assert found is not None
            return found

        return linear

    for kind in (FbgemmLinear, Int4Tiled):
        monkeypatch.setattr(kind, "linear", watched(kind.linear))
    return seen


def packed_layers(llm: LLM) -> list[bool]:
    linears = [module for module in llm._model.runner.model.modules() if isinstance(module, Linear)]
    assert len(linears) == 2 * 4
    return [module.packed is not None for module in linears]


@pytest.mark.parametrize("quantization", PACKED)
def test_packed_copies_are_used_from_the_second_token_on(quantization: str, folder: Path, rows_seen: list[int]) -> None:
    with LLM(folder, quantization=quantization, kernels="fast") as llm:
        llm.complete([[5]], SamplingParams(max_tokens=1, ignore_eos=True))
        assert not any(packed_layers(llm))
        assert rows_seen == []
        llm.complete([[5]], PARAMS)
        assert all(packed_layers(llm))
        assert rows_seen == [1] * (
            2 * 4 * 7
        )  # seven steps behind the first, whose one row came from the stored weights
        llm.complete([[5]], PARAMS)
        assert rows_seen == [1] * (2 * 2 * 4 * 7)  # packed already, and still not used for the first token


@pytest.mark.parametrize("quantization", PACKED)
def test_the_tokens_are_the_same_every_time(quantization: str, folder: Path) -> None:
    found = []
    for _ in range(2):
        with LLM(folder, quantization=quantization, kernels="fast") as llm:
            found += [llm.complete([[5, 9, 2]], PARAMS)[0].token_ids for _ in range(2)]
    assert len(set(found)) == 1


@pytest.mark.parametrize("quantization", ["none", "fp8_per_block"])
def test_other_schemes_are_as_under_default(folder: Path, quantization: str, rows_seen: list[int]) -> None:
    found = []
    for kernels in ("default", "fast"):
        with LLM(folder, quantization=quantization, kernels=kernels) as llm:
            found.append(llm.complete([[5, 9, 2]], PARAMS)[0].token_ids)
            assert not any(packed_layers(llm))
    assert found[0] == found[1]
    assert rows_seen == []


@pytest.mark.parametrize("quantization", PACKED)
def test_the_budget_counts_the_copies(quantization: str, folder: Path) -> None:
    plain, fast = (
        prepare(str(folder), LoadOptions(quantization=quantization, kernels=name)).budget
        for name in ("default", "fast")
    )
    assert plain.packed_nbytes == 0
    with LLM(folder, quantization=quantization, kernels="fast") as llm:
        llm.complete([[5, 9, 2]], PARAMS)
        copies = [module.packed for module in llm._model.runner.model.modules() if isinstance(module, Linear)]
        held = sum(packed.nbytes for packed in copies if packed is not None)
        assert fast.packed_nbytes == 2 * held > 0  # two equal layers, and twice one of them while they are made
    assert fast.peak_nbytes == plain.peak_nbytes + fast.packed_nbytes
    with pytest.raises(BudgetError, match=r"of packed copies\); .*, or leave out --kernels fast; --kernels fast keeps"):
        prepare(str(folder), LoadOptions(quantization=quantization, kernels="fast", memory=fast.peak_nbytes - 1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_copies_that_no_product_would_read_are_neither_made_nor_counted(folder: Path, dtype: str) -> None:
    """torch's int4 product reads bfloat16 alone; FBGEMM's rounds activations of any dtype."""
    for quantization, made in (("int4_per_group", False), (INT8, True)):
        options: Any = {"quantization": quantization, "kernels": "fast", "dtype": dtype}
        assert (prepare(str(folder), LoadOptions(**options)).budget.packed_nbytes > 0) is made
        with LLM(folder, **options) as llm:
            llm.complete([[5, 9, 2]], PARAMS)
            assert set(packed_layers(llm)) == {made}


def test_packing_is_no_part_of_the_decode_rate(folder: Path) -> None:
    with LLM(folder, quantization=INT8, kernels="fast") as llm:
        llm.complete([[5, 9, 2]], PARAMS)
        summary = llm.stats()
        assert summary.tokens_per_s is not None
        assert summary.decode_tok_s is not None
        assert "post-process" in summary.stages
