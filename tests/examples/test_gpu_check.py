"""The logic of the GPU checks, on the CPU: what they measure runs, and what they judge can go either way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples import gpu_check
from examples.gpu_check import Claim, NoWaits, Run
from examples.gpu_measure import ONE_BILLION, Gpu, copy_rate, write_random_checkpoint
from examples.gpu_streaming import StreamedRun, run_streamed
from examples.write_tiny_model import ARCHITECTURES, TinyModel, tensor_shapes, write_tiny_model
from quant.kernels import KernelMode
from quant.registry import scheme_names
from streaming import Summary
from streaming.trace import Span

CPU = Gpu("cpu")


def run_of(*, first_forward: float = 1.0, last_read: float = 2.0, device_peak: int = 0, **sizes: int) -> Run:
    summary = Summary(first_forward_s=first_forward, load_done_s=last_read + 0.1)
    spans = (
        Span("read", "a", 0.0, last_read),
        Span("read", "embedding rows", 8.0, 9.0),
        Span("forward", "layers.0", first_forward, 3.0),
    )
    known = {"kept": 1000, "wide": 2000, "window": 100, "cache": 100} | sizes
    return Run(summary, spans, device_peak=device_peak, **known)


# --- what is judged


def test_overlap_means_that_a_layer_is_computed_before_the_last_read_ends() -> None:
    assert gpu_check.judge_overlap(run_of(first_forward=1.0, last_read=2.0)).holds
    late = gpu_check.judge_overlap(run_of(first_forward=2.5, last_read=2.0))
    assert not late.holds
    assert late.facts == {"forward_begins_before_last_read_s": -0.5}


def test_device_memory_may_be_what_the_plan_knows_and_a_tenth_more() -> None:
    assert gpu_check.judge_memory(run_of(device_peak=1320), "none").holds  # 1.1 x (1000 + 100 + 100)
    assert not gpu_check.judge_memory(run_of(device_peak=1321), "none").holds


def test_a_quantized_load_must_stay_below_the_wide_model_as_well() -> None:
    run = run_of(kept=1800, device_peak=1700)
    assert gpu_check.judge_memory(run, "none").holds
    assert not gpu_check.judge_memory(run, "fp8_per_channel").holds  # 0.8 x 2000


def test_the_speed_is_held_against_the_slower_of_reading_and_copying() -> None:
    claim = gpu_check.judge_speed(nbytes=10**9, read_s=0.2, copy_s=0.05, first_token_s=0.5)
    assert claim.holds
    assert claim.facts["ratio"] == 2.5
    assert claim.facts["read_bytes_per_s"] == 5 * 10**9
    assert claim.facts["copy_bytes_per_s"] == 20 * 10**9
    assert not gpu_check.judge_speed(nbytes=10**9, read_s=0.2, copy_s=0.05, first_token_s=0.9).holds
    assert not gpu_check.judge_speed(nbytes=10**9, read_s=0.2, copy_s=0.05, first_token_s=0.0).holds


def test_a_window_of_the_wrong_size_or_without_its_lock_is_a_fault() -> None:
    window = torch.zeros(64, dtype=torch.uint8)
    assert gpu_check.window_faults(window, 64, locked=False) == []
    assert gpu_check.window_faults(window, 63, locked=False) == ["the window has 64 bytes, planned were 63"]
    assert gpu_check.window_faults(window, 64, locked=True) == [
        "page-locked at its ends: [False, False], should be True"
    ]


# --- what is measured


@pytest.mark.parametrize("scheme", scheme_names())
def test_equality_is_what_verify_says_of_every_folder(tiny: Path, scheme: str) -> None:
    claim = gpu_check.check_equal([tiny], "cpu", scheme)
    assert claim.holds, claim
    weights = 3 * 4  # a layer keeps qkv, o, gate_up and down, each with its scales where there are any, and two norms
    scales = {"none": 0, "nvfp4": 2}.get(scheme, 1)
    assert claim.facts["stored_tensors"] == weights + scales * weights + 3 * 2 + 3


def test_a_verify_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    claim = gpu_check.check_equal([tmp_path / "nowhere"], "cpu", "none")
    assert not claim.holds
    assert "nowhere" in str(claim.facts["differences"])


def test_a_run_knows_the_plans_sizes(tiny: Path) -> None:
    run = gpu_check.load_and_answer(tiny, CPU, "none")
    stored = sum(tensor.nbytes for file in tiny.glob("*.safetensors") for tensor in load_file(file).values())
    assert run.kept == run.wide == stored
    assert run.cache == 2 * 3 * 2 * 40 * 16 * 2  # keys and values, layers, heads, tokens, head_dim, bytes
    assert len(run.summary.token_ids) == gpu_check.ANSWER_TOKENS
    assert run.device_peak == 0
    assert {span.lane for span in run.spans} >= {"read", "forward"}


class ToldGpu(Gpu):
    """A device that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.told: list[bool] = []

    def forbid_waits(self, forbid: bool) -> None:
        self.told.append(forbid)


