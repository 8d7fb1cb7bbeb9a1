"""A `.tensors` file's tensors for the resident model that `verify` compares with, by tensorizer's own reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from streaming.errors import OptionError

SUFFIX = ".tensors"


def open_tensorizer(files: Sequence[Path], stack: ExitStack) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    """The names, and what gives a tensor by its name. Raises OptionError without the package."""
    try:
        from tensorizer import TensorDeserializer
    except ImportError as error:
        raise OptionError("verify reads .tensors files by their own package: pip install tensorizer") from error
    opened = [stack.enter_context(closing(TensorDeserializer(str(file), device="cpu"))) for file in files]
    where = {name: reader for reader in opened for name in reader.keys()}  # noqa: SIM118  (not a mapping)

    def get_tensor(name: str) -> torch.Tensor:
        found: torch.Tensor = where[name][name].detach()
        return found

    return list(where), get_tensor
