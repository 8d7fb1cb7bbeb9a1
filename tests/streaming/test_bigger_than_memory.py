"""Models under a memory limit that they do not fit into: the same bits, within the limit, nothing quantized twice."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.sampling_params import SamplingParams
from quant.registry import scheme_names
from streaming import LLM, Hooks
from streaming.errors import BudgetError, OptionError
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.layers.family_cases import FAMILY_CASES
from tests.layers.tiny import some_ids
from tests.streaming.leftovers import nothing_left
from tests.streaming.limits import limit_of, limits_of
from tests.test_against_transformers import write_checkpoint

PROMPTS = [some_ids(count, vocab_size=101, seed=count) for count in (1, 7, 40)]
Tiny = Callable[[TinyModel], Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's small model, written by transformers when it is first asked for."""
    root, written = tmp_path_factory.mktemp("families"), set[str]()

    def folder(case: str) -> Path:
        place = root / case.replace(" ", "_").replace(",", "")
        if case not in written:
            family, changes = FAMILY_CASES[case]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write_checkpoint(import_module("transformers"), family, changes, folder=place)
            written.add(case)
        return place

    return folder


def answers(llm: LLM) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """Logits of every position of the prompts, and what greedy decoding makes of each and of all together."""
    greedy = SamplingParams(max_tokens=5, ignore_eos=True)
    logits = [llm.logits(ids) for ids in PROMPTS]
    tokens = [llm.complete([ids], greedy)[0].token_ids for ids in PROMPTS]
    return logits, [*tokens, *(one.token_ids for one in llm.complete(PROMPTS, greedy))]


def assert_same_answers(folder: Path, share: float, **options: Any) -> None:
    options = {"reader": "threads", "max_model_len": 64, **options}
    with LLM(folder, **options) as llm:
        expected = answers(llm)
    limit = limit_of(folder, share, **options)
    with LLM(folder, memory=limit, **options) as llm:
        stream = llm.model.runner.stream
        found = answers(llm)
        assert all(torch.equal(one, other) for one, other in zip(found[0], expected[0], strict=True))
        assert found[1] == expected[1]
        stats = llm.stats()
    assert stream is not None
    assert stats.stream["pass_bytes"] > 0
    assert stats.peak_budget_bytes <= limit
    assert stats.limit_bytes == limit


# --- the same bits


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("tied", [False, True])
def test_streamed_weights_give_the_bits_of_resident_ones(share: float, tied: bool, tiny_folder: Tiny) -> None:
    assert_same_answers(tiny_folder(TinyModel(layers=4, tied=tied)), share)


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme_streams(scheme: str, tiny_folder: Tiny) -> None:
    assert_same_answers(tiny_folder(TinyModel(layers=3)), 0.2, quantization=scheme)


QUICK = ("gpt2", "gemma2", "cohere", "phi", "stablelm", "gpt_oss", "deepseek_v3", "mixtral", "qwen2_moe")


@pytest.mark.parametrize(
    "case",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILY_CASES],
)
def test_every_family_uses_its_weights_in_the_order_in_which_they_come(
    case: str, family_folder: Callable[[str], Path]
) -> None:
    folder = family_folder(case)
    options: dict[str, Any] = {"reader": "threads", "max_model_len": 64}
    with LLM(folder, **options) as llm:
        expected = llm.logits(PROMPTS[1])
    with LLM(folder, memory=limit_of(folder, 0.1, **options), **options) as llm:
        for _ in range(3):
            assert torch.equal(llm.logits(PROMPTS[1]), expected)
        stream = llm.model.runner.stream
        assert stream is not None
        assert stream.counts.unused_nbytes == 0  # nothing came that was passed over


def test_a_head_of_several_chunks_is_streamed_chunk_by_chunk(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=1, hidden_size=64, vocab_size=20_000))
    for options in ({}, {"quantization": "int8_per_channel", "quantize_head": True}):
        prepared = prepare(str(folder), LoadOptions(memory=limit_of(folder, 0.0, **options), **options))
        assert prepared.plan.stream is not None
        heads = [unit.name for unit in prepared.plan.stream.streamed if unit.layer == "head"]
        assert heads == [f"lm_head.weight[{a}:{b}]" for a, b in ((0, 8192), (8192, 16384), (16384, 20000))]
        assert_same_answers(folder, 0.0, **options)
        assert_same_answers(folder, 0.15, **options)


