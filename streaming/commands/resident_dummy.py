"""The made-up weights of format `dummy` once more, number by number, as its description says: for the resident model.

Where `streaming.dummy` copies runs of bytes, this puts each number together from its bits and takes it by its index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from layers.config import weight_map
from layers.decoder import DecoderModel, build_shell
from layers.eager import fill_shell
from layers.model_config import ModelConfig
from layers.weights import LayerSpec
from quant.dtypes import to_torch
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.dummy import own_names

_VALUES = 524_287
_CODES = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}


def dummy_model(
    checkpoint: Checkpoint, config: ModelConfig, specs: Sequence[LayerSpec], *, seed: int, device: str
) -> DecoderModel:
    """The whole model in memory, each tensor made at once."""
    model = build_shell(config, specs)
    numbers = _random_numbers(next(iter(checkpoint.tensors.values())))

    def get_tensor(name: str) -> torch.Tensor:
        return whole_tensor(checkpoint.tensors[name], numbers, seed=seed)

    get: Callable[[str], torch.Tensor] = get_tensor
    with torch.inference_mode():
        names = list(checkpoint.tensors)
        fill_shell(model, specs, own_names(weight_map(config)), names=names, get_tensor=get, device=device)
    return model


def whole_tensor(info: TensorInfo, numbers: torch.Tensor, *, seed: int) -> torch.Tensor:
    """A tensor of a made-up checkpoint: ones for a norm, else numbers from where its name says."""
    if info.file.name.startswith("ones"):
        return torch.ones(info.shape, dtype=numbers.dtype)
    digest = hashlib.blake2b(f"{seed}:{info.name}".encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little") % _VALUES
    return numbers[(torch.arange(info.numel) + start) % _VALUES].view(info.shape)


def _random_numbers(info: TensorInfo) -> torch.Tensor:
    """All numbers of the block: random bits, the exponent's upper ones set to those of 2^-7 and 2^-6."""
    dtype = to_torch(info.dtype)
    bits = dtype.itemsize * 8
    stream = hashlib.shake_128(f"firstlayer dummy {info.dtype.value}".encode()).digest(_VALUES * dtype.itemsize)
    codes = torch.frombuffer(bytearray(stream), dtype=_CODES[dtype.itemsize])
    mantissa = _MANTISSA[dtype]
    bias = (1 << (bits - 2 - mantissa)) - 1
    free = ((1 << (mantissa + 1)) - 1) | (-1 << (bits - 1))  # mantissa, the exponent's last bit, the sign
    even = (bias - 7) & ~1
    return ((codes & free) | (even << mantissa)).view(dtype)
