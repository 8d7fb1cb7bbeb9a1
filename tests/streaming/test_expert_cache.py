"""Experts that come and go within a capacity: the same bits, never more memory, nothing quantized twice."""

from __future__ import annotations

import random
import struct
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import wait
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from layers.sampling_params import SamplingParams
from streaming import LLM, StreamClosedError, cli
from streaming.errors import BudgetError, LayerLoadError
from streaming.expert_cache import ExpertCache
from streaming.expert_fetching import ExpertFetcher
from streaming.expert_memory import ExpertMemory
from streaming.expert_plan import PAGE_NBYTES, ExpertLayer, least_expert_nbytes
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.stats import summary_lines
from tests.streaming.leftovers import nothing_left
from tests.streaming.sparse_models import MANY, Folder, bound_experts, cache_of, folder_of
from tests.streaming.waiting import SOON_S, in_background, until
from tests.test_against_transformers import write_checkpoint

IDS = [5, 9, 2, 7, 11, 3, 17, 4, 23, 8, 31, 6, 1, 13, 19, 29]
FIRST = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folder_of(tmp_path_factory.mktemp("bounded"))


def experts_of(folder: Path, **options: Any) -> tuple[ExpertLayer, ...]:
    return prepare(str(folder), LoadOptions(moe_load="routed_first", **options)).plan.experts


def least_of(folder: Path, **options: Any) -> int:
    return least_expert_nbytes(prepare(str(folder), LoadOptions(moe_load="routed_first", **options)).plan)


def bounded(folder: Path, **options: Any) -> LLM:
    return LLM(folder, moe_load="routed_first", reader="threads", **options)


# --- the same bits


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("many", {"dtype": "bfloat16"}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("many", {"quantization": "int8_per_channel"}),
        ("many", {"quantization": "fp8_per_tensor"}),
        ("many", {"quantization": "nvfp4"}),
    ],
)
def test_within_any_capacity_the_bits_are_those_of_the_whole(
    family: str, options: dict[str, Any], folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder(family), reader="threads", **options) as llm:
        expected, answer = llm.logits(IDS), llm.complete([IDS], FIRST)[0].token_ids
    least = least_of(folder(family), **options)
    for capacity in (least, 3 * least + PAGE_NBYTES, 200 * least):
        bound_experts(monkeypatch, capacity)
        with bounded(folder(family), **options) as llm:
            assert torch.equal(llm.logits(IDS), expected)
            assert llm.complete([IDS], FIRST)[0].token_ids == answer
            counts = cache_of(llm).counts
        assert counts.peak_nbytes <= capacity
        assert (counts.evicted > 0) == (capacity < 200 * least)


def test_shards_that_were_saved_quantized_come_by_experts_too(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folder("many"), reader="threads", quantization="int4_per_group") as llm:
        expected = llm.logits(IDS)
    how = ["--out", str(tmp_path / "saved"), "--quiet", "--reader", "threads", "--quantization", "int4_per_group"]
    assert cli.run(["save-shards", str(folder("many")), *how]) == 0
    bound_experts(monkeypatch, 2 * least_of(tmp_path / "saved"))
    with bounded(tmp_path / "saved") as llm:
        assert torch.equal(llm.logits(IDS), expected)
        assert not [s for s in llm.tracer.spans() if s.lane == "quantize" and ".experts" in s.layer]


def test_all_that_fits_is_read_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of(folder("many"))
    bound_experts(monkeypatch, sum(one.unit_nbytes(unit) for one in experts for unit in one.units))
    with bounded(folder("many")) as llm:
        for _ in range(3):
            llm.logits(IDS)
        until(lambda: cache_of(llm).counts.read_nbytes == sum(one.plan.read_nbytes for one in experts))
        counts = cache_of(llm).counts
        facts = llm.stats().experts
        words = next(line for line in summary_lines(llm.stats()) if line.startswith("experts"))
    assert (counts.evicted, counts.misses > 0, counts.hits > counts.misses) == (0, True, True)
    asked = counts.hits + counts.misses
    assert facts["hit_rate"] == pytest.approx(counts.hits / asked)
    assert facts["read_bytes"] == sum(one.plan.read_nbytes for one in experts)
    assert f"of {asked} asked for were there; 2.2 MiB read, 2.2 MiB held at the most of 2.2 MiB" in words