@pytest.mark.parametrize("options", [
    {"dtype": "float32"}, {"load_format": "dummy"}, {"kv_cache_dtype": "fp8"}, {"activation_dtype": "int8"},
    {"safetensors_load_strategy": "lazy"}, {"safetensors_load_strategy": "prefetch"}, {"reader": "process"},
    {"quantization": "int8_per_channel", "cache_size": 0}, {"threads": 1}, {"window": "1MiB"},
])  # fmt: skip
def test_other_options_go_with_a_limit(options: dict[str, Any], tiny_folder: Tiny) -> None:
    assert_same_answers(tiny_folder(TinyModel(layers=3)), 0.2, **options)


# --- accounts


def spans(llm: LLM, lane: str) -> list[str]:
    return [span.name for span in llm.tracer.spans() if span.lane == lane]


def test_weights_are_quantized_once_and_read_in_their_stored_form_ever_after(tiny_folder: Tiny, tmp_path: Path) -> None:
    folder = tiny_folder(TinyModel(layers=3))
    options: dict[str, Any] = {"quantization": "int8_per_channel", "max_model_len": 64, "reader": "threads",
                               "cache_dir": str(tmp_path / "forms")}  # fmt: skip
    limit = limit_of(folder, 0.0, **options)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    with LLM(folder, memory=limit, **options) as llm:
        first = llm.complete([PROMPTS[1]], greedy)[0].token_ids
        made = spans(llm, "quantize")
        stream = llm.model.runner.stream
        assert stream is not None
        streamed = {item.tensor.name for unit in stream.plan.streamed for item in unit.items if not unit.is_straight}
        assert streamed
        assert sorted(set(made)) == sorted(made)  # each tensor once, in six passes
        assert streamed <= set(made)
        kept = [unit for unit in stream.plan.streamed if unit.is_worth_keeping]
        again = [name for name in spans(llm, "read") if name in {unit.name for unit in kept}]
        assert len(again) >= 5 * len(kept)
    with LLM(folder, memory=limit, **options) as llm:  # the next run finds them there
        assert llm.complete([PROMPTS[1]], greedy)[0].token_ids == first
        assert set(spans(llm, "quantize")) & streamed == set()


def test_the_bytes_of_a_pass_are_those_of_the_plan(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4))
    limit = limit_of(folder, 0.3, max_model_len=64)
    prepared = prepare(str(folder), LoadOptions(memory=limit, max_model_len=64))
    assert prepared.plan.stream is not None
    with LLM(folder, memory=limit, max_model_len=64) as llm:
        llm.complete([PROMPTS[1]], SamplingParams(max_tokens=5, ignore_eos=True))
        stats = llm.stats()
    assert stats.passes == 5
    assert stats.stream["streamed_bytes"] == 5 * prepared.plan.stream.pass_nbytes
    assert stats.stream["hit_rate"] == pytest.approx(prepared.plan.stream.hit_rate)


def test_the_share_of_hits_is_the_share_of_layers_that_stay(tiny_folder: Tiny) -> None:
    """(K - window) / L of the L layers: the ring is taken from what K layers would have."""
    folder = tiny_folder(TinyModel(layers=12))
    least, whole = limits_of(folder, max_model_len=64)
    last = -1.0
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        limit = least + int(share * (whole - least))
        prepared = prepare(str(folder), LoadOptions(memory=limit, max_model_len=64))
        stream = prepared.plan.stream
        assert stream is not None
        units = sum(unit.nbytes for unit in stream.units)
        room = limit - (least - max(unit.nbytes for unit in stream.units)) - stream.ring_nbytes
        smallest = min(unit.nbytes for unit in stream.units)
        assert (room - smallest) / units < stream.hit_rate <= room / units  # no weight more would have fitted
        assert stream.hit_rate > last
        last = stream.hit_rate
        assert prepared.budget.peak_nbytes <= limit


# --- what does not go


def test_a_limit_that_is_too_small_even_to_stream_says_what_is_needed(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4))
    least, _ = limits_of(folder)
    prepare(str(folder), LoadOptions(memory=least))
    with pytest.raises(BudgetError, match=r"too small even to stream the weights: .* are needed .* for the largest"):
        prepare(str(folder), LoadOptions(memory=least - 1))


