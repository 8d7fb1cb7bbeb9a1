"""Logits of a whole prompt, for checks by other programs. Runs in the forward thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from layers.batch import make_batch
from layers.sampling_params import SamplingParams
from streaming.answers import Request
from streaming.model import StreamedModel


def prompt_logits(model: StreamedModel, token_ids: Sequence[int], stop: Callable[[], None]) -> torch.Tensor:
    """float32 logits [len(token_ids), vocab]. Raises OptionError for an empty prompt or ids outside the vocabulary."""
    request = model.fitted(Request(tuple(token_ids), SamplingParams(max_tokens=1)))
    device = model.runner.device.torch_device
    new = [(request.prompt_ids, model.new_cache(len(request.prompt_ids)))]
    batch = make_batch(new, vocab_size=model.prepared.config.vocab_size, device=device)
    return model.runner.forward(batch, range(len(request.prompt_ids)), stop=stop)
