"""The stream of weights that do not fit: ahead of the passes, in their order, and how it ends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.sampling_params import SamplingParams
from streaming import LLM, LayerLoadError, StreamClosedError
from streaming.item_bytes import ItemBytes
from streaming.item_storing import ItemStoring
from streaming.load_plan import LoadItem
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.stream_plan import Unit, has_room_ahead, ring_nbytes
from tests.layers.tiny import some_ids
from tests.streaming.leftovers import nothing_left
from tests.streaming.limits import limit_of
from tests.streaming.waiting import SOON_S, in_background, until

IDS = some_ids(5, vocab_size=101, seed=1)
Tiny = Callable[[TinyModel], Path]


class Reads:
    """Items that are read on demand, written down; held back while `open` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.names, self._lock = threading.Event(), list[str](), threading.Lock()
        self.open.set()
        self._read = ItemBytes.read
        monkeypatch.setattr(ItemBytes, "read", lambda items, item, into=None: self._held(items, item, into))

    def _held(self, items: ItemBytes, item: LoadItem, into: torch.Tensor | None) -> torch.Tensor:
        with self._lock:
            self.names.append(item.tensor.name)
        while not self.open.wait(0.01):
            if items._closed:
                raise StreamClosedError("closed while it was held")
        return self._read(items, item, into)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def folder(tiny_folder: Tiny) -> Path:
    return tiny_folder(TinyModel(layers=6))


@contextmanager
def streamed(folder: Path) -> Iterator[LLM]:
    """What passes through is read, not used where it lies."""
    options: dict[str, Any] = {"max_model_len": 64, "reader": "threads", "safetensors_load_strategy": "direct"}
    with LLM(folder, memory=limit_of(folder, 0.0, **options), **options) as llm:
        yield llm


def units_of(llm: LLM) -> tuple[Unit, ...]:
    stream = llm.model.runner.stream
    assert stream is not None
    return stream.plan.streamed


# --- ahead


def test_the_first_weights_of_the_next_pass_come_before_it_is_asked_for(folder: Path, reads: Reads) -> None:
    with streamed(folder) as llm:
        expected = [item.tensor.name for unit in units_of(llm) for item in unit.items]
        for number in (1, 2):
            llm.logits(IDS)
            until(lambda number=number: len(reads.names) > number * len(expected) + 2)
            times = Counter(list(reads.names))  # two threads read: what one took first the other may note first
            assert min(times[name] for name in expected) == number  # each once in each pass
            ahead = {name for name, count in times.items() if count > number}
            assert ahead
            assert ahead <= set(expected[: len(ahead) + 1])


