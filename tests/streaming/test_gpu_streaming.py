"""Weights that pass through a GPU's memory, on a machine without one: the same bits, the right order, the host's tier.

torch's CUDA functions are replaced (test_cuda_device.FakeCuda), memory is the CPU's; late_cuda.LateCuda looks at what
each stream is ordered behind. examples/gpu_check.py shows the same on a GPU.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel, write_tiny_model
from layers.sampling_params import SamplingParams
from quant.device_features import DeviceFeatures
from streaming import LLM, BudgetError, OptionError
from streaming.device import CudaDevice
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from streaming.residency import Residency
from streaming.stream_plan import lies_as_stored
from streaming.trace import Tracer
from streaming.unit_memory import GpuUnits
from streaming.weight_stream import WeightStream
from tests.layers.tiny import some_ids
from tests.streaming.late_cuda import LateCuda
from tests.streaming.leftovers import nothing_left
from tests.streaming.limits import limit_of, limits_of
from tests.streaming.test_cuda_device import FakeCuda, cuda

__all__ = ["cuda"]  # a fixture

PROMPT = some_ids(7, vocab_size=101, seed=7)
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cuda", "reader": "threads", "max_model_len": 64}
Tiny = Callable[[TinyModel], Path]
MODEL = TinyModel(layers=4)
SCHEMES = ("none", "int8_per_channel", "fp8_per_tensor", "fp8_per_block", "int4_per_group", "nvfp4")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path / "cache"))


def streaming(folder: Path, share: float = 0.0, host: float | None = None, **options: Any) -> dict[str, Any]:
    """Options of a load within a GPU's memory between the least and all of it; `host`: the share of the streamed
    weights that the host's memory holds."""
    options = {**OPTIONS, **options}
    options["gpu_memory"] = limit_of(folder, share, **options)
    if host is not None:
        budget = planned(folder, **options).budget
        passing = budget.host_nbytes - budget.tier_nbytes
        options["host_memory"] = passing + int(host * budget.tier_nbytes)
    return options


def planned(folder: Path, **options: Any) -> Prepared:
    return prepare(str(folder), LoadOptions(**options))


def tokens_of(folder: Path, **options: Any) -> tuple[tuple[int, ...], torch.Tensor]:
    with LLM(folder, **options) as llm:
        return llm.complete([PROMPT], GREEDY)[0].token_ids, llm.logits(PROMPT)


def assert_equal(found: tuple[Any, torch.Tensor], expected: tuple[Any, torch.Tensor]) -> None:
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


# --- the same bits


