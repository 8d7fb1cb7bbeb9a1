"""One rank alone of several: its own layers, and nobody to wait for."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch

from layers.topology import Topology
from streaming.clock import RunClock
from streaming.errors import OptionError
from streaming.evaluate import prompt_logits
from streaming.hooks import Hooks
from streaming.llm import LLM
from streaming.model_run import run_model
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from streaming.ranks.lone_rank import LoneRank
from streaming.reader import open_reader
from streaming.trace import Tracer

IDS = [3, 1, 4, 1, 5]


async def logits_alone(prepared: Prepared) -> torch.Tensor:
    with closing(open_reader(prepared.read_plan)) as reader:
        async with run_model(
            prepared, reader, tracer=Tracer(), clock=RunClock(0.0), hooks=Hooks(), ranks=LoneRank(prepared.topology)
        ) as model:
            assert await anyio.to_thread.run_sync(model.wait_loaded)
            job = model.submit_call(lambda runner, stop: prompt_logits(model, IDS, stop))
            found: torch.Tensor = await anyio.to_thread.run_sync(partial(next, job.results()))
            return found


def test_a_rank_that_has_it_all_computes_the_model(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        expected = llm.logits(IDS)
    alone = anyio.run(logits_alone, prepare(str(four_layers), LoadOptions()))
    assert alone.numpy().tobytes() == expected.numpy().tobytes()


def test_a_rank_of_two_loads_its_part_and_its_sums_lack_the_others(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        whole = llm.logits(IDS)
    found = anyio.run(logits_alone, prepare(str(four_layers), LoadOptions(tensor_parallel_size=2)))
    assert found.shape == whole.shape
    assert found.isfinite().all()
    assert not torch.equal(found, whole)


def test_a_stage_needs_the_one_before() -> None:
    with pytest.raises(OptionError, match="one rank alone of 2 stages has nothing to compute: give it one"):
        LoneRank(Topology(pipeline=2))