def test_waits_are_forbidden_from_behind_the_first_layer_to_the_last(tiny: Path) -> None:
    gpu = ToldGpu()
    claim = gpu_check.check_no_waits(tiny, gpu, "none")
    assert claim.holds, claim
    assert claim.facts["layers_watched"] == gpu_check.ANSWER_TOKENS * 2
    assert gpu.told == [True, False] * gpu_check.ANSWER_TOKENS + [False]  # once more, whatever happened


def test_a_forbidden_wait_makes_the_claim_fail_and_is_allowed_again(tiny: Path) -> None:
    class Waiting(ToldGpu):
        def forbid_waits(self, forbid: bool) -> None:
            super().forbid_waits(forbid)
            if forbid:
                raise RuntimeError("called a synchronizing CUDA operation")

    gpu = Waiting()
    claim = gpu_check.check_no_waits(tiny, gpu, "none")
    assert not claim.holds
    assert claim.facts["error"] == "called a synchronizing CUDA operation"
    assert gpu.told == [True, False]


def test_nothing_is_forbidden_before_the_hook_is_armed() -> None:
    gpu = ToldGpu()
    hook = NoWaits(gpu, "layers.1")
    hook("layers.0", torch.zeros(1))
    hook("layers.1", torch.zeros(1))
    assert (gpu.told, hook.watched) == ([], 0)


def test_closing_leaves_nothing_behind(tiny: Path) -> None:
    claim = gpu_check.check_close(tiny, CPU)
    assert claim.holds, claim


def test_what_stays_behind_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([0, 0, 4096])
    monkeypatch.setattr(CPU, "allocated_nbytes", lambda: next(sizes))
    claim = gpu_check.check_close(tiny, CPU)
    assert claim.facts["wrong"] == ["halfway=True: device bytes: 0 before, 4096 after"]


def test_speed_is_measured_on_the_files_themselves(tiny: Path) -> None:
    facts = gpu_check.check_speed(tiny, CPU, rounds=1).facts
    assert facts["bytes"] == sum(t.nbytes for f in tiny.glob("*.safetensors") for t in load_file(f).values())
    assert float(str(facts["from_load_s"])) > 0


def test_the_copy_rate_is_bytes_over_seconds() -> None:
    assert copy_rate(CPU, [1 << 20, 1 << 10]) > 0


