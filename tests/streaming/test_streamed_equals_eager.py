"""The property that the whole house stands for: a streamed model is the resident one, bit for bit, always."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.decoder import DecoderModel
from quant.registry import scheme_names
from streaming import LLM, Hooks, LoadOptions
from streaming.commands.verify import compare
from streaming.plan import make_plan
from streaming.prepare import prepare
from tests.layers.tiny import some_ids
from tests.streaming.checkpoint.build import write_gguf
from tests.streaming.resident import Run, resident_model, run_resident, same_bits

PROMPTS = [some_ids(count, vocab_size=160, seed=count) for count in (1, 5, 40)]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")  # the others: tests/test_families_streamed.py
SMALLEST, DEFAULT = "smallest", "default"


@dataclass(frozen=True)
class Case:
    """One way to load one model."""

    family: str
    quantization: str
    window: str
    reader: str
    dtype: str
    tied: bool = False

    def __str__(self) -> str:
        words = (self.family, self.quantization, self.window, self.reader, self.dtype, "tied" if self.tied else "")
        return "-".join(filter(None, words))


def full_matrix() -> list[Case]:
    dims = (FAMILIES, scheme_names(), (SMALLEST, DEFAULT), ("process", "threads"), ("bfloat16", "float32"))
    return [Case(*values) for values in itertools.product(*dims)]


def everyday_cases() -> Iterator[Case]:
    """Every family with every scheme, while window, reader, dtype and tying take turns."""
    turns = itertools.cycle(
        itertools.product((SMALLEST, DEFAULT), ("process", "threads"), ("bfloat16", "float32"), (False, True))
    )
    for number, (family, scheme) in enumerate(itertools.product(FAMILIES, scheme_names())):
        for _ in range(1 + 2 * (number % 2)):  # an odd step, so that no turn always meets the same family
            turn = next(turns)
        yield Case(family, scheme, *turn)


@dataclass(frozen=True)
class Resident:
    """The model filled eagerly, and what each prompt gave."""

    model: DecoderModel
    runs: list[Run]


@lru_cache(maxsize=4)
def resident(folder: Path, quantization: str, dtype: str) -> Resident:
    model = resident_model(folder, quantization=quantization, dtype=dtype)
    return Resident(model, [run_resident(model, ids, dtype=dtype) for ids in PROMPTS])


def smallest_window(folder: Path, case: Case) -> int | None:
    """Just room for the largest item; None where nothing passes through the window."""
    options = LoadOptions(quantization=case.quantization, dtype=case.dtype)
    return prepare(str(folder), options).plan.largest_staged_nbytes or None


def differences(folder: Path, case: Case) -> list[str]:
    """What is not the same: outputs and logits of each prompt, the first of them while the model loads; weights."""
    expected = resident(folder, case.quantization, case.dtype)
    outputs: dict[str, torch.Tensor] = {}
    hooks = Hooks(layer_outputs=lambda layer, hidden: outputs.update({layer: hidden.clone()}))
    window = smallest_window(folder, case) if case.window == SMALLEST else None
    found: list[str] = []
    with LLM(
        folder, hooks=hooks, quantization=case.quantization, window=window, reader=case.reader, dtype=case.dtype
    ) as llm:
        for turn in ("while loading", "resident"):
            for ids, run in zip(PROMPTS, expected.runs, strict=True):
                logits = llm.logits(ids)
                found += unequal(f"{len(ids)} tokens, {turn}", outputs, run.outputs)
                found += unequal(f"{len(ids)} tokens, {turn}", {"logits": logits}, {"logits": run.logits})
            llm.wait_loaded()
        found += unequal("stored", dict(llm.shell.named_parameters()), dict(expected.model.named_parameters()))
    return found


def unequal(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [f"{what}: {name}" for name in expected if not same_bits(found[name], expected[name])]


def model_of(case: Case) -> TinyModel:
    """Sizes that no block and no panel divides."""
    return TinyModel(family=case.family, layers=2, tied=case.tied, intermediate_size=144, seed=7)


@pytest.mark.parametrize("case", list(everyday_cases()), ids=str)
def test_streamed_equals_eager(case: Case, tiny_folder: Callable[[TinyModel], Path]) -> None:
    assert differences(tiny_folder(model_of(case)), case) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", full_matrix(), ids=str)
def test_streamed_equals_eager_in_every_combination(case: Case, tiny_folder: Callable[[TinyModel], Path]) -> None:
    assert differences(tiny_folder(model_of(case)), case) == []


@pytest.mark.parametrize("quantization", scheme_names())
def test_layers_of_different_sizes_of_blocks(quantization: str, tiny_folder: Callable[[TinyModel], Path]) -> None:
    """Wider than a 128-block, so that scales have several rows and columns, and the last block is cut."""
    model = TinyModel(layers=1, hidden_size=320, heads=5, kv_heads=1, head_dim=64, intermediate_size=400)
    case = Case("llama", quantization, SMALLEST, "process", "bfloat16")
    assert differences(tiny_folder(model), case) == []


@pytest.mark.parametrize("quantization", scheme_names())
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_weights_that_come_in_several_runs_of_rows(
    quantization: str, family: str, tiny_folder: Callable[[TinyModel], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real weights are cut into runs of 32 MiB; here into runs of a few rows."""
    monkeypatch.setattr("streaming.prepare.make_plan", partial(make_plan, item_nbytes=3000))
    model = TinyModel(family=family, layers=1, hidden_size=320, heads=5, kv_heads=1, head_dim=64)
    case = Case(family, quantization, SMALLEST, "threads", "float32")
    folder = tiny_folder(model)
    plan = prepare(str(folder), LoadOptions(quantization=quantization, dtype="float32")).plan
    assert len(plan.items) > 20 * len(plan.layers)
    assert differences(folder, case) == []


@pytest.mark.parametrize("quantization", scheme_names())
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_block_formats_are_decoded_to_the_same_bits(quantization: str, kind: str, tmp_path: Path) -> None:
    """`verify`'s resident side decodes with the gguf package and puts llama's rows right by itself."""
    import argparse

    import gguf

    types = {
        f"blk.0.{name}.weight": gguf.GGMLQuantizationType[kind]
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    path = write_gguf(tmp_path / "model.gguf", types=types if kind != "F32" else None)
    options = argparse.Namespace(quantization=quantization, quiet=True, json=False)
    prepared = prepare(str(path), LoadOptions(quantization=quantization))
    report = compare(prepared, [1, 5, 7, 30], options)
    assert report.differences == []
    assert report.stored >= 8
    assert report.logits == 2 * 4 * 40