def test_the_load_is_over_once_the_layers_without_their_experts_are_there(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_experts(monkeypatch, least_of(folder("many")))
    with bounded(folder("many")) as llm:
        llm.wait_loaded()
        assert {state.value for state in llm.readiness.values()} == {"ready"}
        assert cache_of(llm).wait()
        assert not cache_of(llm).is_done


# --- memory


def test_experts_never_hold_more_than_the_capacity(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted apart, at every allocation, and measured where the system tells."""
    least = least_of(folder("many"))
    capacity = 7 * least
    watch = Watch(monkeypatch, experts_of(folder("many")))
    bound_experts(monkeypatch, capacity)
    draw = random.Random(5)
    with bounded(folder("many")) as llm:
        memory = cache_of(llm).memory
        for _ in range(12):
            llm.logits([draw.randrange(160) for _ in range(draw.choice((1, 1, 2, 20)))])
            assert 0 < sum(resident_nbytes(memory, layer) for layer in cache_of(llm).layers) <= capacity
    assert least < watch.peak_nbytes <= capacity


class Watch:
    """Adds up what is taken and given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layers: tuple[ExpertLayer, ...]) -> None:
        sizes = {(one.plan.name, unit): one.unit_nbytes(unit) for one in layers for unit in one.units}
        self._held, self.peak_nbytes, self._lock = 0, 0, threading.Lock()
        take, give_back = ExpertMemory.take, ExpertMemory.give_back

        def add(nbytes: int) -> None:
            with self._lock:
                self._held += nbytes
                self.peak_nbytes = max(self.peak_nbytes, self._held)

        def taking(memory: ExpertMemory, layer: str, unit: int) -> None:
            add(sizes[layer, unit])
            take(memory, layer, unit)

        def giving(memory: ExpertMemory, layer: str, unit: int) -> None:
            give_back(memory, layer, unit)
            add(-sizes[layer, unit])

        monkeypatch.setattr(ExpertMemory, "take", taking)
        monkeypatch.setattr(ExpertMemory, "give_back", giving)


def resident_nbytes(memory: ExpertMemory, layer: ExpertLayer) -> int:
    """What the system says of a layer's address space: pages that are there (bit 63 of its page map)."""
    address, nbytes = memory.address_of(layer.plan.name)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(address // PAGE_NBYTES * 8)
        found = file.read(nbytes // PAGE_NBYTES * 8)
    return PAGE_NBYTES * sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", found))


def test_pages_go_back_when_no_unit_needs_them_and_the_others_keep_theirs(folder: Folder) -> None:
    layers = experts_of(folder("deepseek_v3"))  # experts of 6 KiB: they share pages
    memory = ExpertMemory(layers)
    one = layers[0]
    run = one.runs[0]
    whole = memory.tensors[run.param][run.name].view(torch.uint8)
    step = whole.shape[0] // len(one.units)
    assert step * whole.shape[1] % PAGE_NBYTES != 0
    parts = [whole[unit * step : (unit + 1) * step] for unit in one.units]
    for unit in one.units:
        memory.take(one.plan.name, unit)
        parts[unit].fill_(unit + 1)
    draw = random.Random(2)
    left = list(one.units)
    while left:
        gone = left.pop(draw.randrange(len(left)))
        memory.give_back(one.plan.name, gone)
        assert all(bool((parts[unit] == unit + 1).all()) for unit in left)
    assert resident_nbytes(memory, one) == 0
    assert not whole.any()


def test_huge_pages_are_wholly_one_units(tmp_path: Path) -> None:
    """Experts of 5.3 MiB, of which nothing is read: each is filled, and what the system gives is what is counted."""
    wide = {"hidden_size": 640, "moe_intermediate_size": 1440, "num_hidden_layers": 1, "num_experts": 6}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_checkpoint(import_module("transformers"), "qwen3_moe", {**MANY, **wide}, folder=tmp_path)
    (one,) = experts_of(tmp_path, dtype="bfloat16")
    memory, shown = ExpertMemory([one]), random.Random(1).sample(range(6), 6)
    counted = 0
    for unit in shown:
        memory.take(one.plan.name, unit)
        counted += one.unit_nbytes(unit)
        for run in one.runs:
            tensor = memory.tensors[run.param][run.name]
            step = tensor.shape[0] // 6
            tensor[unit * step : (unit + 1) * step].fill_(1.0)
        assert one.plan.kept_nbytes / 6 <= resident_nbytes(memory, one) <= counted
    for unit in shown:
        memory.give_back(one.plan.name, unit)
        counted -= one.unit_nbytes(unit)
        assert resident_nbytes(memory, one) <= counted
    assert counted == 0


def test_a_capacity_that_holds_no_unit_is_refused_with_the_number(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound_experts(monkeypatch, least_of(folder("many")) - 1)
    with pytest.raises(BudgetError, match=r"for experts are too little: .* take 48\.0 KiB"), bounded(folder("many")):
        pass
    assert least_of(folder("many")) == 48 << 10


def test_units_are_counted_in_whole_pages(folder: Folder) -> None:
    one = experts_of(folder("many"), quantization="int8_per_channel")[0]
    # gate_up_proj [128, 64] and down_proj [64, 64] in bytes, 512 and 256 bytes of scales: a page each.
    assert [one.unit_nbytes(unit) for unit in one.units] == [(2 + 1 + 1 + 1) * PAGE_NBYTES] * 16


def test_the_capacity_changes_while_tokens_are_made(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder("many"), reader="threads") as llm:
        expected = llm.complete([IDS], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))[0].token_ids
    least = least_of(folder("many"))
    bound_experts(monkeypatch, 9 * least)
    draw = random.Random(7)
    with bounded(folder("many")) as llm:
        cache = cache_of(llm)
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        running = in_background(lambda: llm.complete([IDS], params)[0].token_ids)
        changes = 0
        while not wait([running], timeout=0.002).done:  # not at once: a loop that never waits keeps others from running
            changes += 1
            capacity = least * draw.randrange(1, 40)
            cache.set_capacity(capacity)
            assert cache.counts.held_nbytes <= capacity
        assert running.result(SOON_S) == expected
        assert changes > 5
        cache.set_capacity(2 * least)
        assert cache.counts.held_nbytes <= 2 * least
        with pytest.raises(BudgetError, match="too little"):
            cache.set_capacity(least - 1)


# --- the stored cache


class Shelf:
    """A stored cache in memory."""

    def __init__(self) -> None:
        self.units: dict[str, dict[str, torch.Tensor]] = {}
        self.loads = 0

    def load(self, unit: str, into: Mapping[str, torch.Tensor]) -> bool:
        if unit not in self.units:
            return False
        self.loads += 1
        assert into.keys() == self.units[unit].keys()
        for name, tensor in into.items():
            tensor.copy_(self.units[unit][name])
        return True

    def put(self, unit: str, tensors: Mapping[str, torch.Tensor]) -> None:
        assert unit not in self.units
        self.units[unit] = {name: tensor.clone() for name, tensor in tensors.items()}


def test_no_expert_is_quantized_twice(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"quantization": "int4_per_group:32:asym"}
    with LLM(folder("many"), reader="threads", **options) as llm:
        expected = llm.logits(IDS)
    shelf = Shelf()
    bound_experts(monkeypatch, 2 * least_of(folder("many"), **options), shelf)
    for _ in range(2):  # the second run quantizes nothing at all
        with bounded(folder("many"), **options) as llm:
            assert torch.equal(llm.logits(IDS), expected)
            assert torch.equal(llm.logits(IDS), expected)
            spans = llm.tracer.spans()
        quantized = [span.name for span in spans if span.lane == "quantize" and ".experts." in span.name]
        assert len(quantized) == len(set(quantized))
    assert quantized == []
    assert shelf.loads > len(shelf.units) > 0
    names = {"gate_up_proj.weight", "gate_up_proj.weight_scale", "gate_up_proj.weight_zero_point"}
    assert names < shelf.units["layers.0.experts.0"].keys() or "layers.0.experts.0" not in shelf.units
    assert {len(unit) for unit in shelf.units.values()} == {6}


def test_what_lies_in_the_files_as_it_is_kept_is_not_kept_twice(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    bound_experts(monkeypatch, least_of(folder("many")), shelf)
    with bounded(folder("many")) as llm:
        llm.logits(IDS)
        assert len([item for one in llm.prepared.plan.experts for item in one.plan.items if not item.direct]) == 0
    assert shelf.units == {}


# --- what goes wrong


def test_a_pass_that_is_cancelled_leaves_the_cache_usable(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folder("many"), reader="threads") as llm:
        expected = llm.logits(IDS)
    bound_experts(monkeypatch, least_of(folder("many")))
    with bounded(folder("many")) as llm:
        product, calls = ExpertCache._arriving, []

        def broken(cache: ExpertCache, *arguments: Any) -> Any:
            for expert in product(cache, *arguments):
                calls.append(expert)
                if len(calls) == 3:
                    raise RuntimeError("enough")
                yield expert

        monkeypatch.setattr(ExpertCache, "_arriving", broken)
        with pytest.raises(RuntimeError, match="enough"):
            llm.logits(IDS)
        assert torch.equal(llm.logits(IDS), expected)


def test_closing_ends_a_wait_for_experts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    bound_experts(monkeypatch, least_of(folder("many")))
    with bounded(folder("many")) as llm:
        llm.logits(IDS)  # what torch keeps for good is there after the first time
    held, go_on = threading.Event(), threading.Event()
    fetch = ExpertFetcher.fetch

    def holding(fetcher: ExpertFetcher, *arguments: Any, **named: Any) -> Any:
        held.set()
        assert go_on.wait(SOON_S)
        return fetch(fetcher, *arguments, **named)

    monkeypatch.setattr(ExpertFetcher, "fetch", holding)
    with nothing_left():
        _close_while_fetching(folder("many"), held, go_on)


def _close_while_fetching(folder: Path, held: threading.Event, go_on: threading.Event) -> None:
    llm = bounded(folder)
    waiting = in_background(lambda: llm.logits(IDS))
    assert held.wait(SOON_S)
    closing = in_background(llm.close)
    with pytest.raises(StreamClosedError, match=r"was closed while layer layers\.0\.experts was awaited"):
        waiting.result(SOON_S)
    go_on.set()
    closing.result(SOON_S)


def test_an_expert_that_is_not_a_number_is_named_whenever_it_comes(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(folder("many") / "model.safetensors")
    for expert in range(16):
        tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder("many") / "config.json").read_bytes())
    bound_experts(monkeypatch, least_of(tmp_path))
    words = r"layer layers\.1\.experts, stage check, tensor .*down_proj\.weight: .* holds NaN"
    with pytest.raises(LayerLoadError, match=words), bounded(tmp_path, check_weights=True) as llm:
        llm.logits(IDS)
