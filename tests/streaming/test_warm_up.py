"""Kernels of a GPU are compiled while the load goes on: which products are tried, where, and that none of it shows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from quant.kernels import Kernels
from quant.registry import scheme_names
from streaming import LLM, LoadOptions, warm_up
from streaming.prepare import prepare
from streaming.warm_up import TOKENS, DeviceWarmUp, Trial, run_trial, trials_of
from tests.streaming.test_cuda_device import FakeCuda, cuda  # noqa: F401  (a fixture)
from tests.streaming.waiting import SOON_S, until

IDS = [3, 1, 4, 1, 5]
Folders = Callable[[TinyModel], Path]


def trials(folder: Path, **options: Any) -> tuple[Trial, ...]:
    return trials_of(prepare(str(folder), LoadOptions(**options)).specs)


def test_there_is_a_trial_for_each_kind_of_product_and_range_of_tokens(tiny_folder: Folders) -> None:
    folder = tiny_folder(TinyModel(family="qwen2", layers=3, intermediate_size=104))
    found = trials(folder, quantization="fp8_per_tensor")
    assert [trial.tokens for trial in found] == [count for count in TOKENS for _ in range(len(found) // len(TOKENS))]
    first = found[: len(found) // len(TOKENS)]
    assert [(one.scheme.name, one.sections, one.columns, one.bias) for one in first] == [
        ("fp8_per_tensor", (64, 64), 64, True),  # q, k and v
        ("fp8_per_tensor", (64,), 64, False),  # o
        ("fp8_per_tensor", (72, 72), 64, False),  # gate and up: rows that are no multiple of 16 stay so
        ("fp8_per_tensor", (64,), 104, False),  # down
        ("none", (64,), 64, False),  # the head
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantization", scheme_names())
def test_every_scheme_can_be_tried(tiny_folder: Folders, quantization: str, dtype: str) -> None:
    for trial in trials(tiny_folder(TinyModel(layers=1)), quantization=quantization, dtype=dtype):
        out = run_trial(trial, device=torch.device("cpu"), kernels=Kernels())
        assert out.shape == (trial.tokens, sum(trial.sections))
        assert out.dtype == getattr(torch, dtype)


def test_nothing_is_tried_on_a_cpu(four_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "run_trial", None)
    monkeypatch.setattr(warm_up, "DeviceWarmUp", None)
    with LLM(four_layers, quantization="int8_per_channel") as llm:
        llm.logits(IDS)


def test_all_are_tried_on_a_gpu_in_a_thread_of_their_own(
    four_layers: Path,
    cuda: FakeCuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Trial] = []
    threads = set()

    def noted(trial: Trial, *, device: torch.device, kernels: Kernels) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        found = run_trial(trial, device=device, kernels=kernels)
        tried.append(trial)
        return found

    monkeypatch.setattr(warm_up, "run_trial", noted)
    expected = trials(four_layers, quantization="mxfp4")
    with LLM(four_layers, quantization="mxfp4") as llm:
        logits = llm.logits(IDS)
    with LLM(four_layers, quantization="mxfp4", device="cuda") as llm:
        assert torch.equal(llm.logits(IDS), logits)
        until(lambda: len(tried) == len(expected))
    assert tuple(tried) == expected
    assert threads == {"firstlayer-warm-up"}


def test_a_failure_is_the_forward_passs_own_to_meet(
    four_layers: Path,
    cuda: FakeCuda,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = threading.Event()

    def fail(*_: object, **__: object) -> None:
        begun.set()
        raise RuntimeError("no compiler")

    monkeypatch.setattr(warm_up, "run_trial", fail)
    with LLM(four_layers, quantization="fp8_per_channel", device="cuda") as llm:
        assert llm.logits(IDS).isfinite().all()
        assert begun.wait(SOON_S)


def test_closing_waits_for_the_trial_in_hand_and_begins_no_other(
    four_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, tried = threading.Event(), threading.Event(), list[Trial]()

    def held(trial: Trial, **_: object) -> None:
        tried.append(trial)
        begun.set()
        assert go.wait(SOON_S)

    monkeypatch.setattr(warm_up, "run_trial", held)
    wanted = trials(four_layers, quantization="fp8_per_channel")
    warming = DeviceWarmUp(wanted, device=torch.device("cpu"), kernels=Kernels())
    assert begun.wait(SOON_S)
    closing = threading.Thread(target=warming.close)
    closing.start()
    until(warming._stopped.is_set)
    go.set()
    closing.join(SOON_S)
    assert not closing.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == "firstlayer-warm-up"]
    assert tried == [wanted[0]]