@pytest.mark.parametrize("host", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_pass_through_a_gpu_give_the_bits_of_resident_ones(
    scheme: str, host: float, tiny_folder: Tiny, cuda: FakeCuda
) -> None:
    folder = tiny_folder(MODEL)
    expected = tokens_of(folder, max_model_len=64, reader="threads", quantization=scheme)
    with LLM(folder, **streaming(folder, 0.2, host, quantization=scheme)) as llm:
        assert_equal((llm.complete([PROMPT], GREEDY)[0].token_ids, llm.logits(PROMPT)), expected)
        stats = llm.stats()
    assert stats.stream["copied_bytes"] >= 5 * stats.stream["pass_bytes"] > 0
    assert (stats.stream["host_bytes"] > 0) == (host > 0)
    assert stats.peak_budget_bytes <= (stats.limit_bytes or 0)


def test_a_head_of_several_runs_of_rows_passes_through_too(tiny_folder: Tiny, cuda: FakeCuda) -> None:
    large, small = TinyModel(layers=1, hidden_size=64, vocab_size=20_000), MODEL
    quantized: dict[str, Any] = {"quantization": "int8_per_channel", "quantize_head": True}
    for model, options in ((large, {}), (small, quantized)):
        folder = tiny_folder(model)
        expected = tokens_of(folder, max_model_len=64, reader="threads", **options)
        for share in (0.0, 0.3):
            assert_equal(tokens_of(folder, **streaming(folder, share, 0.5, **options)), expected)


def test_what_a_device_needs_done_to_a_weight_is_done_behind_each_copy(
    tiny_folder: Tiny, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of e4m3fnuz, made of this machine: the same bits as of a load without a limit, which is processed
    once."""
    folder, scheme = tiny_folder(MODEL), "fp8_per_channel"
    own = DeviceFeatures.detect
    fnuz = DeviceFeatures(fnuz=True)
    monkeypatch.setattr("streaming.device.cuda_device", lambda _name: torch.device("cpu", 0))
    monkeypatch.setattr(
        DeviceFeatures, "detect", lambda device, *, triton: fnuz if device.index == 0 else own(device, triton=triton)
    )
    expected = tokens_of(folder, **OPTIONS, quantization=scheme)
    with LLM(folder, **streaming(folder, 0.0, 0.5, quantization=scheme)) as llm:
        assert_equal((llm.complete([PROMPT], GREEDY)[0].token_ids, llm.logits(PROMPT)), expected)
        stream = llm.model.runner.stream
        assert stream is not None
        with stream.lease("model.layers.0.mlp.down_proj.weight", stop=lambda: None) as stored:
            assert stored is not None
            assert stored["weight"].dtype == torch.float8_e4m3fnuz


@pytest.mark.parametrize("options", [{}, {"quantization": "int8_per_channel"}, {"dtype": "float32"}])
def test_what_lies_in_a_file_as_stored_is_what_a_load_to_the_cpu_reads_into_place(
    options: dict[str, Any], tiny_folder: Tiny
) -> None:
    plan = planned(tiny_folder(MODEL), **options).plan
    assert [lies_as_stored(item) for item in plan.items] == [item.direct for item in plan.items]


# --- who waits for whom


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("straight"), model=TinyModel(layers=6))


def late_logits(folder: Path) -> torch.Tensor:
    """With the smallest ring, so that every unit overwrites another; all streamed weights are in the host's memory."""
    with LLM(folder, **streaming(folder, 0.0, 1.0)) as llm:
        for _ in range(3):
            found = llm.logits(PROMPT)
        return found


def test_products_wait_for_copies_and_copies_for_products(
    straight: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = tokens_of(straight, max_model_len=64)
    late = LateCuda(monkeypatch, runs_late=True)
    assert torch.equal(late_logits(straight), expected)
    assert late.copies > 50
    assert late.faults == []


@pytest.mark.parametrize("wait", ["hold_back", "compute_moment"])
def test_a_copy_that_does_not_wait_for_the_products_before_it_is_found(
    wait: str, straight: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateCuda(monkeypatch, runs_late=True)
    monkeypatch.setattr(CudaDevice, wait, lambda *_: None)
    late_logits(straight)
    assert any("the device's memory" in fault for fault in late.faults)


def test_products_that_do_not_wait_for_copies_read_what_was_there_before(
    straight: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = tokens_of(straight, max_model_len=64)
    LateCuda(monkeypatch, runs_late=True)
    monkeypatch.setattr(GpuUnits, "lease", lambda *_: None)
    assert not torch.equal(late_logits(straight), expected)


def test_staging_is_used_again_only_when_its_copy_has_ended(
    straight: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(straight, max_model_len=64)
    cuda_streams = LateCuda(monkeypatch, runs_late=False)
    options = streaming(straight, 0.5, 0.0)
    assert_equal(tokens_of(straight, **options), expected)
    assert cuda_streams.faults == []
    late = LateCuda(monkeypatch, runs_late=True)  # whose copies have not ended when their event has been awaited
    with LLM(straight, **options):
        late.wait_for_copies(4)  # of units ahead, while nothing is computed
    assert any("the host's memory" in fault for fault in late.faults)


def test_the_host_waits_for_no_copy_in_the_forward_thread(
    straight: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    awaited: set[str] = set()
    await_moment = CudaDevice.await_moment

    def noted(device: CudaDevice, moment: object) -> None:
        awaited.add(threading.current_thread().name)
        await_moment(device, moment)

    monkeypatch.setattr(CudaDevice, "await_moment", noted)
    with LLM(straight, **streaming(straight, 0.0, 0.5)) as llm:
        llm.wait_loaded()
        awaited.clear()
        llm.complete([PROMPT], GREEDY)
        assert awaited
        assert all(name.startswith("firstlayer-stream-") for name in awaited)


# --- the host's tier


def spans(llm: LLM, lane: str) -> Counter[str]:
    return Counter(span.name for span in llm.tracer.spans() if span.lane == lane)


@pytest.mark.parametrize("scheme", ["none", "int8_per_channel"])
@pytest.mark.parametrize("cache_size", [None, 0])
def test_what_the_host_keeps_is_read_and_quantized_once(
    scheme: str, cache_size: int | None, tiny_folder: Tiny, cuda: FakeCuda
) -> None:
    folder = tiny_folder(MODEL)
    options = streaming(folder, 0.0, 0.5, quantization=scheme, cache_size=cache_size)
    stream = planned(folder, **options).plan.stream
    assert stream is not None
    tier = [unit for unit in stream.units if unit.name in stream.tier]
    others = [unit for unit in stream.streamed if unit.name not in stream.tier]
    assert tier
    assert others
    with LLM(folder, **options) as llm:
        for _ in range(4):
            llm.logits(PROMPT)
        read, made, copied = (spans(llm, lane) for lane in ("read", "quantize", "copy"))
        held = llm.stats().stream["host_bytes"]
    assert held == sum(unit.nbytes for unit in tier) == stream.tier_nbytes
    for unit in tier:
        assert copied[unit.name] >= 4
        tensors = {item.tensor.name for item in unit.items}
        assert read[unit.name] == (unit.name in tensors)  # never again from the cache on disk
        for item in unit.items:
            assert (read[item.tensor.name], made[item.tensor.name]) == (1, 0 if unit.is_straight else 1)
    for unit in others:
        again = unit.name if unit.is_worth_keeping and cache_size != 0 else unit.items[0].tensor.name
        assert read[again] >= 3


def test_the_tier_is_spread_evenly_over_the_streamed_layers(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=8))
    stream = planned(folder, **streaming(folder, 0.0, 0.5)).plan.stream
    assert stream is not None
    whole = [
        int(layer.partition(".")[2])
        for layer in stream.layers(kept=False)
        if layer != "head" and all(unit.name in stream.tier for unit in stream.streamed if unit.layer == layer)
    ]
    assert len(whole) >= 3
    assert max(b - a for a, b in pairwise(whole)) <= 3


def test_page_locks_that_are_refused_are_told_once_and_change_nothing_else(
    straight: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(straight, max_model_len=64)
    monkeypatch.setattr(CudaDevice, "page_lock", lambda *_: 2)
    with LLM(straight, **streaming(straight, 0.0, 0.5)) as llm:
        assert_equal((llm.complete([PROMPT], GREEDY)[0].token_ids, llm.logits(PROMPT)), expected)
        warnings = llm.stats().warnings
    assert [one for one in warnings if "page-locking" in one and "CUDA error 2" in one] == list(warnings)
    assert len(warnings) == 1


# --- another limit while it runs, and the end


def test_the_limit_changes_while_tokens_are_made(tiny_folder: Tiny, cuda: FakeCuda) -> None:
    folder, generator = tiny_folder(TinyModel(layers=6)), random.Random(3)
    least, whole = limits_of(folder, **OPTIONS)
    with LLM(folder, max_model_len=64) as llm:
        expected = llm.logits(PROMPT)
    with LLM(folder, **OPTIONS, memory=whole) as llm:
        llm.wait_loaded()
        for _ in range(25):
            llm.set_memory(generator.randint(least + (whole - least) // 4, int(1.3 * whole)))
            assert torch.equal(llm.logits(PROMPT), expected)
            stats, stream = llm.stats(), llm.model.runner.stream
            assert stats.peak_budget_bytes <= (stats.limit_bytes or 0)
        assert stream is not None


def test_changes_of_the_limit_keep_the_order_of_copies(
    tiny_folder: Tiny, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, generator = tiny_folder(TinyModel(layers=6)), random.Random(5)
    least, whole = limits_of(folder, **OPTIONS)
    with LLM(folder, max_model_len=64) as llm:
        expected = llm.logits(PROMPT)
    late = LateCuda(monkeypatch, runs_late=False)
    with LLM(folder, **OPTIONS, memory=least + (whole - least) // 2, host_memory="1GiB") as llm:
        for _ in range(20):
            assert torch.equal(llm.logits(PROMPT), expected)
            llm.set_memory(generator.randint(least + (whole - least) // 4, int(1.2 * whole)))
    assert late.copies > 20
    assert late.faults == []


def locks(cuda: FakeCuda) -> Counter[int]:
    """By address: how often it was locked, less how often unlocked."""
    found: Counter[int] = Counter()
    for entry in cuda.log:
        if entry[0] in ("register", "unregister"):
            found[entry[1]] += 1 if entry[0] == "register" else -1
    return +found


def run_for(passes: int, options: dict[str, Any], folder: Path) -> None:
    with LLM(folder, **options) as llm:
        pieces = llm.pieces([PROMPT], SamplingParams(max_tokens=20, ignore_eos=True))
        for _ in range(passes):
            next(iter(pieces))


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("scheme", ["none", "int8_per_channel"])
def test_nothing_is_left_whenever_it_is_closed(scheme: str, passes: int, tiny_folder: Tiny, cuda: FakeCuda) -> None:
    folder = tiny_folder(MODEL)
    options = streaming(folder, 0.1, 0.5, quantization=scheme)
    run_for(1, options, folder)  # what is imported once is not left behind
    with nothing_left():
        run_for(passes, options, folder)
    assert "register" in cuda.names()
    assert not locks(cuda)


def test_page_locks_go_back_when_the_limit_grows(tiny_folder: Tiny, cuda: FakeCuda) -> None:
    folder = tiny_folder(MODEL)
    options = streaming(folder, 0.0, 1.0)
    _, whole = limits_of(folder, **OPTIONS)
    with LLM(folder, **options) as llm:
        llm.logits(PROMPT)
        assert llm.stats().stream["host_bytes"] > 0
        llm.set_memory(2 * whole)
        llm.logits(PROMPT)
        llm.logits(PROMPT)
        assert llm.stats().stream["host_bytes"] == 0
        assert len(locks(cuda)) <= 2  # the window and staging


def test_a_copy_that_fails_ends_the_stream_with_its_error(
    straight: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("the device is gone")

    monkeypatch.setattr(CudaDevice, "copy", fail)
    with pytest.raises(MemoryError, match="the device is gone"), LLM(straight, **streaming(straight)) as llm:
        llm.logits(PROMPT)
    assert not locks(cuda)


def test_a_unit_that_has_come_to_stay_meanwhile_is_found(tiny_folder: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up while it was written to the cache, and its next load, to stay, is over before who waits looks."""
    folder = tiny_folder(MODEL)
    plan = planned(folder, memory=limit_of(folder, 0.0)).plan.stream
    assert plan is not None
    loading: Any = SimpleNamespace(
        begin=lambda _unit: None, jobs=lambda unit, _place: [unit.items], was_viewed=lambda _: False, viewed={}
    )
    stream = WeightStream(plan, loading, Residency([unit.layer for unit in plan.units], Tracer()), lambda _param: None)
    unit = plan.streamed[0]
    with stream._changed:
        assert stream._begin()
    entry = stream._live[unit.name]
    entry.users, entry.is_dropped = 1, True

    def wait() -> None:
        assert not stream._own
        stream._own[unit.name] = stream._live.pop(unit.name)
        monkeypatch.setattr(stream, "_begin", lambda: pytest.fail("another one was begun"))

    monkeypatch.setattr(stream._changed, "wait", wait)
    assert stream._claim(unit) is entry


# --- options and budgets


@pytest.mark.parametrize(("options", "words"), [
    ({"gpu_memory": "1GiB"}, "--gpu-memory 1GiB needs --device cuda; on the CPU --memory is the limit"),
    ({"memory": "1GiB", "host_memory": "2GiB"}, "--memory 1GiB and --host-memory 2GiB limit the same memory"),
    ({"device": "cuda", "memory": "1GiB", "gpu_memory": "2GiB"}, "--memory 1GiB and --gpu-memory 2GiB limit the same"),
    ({"device": "cuda", "gpu_memory": "much"}, "--gpu-memory 'much': a size such as"),
    ({"device": "cuda", "host_memory": "-1"}, "--host-memory '-1': a size such as"),
])  # fmt: skip
def test_limits_that_cannot_be_are_refused_with_both_numbers(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        LoadOptions(**options)


@pytest.mark.parametrize(("options", "flag", "nbytes"), [
    ({"memory": "1KiB"}, "--memory", 1024), ({"host_memory": "1KiB"}, "--host-memory", 1024),
    ({"memory": "1KiB", "host_memory": 1024}, "--host-memory", 1024),
    ({"device": "cuda", "memory": "1KiB"}, "--memory", 1024),
    ({"device": "cuda", "memory": "1KiB", "host_memory": "2KiB"}, "--memory", 1024),
    ({"device": "cuda:1", "gpu_memory": "1KiB", "host_memory": "2KiB"}, "--gpu-memory", 1024),
    ({"device": "cuda", "host_memory": "2KiB"}, "--memory", None),
])  # fmt: skip
def test_the_limit_is_that_of_the_memory_that_is_computed_in(
    options: dict[str, Any], flag: str, nbytes: int | None
) -> None:
    found = LoadOptions(**options)
    assert found.memory_limit[0] == flag
    assert found.memory_nbytes == nbytes
    assert found.within_memory(5).memory_nbytes == 5
    assert found.within_memory(5).host_nbytes == (found.host_nbytes if found.is_on_gpu else None)


def test_too_small_a_limit_says_what_is_needed_on_which_side(tiny_folder: Tiny) -> None:
    folder = tiny_folder(MODEL)
    least, _ = limits_of(folder, **OPTIONS)
    with pytest.raises(BudgetError, match=r"--gpu-memory .* is too small even to stream the weights: .* are needed"):
        planned(folder, **OPTIONS, gpu_memory=least - 1)
    options = streaming(folder, 0.0, 0.0)
    budget = planned(folder, **options).budget
    assert budget.tier_nbytes == 0
    assert budget.host_nbytes == options["host_memory"]
    with pytest.raises(BudgetError, match=r"--host-memory .* is too small: .* are needed on the host .* page-locked"):
        planned(folder, **{**options, "host_memory": options["host_memory"] - 1})


def test_a_window_larger_than_the_hosts_limit_is_refused_where_nothing_is_streamed(tiny_folder: Tiny) -> None:
    with pytest.raises(BudgetError, match=r"--host-memory 1000 B is too small: .* are needed on the host .*of window"):
        planned(tiny_folder(MODEL), **OPTIONS, host_memory=1000)


def test_experts_come_and_go_on_the_cpu_only(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 101,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BudgetError, match=r"--memory .* is too small: .*; experts come and go on the CPU only"):
        planned(tmp_path, **OPTIONS, load_format="dummy", memory="40KiB")


def test_auto_takes_what_is_free_on_either_side(tiny_folder: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(MODEL)
    least, whole = limits_of(folder, **OPTIONS)
    monkeypatch.setattr(
        "streaming.gpu_free_memory.free_gpu_nbytes", lambda _device, *, flag: (least + whole) // 2 / 0.9
    )
    monkeypatch.setattr("streaming.available_memory.available_nbytes", lambda: 1 << 30)
    for name in ("memory", "gpu_memory"):
        prepared = planned(folder, **OPTIONS, **{name: "auto"}, host_memory="auto")
        stream = prepared.plan.stream
        assert stream is not None
        assert prepared.budget.limit_nbytes == pytest.approx((least + whole) / 2, abs=2)
        assert stream.tier == {unit.name for unit in stream.streamed} != set()
    monkeypatch.setattr("streaming.available_memory.available_nbytes", lambda: None)
    with pytest.raises(OptionError, match="--host-memory auto: this system does not say"):
        planned(folder, **OPTIONS, memory=least, host_memory="auto")
    without = planned(folder, **OPTIONS, memory=least).plan.stream
    assert without is not None
    assert not without.tier


def test_without_a_driver_auto_asks_for_a_size(tiny_folder: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(OptionError, match=r"--gpu-memory auto: the driver does not say .* cuda:1 .*; give a size"):
        planned(tiny_folder(MODEL), **{**OPTIONS, "device": "cuda:1"}, gpu_memory="auto")


def test_the_dry_run_shows_the_tiers(tiny_folder: Tiny) -> None:
    folder = tiny_folder(MODEL)
    options = streaming(folder, 0.2, 0.5)
    stream = planned(folder, **options).plan.stream
    assert stream is not None
    command = [
        sys.executable, "-m", "streaming", "plan", str(folder), "--device", "cuda", "--max-model-len", "64",
        "--gpu-memory", str(options["gpu_memory"]), "--host-memory", str(options["host_memory"]),
    ]  # fmt: skip
    found = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout)
    assert found["stream"]["host_bytes"] == stream.tier_nbytes > 0
    assert found["stream"]["staging_bytes"] == stream.staging_nbytes > 0
    assert found["stream"]["disk_bytes"] == stream.pass_disk_nbytes > 0
    assert found["peak"]["host_total"] <= options["host_memory"]
    assert found["peak"]["total"] <= options["gpu_memory"]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "on the host" in words
