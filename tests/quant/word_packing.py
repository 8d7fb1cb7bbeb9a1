"""Codes packed in 32-bit words as GPTQ's and AWQ's formats are described: bit by bit and nibble by nibble, in numpy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Codes = NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def packed_down(codes: Codes, bits: int) -> torch.Tensor:
    """Codes [N, M] -> int32 [ceil(N * bits / 32), M]: down each column a stream of bits, lowest first."""
    words = np.zeros((-(-codes.shape[0] * bits // 32), codes.shape[1]), dtype=np.uint32)
    for number, row in enumerate(codes):
        for bit in range(bits):
            at = number * bits + bit
            words[at // 32] |= ((row >> bit & 1) << at % 32).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def packed_across(codes: Codes, bits: int) -> torch.Tensor:
    """Codes [N, M] -> int32 [N, ceil(M * bits / 32)]."""
    return packed_down(codes.T, bits).T.contiguous()


def packed_awq(codes: Codes) -> torch.Tensor:
    """Codes [N, O] -> int32 [N, O/8]: nibble j of word c is column 8c + order[j]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for nibble, column in enumerate(AWQ_ORDER):
            words[:, word] |= (codes[:, 8 * word + column] << 4 * nibble).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32))


def kept_bytes(codes: Codes, bits: int) -> torch.Tensor:
    """Codes [I, O] as they are kept: uint8 [O, I] with 8 bits, else [O, ceil(I/2)], even inputs in the low nibble."""
    rows = codes.T.astype(np.uint8)
    if bits == 8:
        return torch.from_numpy(rows.copy())
    if rows.shape[1] % 2:
        rows = np.concatenate((rows, np.zeros((rows.shape[0], 1), np.uint8)), 1)
    return torch.from_numpy(rows[:, 0::2] | rows[:, 1::2] << 4)