def test_no_more_is_read_ahead_than_the_ring_holds(folder: Path, reads: Reads) -> None:
    with streamed(folder) as llm:
        stream = llm.model.runner.stream
        assert stream is not None
        llm.wait_loaded()
        sizes = {item.tensor.name: item.nbytes for unit in stream.units for item in unit.items}
        until(lambda: sum(sizes[name] for name in reads.names) > stream.plan.ring_nbytes // 2)
        assert sum(sizes[name] for name in reads.names) <= stream.plan.ring_nbytes


@pytest.mark.parametrize("sizes", [[10] * 8, [30, 20, 100, 50] * 5, [1, 1, 500, 1], [7, 300, 299, 2, 2, 2]])
def test_the_ring_has_room_for_the_next_weight_while_one_is_used(sizes: list[int]) -> None:
    capacity = next(nbytes for nbytes in range(max(sizes), 3 * max(sizes) + 64) if has_room_ahead(sizes, nbytes))
    assert capacity < sum(sorted(sizes)[-2:]) + 3 * 64 + max(sizes)
    assert not has_room_ahead(sizes, max(sizes))


def test_the_ring_of_a_plan_is_no_larger_than_what_passes_through_it(folder: Path) -> None:
    limit = limit_of(folder, 0.0, max_model_len=64)
    stream = prepare(str(folder), LoadOptions(memory=limit, max_model_len=64)).plan.stream
    assert stream is not None
    total = sum(unit.nbytes for unit in stream.units)
    assert ring_nbytes(stream.units, room_nbytes=1 << 40) == total  # they are small: all of them
    assert ring_nbytes(stream.units, room_nbytes=1) == max(unit.nbytes for unit in stream.units)


# --- ends


def test_closing_wakes_a_pass_that_waits_for_a_weight(folder: Path, reads: Reads) -> None:
    def run() -> None:
        reads.open.clear()
        with streamed(folder) as llm:
            answer = in_background(lambda: llm.logits(IDS))
            until(lambda: reads.names)
            llm.close()
            with pytest.raises(StreamClosedError):
                answer.result(SOON_S)

    run()
    with nothing_left():
        run()


def test_a_request_that_is_cancelled_while_it_waits_leaves_the_stream_usable(folder: Path, reads: Reads) -> None:
    with streamed(folder) as llm:
        expected = llm.logits(IDS)
        reads.open.clear()
        job = llm.model.submit_call(lambda runner, stop: _logits(llm, stop))
        until(lambda: not reads.open.is_set())
        job.cancel()
        reads.open.set()
        assert torch.equal(llm.logits(IDS), expected)


def _logits(llm: LLM, stop: Callable[[], None]) -> torch.Tensor:
    from streaming.evaluate import prompt_logits

    return prompt_logits(llm.model, IDS, stop)


def test_a_weight_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ItemBytes.read

    def failing(items: ItemBytes, item: LoadItem, into: torch.Tensor | None = None) -> torch.Tensor:
        if item.tensor.name == "model.layers.3.mlp.down_proj.weight":
            raise OSError(5, "Input/output error")
        return read(items, item, into)

    monkeypatch.setattr(ItemBytes, "read", failing)
    with (
        pytest.raises(LayerLoadError, match=r"layer layers\.3, stage read, tensor model\.layers\.3\.mlp\.down_proj"),
        streamed(folder) as llm,
    ):
        llm.logits(IDS)


def test_a_weight_that_cannot_be_made_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(self: ItemStoring, item: LoadItem, wide: torch.Tensor, stored: object) -> None:
        raise MemoryError("no memory")

    limit = limit_of(folder, 0.0, max_model_len=64, quantization="int8_per_channel")
    options = {"max_model_len": 64, "quantization": "int8_per_channel", "cache_dir": str(tmp_path)}
    monkeypatch.setattr(ItemStoring, "store", failing)
    with (
        pytest.raises(LayerLoadError, match=r"stage quantize, tensor .*no memory"),
        LLM(folder, memory=limit, **options) as llm,
    ):
        llm.complete([IDS], SamplingParams(max_tokens=2))


def test_weights_that_are_wrong_are_found_as_they_come_the_first_time(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from examples.write_tiny_model import write_tiny_model
    from streaming import Hooks

    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=4))
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors.keys() & {"model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight"}:
            tensors[name].zero_() if "up_proj" in name else tensors[name].view(-1)[3].fill_(float("nan"))
        save_file(tensors, file, {"format": "pt"})
    limit, told = limit_of(folder, 0.0, max_model_len=64), list[str]()
    with LLM(folder, memory=limit, max_model_len=64, hooks=Hooks(warn=told.append)) as llm:
        for _ in range(3):
            llm.logits(IDS)
    assert sorted(line.partition(" in ")[0] for line in told) == [
        "model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.o_proj.weight",
    ]  # fmt: skip
    assert {line.partition("safetensors ")[2].partition(":")[0] for line in told} == {"holds only zeros", "holds NaN"}
    with (
        pytest.raises(LayerLoadError, match="stage check"),
        LLM(folder, memory=limit, max_model_len=64, check_weights=True) as llm,
    ):
        llm.logits(IDS)