@pytest.mark.parametrize("load_format", gpu_check.PACKAGES)
def test_a_load_format_is_checked_where_its_package_is_and_said_not_to_be_elsewhere(
    tiny: Path, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_here = find_spec(gpu_check.PACKAGES[load_format]) is not None and load_format != "instanttensor"
    if runs_here:
        claim = gpu_check.check_load_format(tiny, CPU, load_format)
        assert (claim.holds, claim.facts) == (True, {"largest_difference": 0.0})
        other = iter([torch.zeros(2), torch.ones(2)])
        monkeypatch.setattr(gpu_check, "_logits", lambda *_: next(other))
        assert not gpu_check.check_load_format(tiny, CPU, load_format).holds
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    claim = gpu_check.check_load_format(tiny, CPU, load_format)
    assert claim.name.endswith("NOT RUN")
    assert claim.facts["package"]


# --- products


def test_products_are_timed_and_near_to_the_float32_one(capsys: pytest.CaptureFixture[str]) -> None:
    timed = gpu_check.time_kernels(CPU, shape=(48, 64), tokens=(1, 3), calls=1)
    assert {row.scheme for row in timed} >= {*scheme_names()} - {"none"}
    claim = gpu_check.judge_kernels(timed)
    assert claim.holds, claim
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2 + len(timed)
    assert {line.count("|") for line in lines} == {11}


@pytest.mark.parametrize("change", [{"error": 0.011}, {"repeats": False}])
def test_a_product_that_is_off_or_other_the_second_time_is_named(change: dict[str, object]) -> None:
    good = gpu_check.Timed("mxfp4", KernelMode.DEFAULT, 8, 0.5, 1e-5, 2e-5, 10**6, 0.002, True)
    assert gpu_check.judge_kernels([good]).holds
    claim = gpu_check.judge_kernels([good, replace(good, **change)])  # type: ignore[arg-type]
    assert not claim.holds
    assert "mxfp4 default 8" in str(claim.facts["wrong"])


# --- the checkpoint


def test_the_random_checkpoint_is_one_that_transformers_reads(tmp_path: Path) -> None:
    import transformers

    small = replace(ONE_BILLION, layers=2, hidden_size=64, heads=4, kv_heads=2, head_dim=16, intermediate_size=96)
    folder = write_random_checkpoint(tmp_path, model=replace(small, vocab_size=160), gpu=CPU)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(loaded[1].values()), loaded[1]
    assert loaded[0].config.rope_parameters["rope_type"] == "llama3"


def test_the_large_checkpoint_has_the_published_number_of_parameters() -> None:
    sizes = [torch.Size(shape).numel() for _, shape in tensor_shapes(ONE_BILLION)]
    assert sum(sizes) == 1_235_814_400  # the model card of Llama-3.2-1B says 1.23B


# --- a model that does not fit

STREAMED = StreamedRun(
    limit=100, device_peak=90, pass_nbytes=50, host_nbytes=50, token_s=1.0, copy_s=1.0, same_bits=True,
    largest_difference=0.0, read_again=0,
)  # fmt: skip


@pytest.mark.parametrize(("change", "holds"), [
    ({}, True), ({"device_peak": 101}, False), ({"same_bits": False}, False), ({"read_again": 1}, False),
])  # fmt: skip
def test_a_streamed_model_keeps_bits_and_limit(change: dict[str, object], holds: bool) -> None:
    assert gpu_check.judge_streamed(replace(STREAMED, **change), "none").holds is holds  # type: ignore[arg-type]


def test_the_time_of_a_token_is_held_against_its_copies() -> None:
    assert gpu_check.judge_token(replace(STREAMED, token_s=1.25)).holds
    assert not gpu_check.judge_token(replace(STREAMED, token_s=1.35)).holds


@pytest.mark.parametrize("scheme", ["none", "int8_per_channel"])
def test_what_is_measured_of_a_streamed_model_runs(scheme: str, tmp_path: Path) -> None:
    model = TinyModel(layers=4, hidden_size=128, intermediate_size=512)
    run = run_streamed(write_tiny_model(tmp_path / "model", model=model), CPU, scheme)
    assert run.same_bits
    assert run.pass_nbytes > 0
    assert run.token_s > 0 < run.copy_s


# --- the program


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert gpu_check.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "finds no CUDA device" in err


@pytest.mark.parametrize(("holds", "status"), [(True, 0), (False, 1)])
def test_it_prints_one_json_object_and_a_table(
    holds: bool, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(*_given: object, **_named: object) -> list[tuple[str, Callable[[], Claim]]]:
        def broken() -> Claim:
            raise ValueError("no such thing")

        return [("first", lambda: Claim("first", True, {"n": 1}))] + ([] if holds else [("second", broken)])

    monkeypatch.setattr(gpu_check, "cuda_device", lambda _name: torch.device("cpu"))
    monkeypatch.setattr(gpu_check, "checks", checks)
    assert gpu_check.main([]) == status
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["holds"] is holds
    assert found["claims"][0] | {"seconds": 0} == {"name": "first", "holds": True, "n": 1, "seconds": 0}
    assert err.splitlines()[0].startswith("yes  first")
    if not holds:
        assert "ValueError: no such thing" in err.splitlines()[1]
        assert err.splitlines()[1].startswith("NO   second")


def test_every_scheme_and_every_family_is_checked(tmp_path: Path) -> None:
    names = [name for name, _ in gpu_check.checks(tmp_path, CPU, large=TinyModel())]
    for scheme in scheme_names():
        assert {f"equal {scheme}, tiny", f"equal {scheme}", f"memory {scheme}", f"no waits {scheme}"} <= set(names)
        assert f"streamed {scheme}" in names
    assert {"streamed token", "overlap", "close", "speed", "products", "load format instanttensor"} <= set(names)
    assert {*ARCHITECTURES, "random"} == {path.name for path in tmp_path.iterdir()}
