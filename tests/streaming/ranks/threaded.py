"""All ranks of a run as threads of one process: real process groups, a real control channel, no start of interpreters.

What ends a whole process (a rank that fails) needs real ones; everything else is tested so, in tenths of a second.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from layers.sampling_params import SamplingParams
from streaming.answers import Completion, Request
from streaming.clock import RunClock
from streaming.evaluate import prompt_logits
from streaming.hooks import Hooks
from streaming.model import StreamedModel
from streaming.model_run import run_model
from streaming.options import LoadOptions
from streaming.portal import LoopThread
from streaming.prepare import prepare
from streaming.ranks import spoke
from streaming.ranks.hub import Hub, open_hub
from streaming.ranks.lead import Lead
from streaming.ranks.serve import serve
from streaming.ranks.spoke import connect
from streaming.reader_choice import start_reader
from streaming.trace import Tracer


@dataclass(frozen=True)
class RankedModel:
    """Rank 0's model, while the other ranks serve."""

    model: StreamedModel
    hub: Hub
    lead: Lead | None

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Of every position."""
        job = self.model.submit_call(lambda runner, stop: prompt_logits(self.model, ids, stop))
        found: torch.Tensor = next(job.results())
        return found

    def complete(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 8) -> list[tuple[int, ...]]:
        """The greedy answers to several prompts at once."""
        requests = [Request(tuple(ids), SamplingParams(max_tokens=max_tokens, temperature=0.0)) for ids in prompts]
        found = [event for event in self.model.submit(requests, None).results() if isinstance(event, Completion)]
        return [completion.token_ids for completion in sorted(found, key=lambda completion: completion.index)]


@contextmanager
def open_ranked(folder: Path, *, hooks: Mapping[int, Hooks] | None = None, **options: Any) -> Iterator[RankedModel]:
    """The model on as many ranks as the options say. `hooks` by rank. A follower's error is raised at the end."""
    defaults: dict[str, Any] = {"dtype": "float32", "reader": "threads", "threads": 1, "rank_timeout": 30.0}
    asked = LoadOptions(**defaults | options)
    topology, given, errors = asked.topology(), hooks or {}, list[BaseException]()
    with ExitStack() as stack:
        stack.enter_context(patch.object(spoke, "os", SimpleNamespace(_exit=_end_thread, write=os.write)))
        hub = stack.enter_context(open_hub(topology.world, token="word", rank_timeout_s=asked.rank_timeout))

        def follow(rank: int) -> None:
            channel = connect("127.0.0.1", hub.port, rank=rank, token="word", timeout_s=30)
            try:
                prepared = prepare(str(folder), asked, rank=rank)
                with closing(start_reader(prepared)) as reader:
                    serve(prepared, reader, channel, hooks=given.get(rank))
            except Exception as error:
                errors.append(error)
                channel.send({"kind": "failed", "message": str(error)})
            finally:
                channel.close()

        threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, topology.world)]
        for thread in threads:
            thread.start()
        prepared = prepare(str(folder), asked)
        lead = None if topology.is_single else Lead(hub, topology)
        with closing(start_reader(prepared)) as reader, closing(LoopThread()) as loop:
            clock = RunClock(start_s=time.monotonic())
            running = run_model(prepared, reader, tracer=Tracer(), clock=clock, hooks=given.get(0, Hooks()), ranks=lead)
            yield RankedModel(loop.enter(running), hub, lead)
        hub.close()
        for thread in threads:
            thread.join(timeout=20)
    if errors:
        raise errors[0]


def _end_thread(status: int) -> None:
    """In place of the end of the process, which is the test's."""
    sys.exit(status)
