"""The `gguf` package, an optional one: the block encodings whose code books only it carries are decoded by it.

The IQ1, IQ2 and IQ3 encodings look groups of values up in grids of up to 2048 entries, which are tables of llama.cpp
and no formula. It is imported at the first block of such a file; whether it is there is known before, when the file
is opened. [no-torch]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streaming.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

BY_PACKAGE = frozenset({"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"})  # encodings
_INSTALL = "pip install gguf"


def package_fault() -> str | None:
    """What to install where the package is missing; None where it is there. Imports nothing."""
    from importlib.util import find_spec

    if find_spec("gguf") and find_spec("numpy"):
        return None
    return f"is decoded by the package gguf, which is not installed: {_INSTALL}"


def gguf_package() -> Any:
    """The package itself. OptionError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise OptionError(f"the package gguf is needed and cannot be imported ({error}): {_INSTALL}") from error
    return gguf


def decode_by_package(blocks: Tensor, name: str, out: Tensor) -> None:
    """Fill `out` float32 [N, V] with the values of `blocks` uint8 [N, block_nbytes]."""
    import numpy as np
    import torch

    gguf = gguf_package()
    raw = blocks.cpu().contiguous().numpy()
    with np.errstate(all="ignore"):  # a factor that is not finite is the weight checks' business
        # one long row: the package goes through rows in groups of 16, which blocks as rows would make slow
        values = gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[name])
    out.copy_(torch.from_numpy(values).view(out.shape))
