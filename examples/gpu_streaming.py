"""What gpu_check measures of a model that does not fit into the GPU memory that it is granted."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.gpu_measure import Gpu, copy_rate
from layers.sampling_params import SamplingParams
from streaming import LLM, LoadOptions, Prepared
from streaming.commands.prompt_ids import seeded_ids
from streaming.prepare import prepare
from streaming.stream_budget import needs_of

GRANTED_SHARE = 0.3  # of what lies between the least that the model can be streamed in and what it takes whole
CONTEXT, PROMPT_TOKENS, ANSWER_TOKENS = 128, 32, 16


@dataclass(frozen=True)
class StreamedRun:
    """A model within a limit, beside the same one without. `device_peak` and `limit` in bytes of the GPU; `pass_nbytes`
    are copied for a token, at best in `copy_s`; `largest_difference` of the logits."""

    limit: int
    device_peak: int
    pass_nbytes: int
    host_nbytes: int
    token_s: float
    copy_s: float
    same_bits: bool
    largest_difference: float
    read_again: int  # weights that the host keeps and that were read more than once


def run_streamed(folder: Path, gpu: Gpu, scheme: str) -> StreamedRun:
    """Load the model twice: whole, and within a limit, with all of the others in the host's memory."""
    whole = prepare(str(folder), _options(gpu, scheme, None))
    prompt = seeded_ids(PROMPT_TOKENS, whole.config.vocab_size)
    expected = _logits(whole, prompt)
    assert whole.budget_of is not None
    least = needs_of(whole.plan, whole.budget_of).least_nbytes
    limit = least + int(GRANTED_SHARE * max(0, whole.budget.peak_nbytes - least))
    prepared = prepare(str(folder), _options(gpu, scheme, limit))
    stream = prepared.plan.stream
    assert stream is not None
    gc.collect()
    gpu.reset_peak()
    with LLM.start(prepared) as llm:
        found: torch.Tensor = llm.logits(prompt).cpu()  # from here on the host has what it keeps
        llm.complete([prompt], SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True))
        stats, spans = llm.stats(), llm.tracer.spans()
    peak = gpu.peak_nbytes()
    read = [span.name for span in spans if span.lane == "read"]
    kept = {item.tensor.name for unit in stream.units if unit.name in stream.tier for item in unit.items}
    rate = copy_rate(gpu, [unit.nbytes for unit in stream.streamed])
    return StreamedRun(
        limit, peak, stream.pass_nbytes, int(stats.stream["host_bytes"]), 1 / (stats.decode_tok_s or 1e-9),
        stream.pass_nbytes / rate, torch.equal(found, expected), float((found - expected).abs().max()),
        sum(read.count(name) > 1 for name in kept),
    )  # fmt: skip


def _options(gpu: Gpu, scheme: str, limit: int | None) -> LoadOptions:
    return LoadOptions(device=gpu.name, quantization=scheme, memory=limit, max_model_len=CONTEXT, cache_size=0)


def _logits(prepared: Prepared, prompt: list[int]) -> torch.Tensor:
    gc.collect()
    with LLM.start(prepared) as llm:
        found: torch.Tensor = llm.logits(prompt)
        return found.cpu()