@pytest.mark.parametrize(("options", "words"), [
    ({"tensor_parallel_size": 2}, "on one rank only"),
    ({"kernels": "fast"}, "--kernels fast keeps packed copies"),
    ({"safetensors_load_strategy": "eager"}, "eager reads whole files"),
])  # fmt: skip
def test_what_cannot_be_streamed_says_why(options: dict[str, Any], words: str, tiny_folder: Tiny) -> None:
    with pytest.raises(BudgetError, match=f"--memory 30.0 KiB is too small: .*; .*{words}"):
        prepare(str(tiny_folder(TinyModel(layers=4))), LoadOptions(memory="30KiB", **options))


def test_auto_takes_what_is_free(tiny_folder: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(TinyModel(layers=4))
    least, whole = limits_of(folder)
    monkeypatch.setattr("streaming.available_memory.available_nbytes", lambda: int((least + whole) / 2 / 0.9))
    prepared = prepare(str(folder), LoadOptions(memory="auto"))
    assert prepared.plan.stream is not None
    assert prepared.budget.limit_nbytes == pytest.approx((least + whole) / 2, abs=2)
    monkeypatch.setattr("streaming.available_memory.available_nbytes", lambda: None)
    with pytest.raises(OptionError, match="--memory auto: this system does not say how much memory is free"):
        prepare(str(folder), LoadOptions(memory="auto"))


def test_a_model_larger_than_what_is_free_is_streamed_with_a_warning(
    tiny_folder: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told = tiny_folder(TinyModel(layers=4)), list[str]()
    least, whole = limits_of(folder)
    with LLM(folder) as llm:
        expected = llm.logits(PROMPTS[1])
    for module in ("available_memory", "free_memory"):
        monkeypatch.setattr(f"streaming.{module}.available_nbytes", lambda: int((least + whole) / 2 / 0.9))
    with LLM(folder, hooks=Hooks(warn=told.append)) as llm:
        assert torch.equal(llm.logits(PROMPTS[1]), expected)
        assert llm.stats().stream["pass_bytes"] > 0
    assert [line for line in told if "of memory are free: it is opened with --memory auto" in line] == told
    assert len(told) == 1
    monkeypatch.setattr("streaming.free_memory.available_nbytes", lambda: 1000)
    monkeypatch.setattr("streaming.available_memory.available_nbytes", lambda: 1000)
    with LLM(folder) as llm:  # not even streamed would it fit: as it was asked for
        assert llm.stats().stream == {}
    with LLM(folder, safetensors_load_strategy="lazy") as llm:  # its maps are no memory of its own
        assert llm.stats().stream == {}


# --- ends


def test_nothing_is_left_of_a_stream(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4))

    def stream() -> None:
        with LLM(folder, memory=limit, quantization="int8_per_channel", max_model_len=64) as llm:
            llm.logits(PROMPTS[0])

    limit = limit_of(folder, 0.2, quantization="int8_per_channel", max_model_len=64)
    stream()  # what is imported once is not left behind
    with nothing_left():
        stream()


def test_a_request_that_is_given_up_leaves_a_stream_that_goes_on(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4))
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM(folder, max_model_len=64) as llm:
        expected = llm.complete([PROMPTS[1]], greedy)[0].token_ids
    with LLM(folder, memory=limit_of(folder, 0.2, max_model_len=64), max_model_len=64) as llm:
        for count in range(6):
            pieces = llm.pieces([PROMPTS[1]], greedy)
            taken = list(itertools.islice(pieces, count))
            assert tuple(piece.token_id for piece in taken) == expected[:count]
            del pieces
        assert llm.complete([PROMPTS[1]], greedy)[0].token_ids == expected


def test_a_file_that_changes_ends_the_stream_by_name(tmp_path: Path) -> None:
    from examples.write_tiny_model import write_tiny_model
    from streaming.errors import LayerLoadError

    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=4))

    def run() -> None:
        with LLM(folder, memory=limit_of(folder, 0.0)) as llm:
            llm.logits(PROMPTS[0])
            for file in folder.glob("*.safetensors"):
                os.utime(file, ns=(1, 1))
            for _ in range(3):
                llm.logits(PROMPTS[0])

    with pytest.raises(LayerLoadError, match="changed"):
        run()


