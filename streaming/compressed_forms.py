"""Stored tensors of one module in the forms of the compressed-tensors layout (see compressed_layout)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from quant.dtypes import to_torch
from quant.scheme import StoredSpec
from streaming.compressed_layout import Form

_WORD_NBYTES = 4
_CODES_A_WORD = 8


def written_tensor(form: Form, parts: Sequence[torch.Tensor], spec: StoredSpec, *, in_features: int) -> torch.Tensor:
    """The written tensor, in the shape and dtype of `spec`, from the stored tensors of each section of the module."""
    if form is Form.SHAPE:
        return torch.tensor([sum(part.shape[0] for part in parts), in_features], dtype=torch.int64)
    stored = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if form is Form.WORDS:
        return _words(stored)
    if form is Form.COLUMN_WORDS:
        return _column_words(stored)
    if form is Form.BYTES:
        return stored.view(torch.uint8)
    if form is Form.RECIPROCAL:
        return stored.float().reciprocal()
    return stored.to(to_torch(spec.dtype)).view(spec.shape)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes each, U8 [O, bytes], as I32 [O, words]; the last word of a row is filled up with zeros."""
    padded = F.pad(codes, (0, -codes.shape[1] % _WORD_NBYTES)).contiguous()
    return padded.view(torch.int32)


def _column_words(zeros: torch.Tensor) -> torch.Tensor:
    """A zero point a byte, U8 [O, G], as I32 [ceil(O / 8), G]: eight rows a word, the first one lowest."""
    padded = F.pad(zeros, (0, 0, 0, -zeros.shape[0] % _CODES_A_WORD)).view(-1, _CODES_A_WORD, zeros.shape[1])
    pairs = padded[:, 0::2] | (padded[:, 1::2] << 4)  # [words, 4, G]
    words = pairs.transpose(1, 2).reshape(-1).view(torch.int32)  # one run of bytes: a lone group's strides are no words
    return words.view(padded.shape[0], zeros.shape[1])
