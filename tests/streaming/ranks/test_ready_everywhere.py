"""A layer is used when all ranks have it; steps of ranks that load, are cancelled, are closed, keep less precision."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from layers.kv_cache import KVCache
from layers.sampling_params import SamplingParams
from quant.dtypes import DType
from streaming.answers import Request
from streaming.errors import WorkerError
from streaming.evaluate import prompt_logits
from streaming.hooks import Hooks
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.residency import LayerState, Residency
from tests.streaming.ranks.test_steps_on_ranks import write_config
from tests.streaming.ranks.threaded import open_ranked
from tests.streaming.waiting import until

IDS = (1, 2, 3, 4)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}


class Gate:
    """Holds a rank's loading when it has published a layer, until it is opened."""

    def __init__(self, layer: str) -> None:
        self._place, self._open = (layer, "publish"), threading.Event()

    def on_stage(self, layer: str, stage: str, nbytes: int, seconds: float) -> None:
        if (layer, stage) == self._place:
            assert self._open.wait(30)

    @property
    def hooks(self) -> Hooks:
        return Hooks(on_stage=self.on_stage)

    def open(self) -> None:
        self._open.set()


def test_a_slow_rank_is_waited_for_and_the_wait_is_booked_on_it(four_layers: Path) -> None:
    gate = Gate("layers.1")
    with open_ranked(four_layers) as one:
        expected = one.logits(IDS)
    with open_ranked(four_layers, hooks={1: gate.hooks}, **TWO) as ranked:
        model = ranked.model
        job = model.submit_call(lambda runner, stop: prompt_logits(model, IDS, stop))
        until(lambda: model.residency._stages["layers.2"] == "rank 1" and model.runner.at == "layers.2")
        assert model.readiness["layers.1"] is LayerState.READY
        assert model.readiness["layers.2"] is LayerState.LOADING
        assert not model.wait_loaded(0)
        gate.open()
        torch.testing.assert_close(next(job.results()), expected, rtol=0, atol=1e-4)
        model.wait_loaded(20)
        assert model.stats().stalls["rank 1"] > 0
        stalls = [(span.name, span.layer) for span in model.tracer.spans() if span.lane == "stall"]
        assert ("rank 1", "layers.2") in stalls
        assert set(model.readiness.values()) == {LayerState.READY}


def test_the_wait_for_rank_0_is_one_for_other_ranks_at_a_follower_and_no_error(four_layers: Path) -> None:
    gate = Gate("layers.0")
    with open_ranked(four_layers, hooks={0: gate.hooks}, **TWO) as ranked:
        model = ranked.model
        job = model.submit_call(lambda runner, stop: prompt_logits(model, IDS, stop))
        until(lambda: ranked.model.rank_progress().get(1) == ("", "forward"))  # it has loaded all
        assert model.readiness["layers.1"] is not LayerState.READY
        gate.open()
        assert next(job.results()).shape[0] == len(IDS)


def test_what_the_other_ranks_have_read_and_kept_is_known_once_all_have_loaded(four_layers: Path) -> None:
    with open_ranked(four_layers, **TWO) as ranked:
        ranked.model.wait_loaded(20)
        report = ranked.model.rank_reports()[1]
        own = ranked.model.stats()
    assert 0 < report.bytes_kept < own.bytes_kept  # of 160 rows of the vocabulary it has 32, rank 0 has 128
    assert own.peak_rss_bytes > report.peak_rss_bytes > 0


def test_a_request_is_cancelled_between_steps_and_the_next_one_is_right(four_layers: Path) -> None:
    with open_ranked(four_layers, **TWO) as ranked:
        (expected,) = ranked.complete([IDS])
        long = Request(IDS, SamplingParams(max_tokens=100))
        job = ranked.model.submit([long], None)
        job.next_result()
        job.cancel()
        assert ranked.complete([IDS]) == [expected]


def test_closing_while_other_ranks_still_load_is_no_error(four_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, wait = threading.Event(), Residency.wait_everywhere

    def note(residency: Residency) -> None:
        waiting.set()
        wait(residency)

    monkeypatch.setattr(Residency, "wait_everywhere", note)
    monkeypatch.setattr(Residency, "others_loaded", lambda residency: None)  # rank 0 never hears of it
    with open_ranked(four_layers, **TWO) as ranked:
        assert waiting.wait(30)
    assert ranked.model.load_error is None


def test_a_cache_that_the_model_did_not_make_is_refused(four_layers: Path) -> None:
    with open_ranked(four_layers, **TWO) as ranked:
        model = ranked.model

        def work(runner: object, stop: object) -> torch.Tensor:
            config = model.prepared.local_config
            foreign = KVCache(config, max_tokens=4, dtype=DType.F32)
            from layers.batch import make_batch

            batch = make_batch([(IDS, foreign)], vocab_size=config.vocab_size)
            return model.runner.forward(batch, [0], stop=lambda: None)

        with pytest.raises(WorkerError, match="new_cache"):
            next(model.submit_call(work).results())
        assert ranked.logits(IDS).shape[0] == len(IDS)


def test_caches_of_finished_requests_are_given_up_everywhere(four_layers: Path) -> None:
    with open_ranked(four_layers, **TWO) as ranked:
        assert ranked.lead is not None
        for _ in range(3):
            ranked.complete([IDS, IDS])
        until(lambda: len(ranked.lead._numbers) == 0)  # type: ignore[union-attr]
        assert len(ranked.lead._dropped) == 2  # of the last request: told with the next step


def test_a_follower_gives_up_old_caches_before_it_makes_new_ones(four_layers: Path) -> None:
    """Rank 1 has far fewer rows of the vocabulary: what its limit leaves it would hold a few caches more, not all."""
    options: dict[str, Any] = {**TWO, "max_model_len": 128}
    limit = prepare(str(four_layers), LoadOptions(dtype="float32", **options)).budget.peak_nbytes
    with open_ranked(four_layers, memory=limit, **options) as ranked:
        for _ in range(12):
            job = ranked.model.submit([Request(IDS, SamplingParams(max_tokens=124, ignore_eos=True))], None)
            job.next_result()
            job.cancel()
        assert len(ranked.complete([IDS])) == 1


def test_rank_0_keeps_nothing_in_caches_of_sequences_that_another_replica_computes(tmp_path: Path) -> None:
    with open_ranked(write_config(tmp_path, "mixtral"), load_format="dummy", expert_parallel_size=2) as ranked:
        first, second = (ranked.model.new_cache(8) for _ in range(2))
        assert first.nbytes > 0
        assert (second.nbytes, second.capacity) == (0, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "fp8_per_channel"},
        {"quantization": "int8_per_channel", "activation_dtype": "int8"},
        {"quantization": "int4_per_group:32", "kernels": "fast", "dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_low_precision_on_two_ranks_is_that_on_one(four_layers: Path, options: dict[str, Any]) -> None:
    with open_ranked(four_layers, **options) as one:
        logits, answers = one.logits(IDS), one.complete([IDS], max_tokens=4)
    with open_ranked(four_layers, **TWO, **options) as ranked:
        atol = 0.1 if "dtype" in options or "activation_dtype" in options else 1e-4
        torch.testing.assert_close(ranked.logits(IDS), logits, rtol=0, atol=atol)
        assert ranked.complete([IDS], max_tokens=4) == answers
