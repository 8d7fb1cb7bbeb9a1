"""What `streaming` raises.

StreamingError
├── BudgetError            memory asked for is not there; says what is needed
├── CheckpointError        the checkpoint cannot be used
│   ├── CheckpointFormatError   a file is not what its name says, is cut short, or lies about itself
│   ├── MissingTensorError      parameters that no tensor fills
│   └── TensorMismatchError     tensors of the wrong shape or kind, or without a home
├── LayerLoadError         reading, slicing, quantizing or publishing one layer failed
├── StreamClosedError      the model was closed while somebody waited for a layer
├── OptionError            an option that cannot work, found before anything was read
├── RankError              one of the ranks that share the work died, failed, or keeps the others waiting
└── WorkerError            a process or thread of the runtime died
"""

from __future__ import annotations


class StreamingError(Exception):
    """Whatever the runtime raises on purpose: one clear line, fit for a user."""


class BudgetError(StreamingError):
    """More memory is needed than was granted; the message holds both numbers."""


class OptionError(StreamingError, ValueError):
    """An option's value cannot work; the message names the option, the value and what is possible."""


class CheckpointError(StreamingError):
    """The checkpoint cannot be used. `problems` lists every fault that its headers show, one line each."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


class CheckpointFormatError(CheckpointError):
    """A file is broken or is not what its name says; the message names the file."""


class MissingTensorError(CheckpointError):
    """Parameters that no tensor of the checkpoint fills."""


class TensorMismatchError(CheckpointError):
    """Tensors whose shape or dtype is not the parameter's, or that have no home."""


class LayerLoadError(StreamingError):
    """Loading one layer failed; names layer, stage and tensor."""

    def __init__(self, layer: str, stage: str, tensor: str, cause: BaseException | str) -> None:
        super().__init__(f"layer {layer}, stage {stage}, tensor {tensor}: {cause}")
        self.layer, self.stage, self.tensor = layer, stage, tensor


class RankError(StreamingError):
    """A rank died, failed or lags; names it, and where it was (empty where that is not known)."""

    def __init__(
        self, rank: int, cause: BaseException | str, *, layer: str = "", stage: str = "", tensor: str = ""
    ) -> None:
        where = [f"{word} {name}" for word, name in (("layer", layer), ("stage", stage), ("tensor", tensor)) if name]
        super().__init__(f"{', '.join([f'rank {rank}', *where])}: {cause}")
        self.rank, self.layer, self.stage, self.tensor = rank, layer, stage, tensor
        self.cause = str(cause)


class StreamClosedError(StreamingError):
    """The model was closed while the layer was still awaited."""


class WorkerError(StreamingError):
    """A process or a thread of the runtime ended without being asked to."""
