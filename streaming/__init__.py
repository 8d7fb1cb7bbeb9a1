"""firstlayer's runtime: a model is planned from headers, read in the background, and computed as its layers come.

    from streaming import LLM, SamplingParams

    with LLM("folder-or-file-or-hub-id", quantization="fp8_per_channel") as llm:
        for piece in llm.generate("The sea is", SamplingParams(max_tokens=64)):
            print(piece, end="", flush=True)

Importing this package imports no torch; names are looked up when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layers.sampling_params import SamplingParams
    from streaming.answers import Completion, Piece
    from streaming.async_llm import AsyncLLM
    from streaming.encoder import EncoderWeights, open_encoder
    from streaming.errors import (
        BudgetError,
        CheckpointError,
        CheckpointFormatError,
        LayerLoadError,
        MissingTensorError,
        OptionError,
        RankError,
        StreamClosedError,
        StreamingError,
        TensorMismatchError,
        WorkerError,
    )
    from streaming.hooks import Hooks
    from streaming.llm import LLM, open_llm
    from streaming.model import StreamedModel
    from streaming.options import LoadOptions
    from streaming.prepare import Prepared
    from streaming.quality import measure_quality
    from streaming.quality_report import Quality
    from streaming.residency import LayerState
    from streaming.sources import Source
    from streaming.stats import Summary

__all__ = [
    "LLM",
    "AsyncLLM",
    "BudgetError",
    "CheckpointError",
    "CheckpointFormatError",
    "Completion",
    "EncoderWeights",
    "Hooks",
    "LayerLoadError",
    "LayerState",
    "LoadOptions",
    "MissingTensorError",
    "OptionError",
    "Piece",
    "Prepared",
    "Quality",
    "RankError",
    "SamplingParams",
    "Source",
    "StreamClosedError",
    "StreamedModel",
    "StreamingError",
    "Summary",
    "TensorMismatchError",
    "WorkerError",
    "measure_quality",
    "open_encoder",
    "open_llm",
]

_HOMES = {
    "AsyncLLM": "streaming.async_llm",
    "LLM": "streaming.llm",
    "Completion": "streaming.answers",
    "EncoderWeights": "streaming.encoder",
    "Hooks": "streaming.hooks",
    "LayerState": "streaming.residency",
    "LoadOptions": "streaming.options",
    "Piece": "streaming.answers",
    "Prepared": "streaming.prepare",
    "Quality": "streaming.quality_report",
    "SamplingParams": "layers.sampling_params",
    "Source": "streaming.sources",
    "StreamedModel": "streaming.model",
    "Summary": "streaming.stats",
    "measure_quality": "streaming.quality",
    "open_encoder": "streaming.encoder",
    "open_llm": "streaming.llm",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "streaming.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