# --- as data


def plans(folder: Path) -> Iterator[dict[str, Any]]:
    import subprocess
    import sys

    for memory in (limit_of(folder, 0.5), None):
        words = [] if memory is None else ["--memory", str(memory)]
        command = [sys.executable, "-m", "streaming", "plan", str(folder), "--json", *words]
        yield json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_the_dry_run_shows_what_stays_and_what_is_streamed(tiny_folder: Tiny) -> None:
    limited, whole = plans(tiny_folder(TinyModel(layers=4)))
    assert whole["stream"] == {}
    stream = limited["stream"]
    assert stream["streamed_layers"]
    assert {*stream["streamed_layers"], *stream["resident_layers"]} == {f"layers.{i}" for i in range(4)} | {"head"}
    assert limited["peak"]["total"] <= limited["limit_bytes"]
    assert limited["peak"]["ring"] == stream["ring_bytes"] > 0


@pytest.mark.parametrize("options", [[], ["--quantization", "int8_per_channel"]])
@pytest.mark.parametrize("model", ["dense", "mixtral"])
def test_verify_looks_at_what_is_streamed_too(
    model: str, options: list[str], tiny_folder: Tiny, family_folder: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from streaming.cli import run

    folder = tiny_folder(TinyModel(layers=3)) if model == "dense" else family_folder("mixtral")
    given = {"quantization": options[1]} if options else {}
    command = ["verify", str(folder), "--max-model-len", "64", "--json", *options]
    assert run(command) == 0
    whole = json.loads(capsys.readouterr().out)
    assert run([*command, "--memory", str(limit_of(folder, 0.1, max_model_len=64, **given))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"]
    assert found["stored_tensors"] >= whole["stored_tensors"]  # some of them in parts


def test_verify_finds_a_streamed_weight_that_differs(
    tiny_folder: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from streaming.cli import run
    from streaming.item_bytes import ItemBytes

    folder, read = tiny_folder(TinyModel(layers=3)), ItemBytes.read

    def wrong(items: ItemBytes, item: Any, into: torch.Tensor | None = None) -> torch.Tensor:
        raw = read(items, item, into)
        if item.tensor.name == "model.layers.1.mlp.down_proj.weight":
            raw[5] ^= 1
        return raw

    monkeypatch.setattr(ItemBytes, "read", wrong)
    limit = limit_of(folder, 0.0, max_model_len=64)
    options = ["--max-model-len", "64", "--memory", str(limit), "--safetensors-load-strategy", "direct"]
    assert run(["verify", str(folder), *options]) == 1
    assert "model.layers.1.mlp.down_proj.weight: 1 of" in capsys.readouterr().out


def test_a_listing_shows_what_is_streamed(tiny_folder: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    from streaming.cli import run

    folder = tiny_folder(TinyModel(layers=3))
    limit = limit_of(folder, 0.0, max_model_len=64)
    assert run(["inspect", str(folder), "--max-model-len", "64", "--memory", str(limit)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  model.layers.0.mlp.down_proj.weight [none] weight BF16 [64, 96] (streamed)" in lines
    assert "  model.embed_tokens.weight [none] weight BF16 [160, 64] (rows are fetched)" in lines
    assert "  model.layers.0.input_layernorm.weight [none] weight BF16 [64]" in lines


def test_the_size_that_is_asked_for_is_enough(family_folder: Callable[[str], Path]) -> None:
    for case in ("mixtral", "gemma2", "cohere"):
        with pytest.raises(BudgetError) as caught:
            prepare(str(family_folder(case)), LoadOptions(memory=1000))
        needed = str(caught.value).partition(" are needed")[0].rpartition(": ")[2].replace(" ", "")
        assert prepare(str(family_folder(case)), LoadOptions(memory=needed)).plan.stream is not None


def test_a_folder_for_stored_forms_that_nothing_is_kept_in_is_a_warning(tiny_folder: Tiny, tmp_path: Path) -> None:
    prepared = prepare(str(tiny_folder(TinyModel(layers=3))), LoadOptions(cache_dir=str(tmp_path)))
    assert prepared.warnings == (f"--cache-dir {tmp_path}: all weights stay in memory, so nothing is kept there",)
