"""What a caller can be told while a model loads and runs. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def _nothing(layer: str, stage: str, nbytes: int, seconds: float) -> None:
    """Nobody watches."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks, each called from a thread of the runtime: they must be short and must not raise.

    warn(text): something the user should know. on_stage(layer, stage, nbytes, seconds): the whole layer has passed
    "read", "quantize" or "publish". layer_outputs(layer, hidden): a decoder layer's output [T, hidden], forward thread.
    """

    warn: Callable[[str], None] = logger.warning
    on_stage: Callable[[str, str, int, float], None] = _nothing
    layer_outputs: Callable[[str, torch.Tensor], None] | None = None
