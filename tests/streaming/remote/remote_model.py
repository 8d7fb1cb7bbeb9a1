"""What the tests of remote models share: a prompt, little patience, and faults of weights alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from streaming import LLM
from streaming.remote.ranges import RetryPolicy
from tests.streaming.remote.range_server import Handler

IDS = [5, 9, 2, 7]
HASTY = RetryPolicy(attempts=3, first_wait_s=0.001, longest_wait_s=0.002, timeout_s=0.5)
PROXY_VARIABLES = [
    name for word in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for name in (word, word.upper())
]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def logits(model: str, **options: str) -> torch.Tensor:
    with LLM(model, **options) as llm:  # type: ignore[arg-type]
        found: torch.Tensor = llm.logits(IDS)
        llm.wait_loaded()
        return found


def on_weights(fault: Callable[[Handler], object]) -> Callable[[Handler], bool]:
    """The fault for requests of weights alone, not of headers."""

    def judged(handler: Handler) -> bool:
        if not handler.wants_weights:
            return False
        fault(handler)
        return True

    return judged
